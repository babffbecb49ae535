"""Zeros that cost nothing until they are touched.  The KV cache is allocated with them (docs/decisions/0004)."""

from __future__ import annotations

import mmap
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class ZeroOnDemand(TorchFunctionMode):
    """Makes torch.zeros return a private anonymous mapping, whose pages the kernel zeroes when they are first touched.

    Without it, a cache of 1 GiB cost 0.8 s of page faults at the start, nearly all of them for blocks that a short
    conversation never uses.
    """

    MIN_BYTES = 1 << 20

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        plain = len(args) == 1 and isinstance(args[0], int) and kwargs.get("dtype") is torch.int8
        if func is torch.zeros and plain and args[0] >= self.MIN_BYTES:
            return torch.frombuffer(mmap.mmap(-1, args[0], mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), dtype=torch.int8)
        return func(*args, **kwargs)
