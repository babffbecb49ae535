"""Tensors of a segment for torch, each as soon as its bytes have arrived: views on a CPU, copies on a CUDA device.

There are two implementations: the native parameter manager, and torch.frombuffer over the Python reader.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Protocol

import torch

from thaw.errors import ModelCorrupt, ModelUnsupported
from thaw.model import TensorInfo
from thaw_runtime.weights.parameter_manager import NativeSegment
from thaw_runtime.weights.readable_segment import Segment

DTYPES: Mapping[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}


class Arriving(Protocol):
    """First ``wait`` for tensor ``i``, then ``take`` it; each tensor can be taken once."""

    def wait(self, i: int, deadline_s: float) -> None:
        """Wait until the tensor has arrived.  Raises the same errors as the segment's ``wait``."""
        ...

    def take(self, i: int) -> torch.Tensor: ...


def arriving(segment: Segment, tensors: Sequence[TensorInfo]) -> Arriving:
    """Access to ``tensors``, in this order.  Raises ModelUnsupported or ModelCorrupt for a tensor that the engine
    cannot use.
    """
    return _Native(segment, tensors) if isinstance(segment, NativeSegment) else _Views(segment, tensors)


def _check(info: TensorInfo) -> None:
    if info.dtype not in DTYPES:
        raise ModelUnsupported(f"tensor {info.name} has dtype {info.dtype}, which the engine does not have")
    if math.prod(info.shape) * DTYPES[info.dtype].itemsize != info.n_bytes:
        raise ModelCorrupt(f"tensor {info.name}: shape {list(info.shape)} of {info.dtype} is not {info.n_bytes} bytes")


class _Native:
    def __init__(self, segment: NativeSegment, tensors: Sequence[TensorInfo]) -> None:
        self._load = segment.load(tensors)
        self._cuda = segment.manager.cuda
        # DLPack has no dtype for eight-bit floats here, so they come as bytes and are viewed as floats.
        self._viewed = {i: DTYPES[t.dtype] for i, t in enumerate(tensors) if t.dtype in ("F8_E4M3", "F8_E5M2")}

    def wait(self, i: int, deadline_s: float) -> None:
        self._load.wait(i, deadline_s, torch.cuda.current_stream().cuda_stream if self._cuda else None)

    def take(self, i: int) -> torch.Tensor:
        tensor: torch.Tensor = torch.from_dlpack(self._load.capsule(i))
        return tensor.view(self._viewed[i]) if i in self._viewed else tensor


class _Views:
    def __init__(self, segment: Segment, tensors: Sequence[TensorInfo]) -> None:
        for info in tensors:
            _check(info)
        self._segment = segment
        self._tensors = tensors
        self._offsets = [segment.locate(t.file, t.offset) for t in tensors]

    def wait(self, i: int, deadline_s: float) -> None:
        self._segment.wait(self._offsets[i] + self._tensors[i].n_bytes, deadline_s)

    def take(self, i: int) -> torch.Tensor:
        info, dtype = self._tensors[i], DTYPES[self._tensors[i].dtype]
        if info.n_bytes == 0:
            return torch.empty(info.shape, dtype=dtype)
        view = self._segment.view(self._offsets[i], info.n_bytes)
        return torch.frombuffer(view, dtype=dtype).view(info.shape)
