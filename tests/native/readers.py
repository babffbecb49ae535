"""A segment for tests of readers, made as fetchd makes it, but without fetchd."""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from dataclasses import dataclass

from relay.protocol.messages import SegmentOffer
from relay.protocol.segment import ControlPage, lay_out, segment_bytes
from thaw.model import FileRange, TensorInfo

SLAB_BYTES = 2 * 1024 * 1024
FILE = "model.safetensors"


@dataclass
class Made:
    page: ControlPage
    page_bytes: mmap.mmap
    fds: list[int]
    offer: SegmentOffer

    def own_fds(self) -> list[int]:
        return [os.dup(fd) for fd in self.fds]

    def write(self, at: int, data: bytes) -> None:
        while data:
            slab, inside = divmod(at, SLAB_BYTES)
            n = os.pwrite(self.fds[1 + slab], data[: SLAB_BYTES - inside], inside)
            at, data = at + n, data[n:]

    def close(self) -> None:
        for fd in self.fds:
            os.close(fd)


def make_segment(n_bytes: int, tensors: Sequence[TensorInfo] = (), name: str = "native-test") -> Made:
    layout = lay_out([FileRange("config.json", 0, 100), FileRange(FILE, 0, n_bytes)])
    whole = segment_bytes(layout)
    n_slabs = -(-whole // SLAB_BYTES)
    fds = [os.memfd_create(name) for _ in range(n_slabs + 1)]
    for fd, size in zip(fds, [mmap.PAGESIZE, *[SLAB_BYTES] * n_slabs], strict=True):
        os.ftruncate(fd, size)
    page_bytes = mmap.mmap(fds[0], mmap.PAGESIZE)
    offer = SegmentOffer("s", whole, SLAB_BYTES, n_slabs, layout, tuple(tensors))
    return Made(ControlPage(page_bytes, whole), page_bytes, fds, offer)


def tensor(name: str, offset: int, dtype: str, item_bytes: int, shape: tuple[int, ...]) -> TensorInfo:
    n_bytes = item_bytes
    for dimension in shape:
        n_bytes *= dimension
    return TensorInfo(name, FILE, offset, n_bytes, dtype, shape)
