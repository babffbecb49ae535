"""What a start is told of the memory of its stages, in the words of kv_memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from relay.protocol.messages import LlmInit, StageShape
from thaw.model import TensorInfo
from thaw.plan import StageRole
from thaw_runtime.engine.kv_memory import DTYPE_BYTES, Room, geometry, held_bytes, layer_count
from thaw_runtime.weights.segment import Segment
from thaw_runtime.weights.sidecars import model_config

_FLOATING = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}


def rooms_of(init: LlmInit, segment: Segment, dtype: str, *, quantised: bool) -> list[Room]:
    """Of every stage, from what all of them are told alike."""
    plain = model_config(segment)
    if init.n_stages == 1:
        weights = _weight_bytes(segment.offer.tensors, dtype)
        return [Room(init.reserve_bytes, weights, geometry(plain, layer_count(plain)))]
    return [_room(s, plain, dtype, whole=s.role is StageRole.FULL and not quantised, last=s is init.stages[-1])
            for s in init.stages]  # fmt: skip


def _room(stage: StageShape, plain: Mapping[str, Any], dtype: str, *, whole: bool, last: bool) -> Room:
    """A full worker's has the KV cache and the head of the whole model, for when it is one (window.py)."""
    n_layers = layer_count(plain) if whole else stage.layers[1] - stage.layers[0]
    shape = geometry(plain, n_layers, last_stage=last or whole)
    return Room(stage.reserve_bytes, held_bytes(stage.weight_bytes, plain, dtype), shape)


def _weight_bytes(tensors: Sequence[TensorInfo], dtype: str) -> int:
    """As the model holds them: floating tensors in the engine's dtype, others (quantised) as they are."""
    return sum(t.n_bytes // _FLOATING[t.dtype] * DTYPE_BYTES[dtype] if t.dtype in _FLOATING else t.n_bytes
               for t in tensors)  # fmt: skip
