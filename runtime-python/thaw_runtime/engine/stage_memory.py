"""Compute the memory of every stage from the message that starts one of them, in the form that kv_memory.py takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from relay.protocol.messages import LlmInit, StageShape
from thaw.model import TensorInfo
from thaw.plan import StageRole
from thaw_runtime.engine.kv_memory import (
    DTYPE_BYTES,
    Geometry,
    StageMemory,
    State,
    adapter_bytes,
    geometry,
    held_bytes,
    layer_count,
)
from thaw_runtime.weights.readable_segment import Segment
from thaw_runtime.weights.sidecars import model_config, model_tensors

_FLOATING = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}


def stage_memories(
    init: LlmInit,
    segment: Segment,
    dtype: str,
    *,
    quantised: bool,
    on_cpu: bool,
    samples: bool = True,
    keeps_kv: bool = True,
    state: State | None = None,
) -> list[StageMemory]:
    """The memory of every stage; each stage computes the same list, because all get the same numbers.  ``samples`` is
    False for an embedding model, which has no logits, and ``keeps_kv`` for an encoder.  A model whose layers keep a
    ``state`` has one stage."""
    plain = model_config(segment)
    if init.n_stages == 1:
        shape = geometry(plain, layer_count(plain), last_stage=samples, keeps_kv=keeps_kv, state=state)
        weights = _weight_bytes(model_tensors(segment), dtype) + slots_bytes(init, shape, dtype, on_cpu=on_cpu)
        return [StageMemory(init.reserve_bytes, weights, shape)]
    return [
        _stage_memory(s, plain, dtype, whole=s.role is StageRole.FULL and not quantised, last=s is init.stages[-1])
        for s in init.stages
    ]


def slots_bytes(init: LlmInit, shape: Geometry, dtype: str, *, on_cpu: bool) -> int:
    """Return the bytes of the adapters that an instance of the function can hold at once.  On a CPU they count twice,
    because vLLM keeps a copy of each loaded adapter in the host's memory."""
    slots = adapter_bytes(shape, dtype, init.config.engine.max_lora_rank, init.config.adapter_slots)
    return 2 * slots if on_cpu else slots


def _stage_memory(stage: StageShape, plain: Mapping[str, Any], dtype: str, *, whole: bool, last: bool) -> StageMemory:
    """A full worker has the KV cache and the head of the whole model, because it may become one (vllm/window.py)."""
    n_layers = layer_count(plain) if whole else stage.layers[1] - stage.layers[0]
    shape = geometry(plain, n_layers, last_stage=last or whole)
    return StageMemory(stage.reserve_bytes, held_bytes(stage.weight_bytes, plain, dtype), shape)


def _weight_bytes(tensors: Sequence[TensorInfo], dtype: str) -> int:
    """The bytes of the tensors as the model holds them: floating tensors in the engine's dtype, others (quantised)
    unchanged.
    """
    return sum(
        t.n_bytes // _FLOATING[t.dtype] * DTYPE_BYTES[dtype] if t.dtype in _FLOATING else t.n_bytes for t in tensors
    )
