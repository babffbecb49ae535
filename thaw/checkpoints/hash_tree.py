"""The hash tree of a checkpoint, whose root is the model's version: it binds every byte, and every line of the index.

::

                      root                     SHA-256 of the lines below, in order of name and of place
            ┌───────────┴─────────────┐
      file config.json …        tensor model.norm.weight …      a line each: its place and its digests
            │                         │
      chunk 0, chunk 1 …        edge, edge                      BLAKE3 of 8 MiB, or of a tensor's part of them

A fetch checks its bytes against the leaves.  A reader of an index computes the root from the leaves and compares it
with the version that was wanted.  The digest function of the leaves is the caller's, because this module loads the
standard library only.  See docs/formats/checkpoint-index.md.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, Final

from thaw.model import CHUNK_BYTES, ModelFile, TensorInfo

Digest = Callable[[bytes | memoryview], str]
"""Returns the BLAKE3 of its argument as 64 hex digits."""

_BEGIN: Final = b"thaw-index 2\n"
_ENCODE: Final = json.JSONEncoder(separators=(",", ":")).encode  # ASCII, so a line feed is only ever the end of a line


def root(files: Iterable[ModelFile], tensors: Iterable[TensorInfo]) -> str:
    """The version of a verified model.  It does not depend on the order of the arguments."""
    tree = hashlib.sha256(_BEGIN)
    for f in sorted(files, key=lambda f: f.name):
        chunks = hashlib.sha256("".join(f.chunks_blake3).encode()).hexdigest()
        tree.update(_line("file", f.name, f.n_bytes, f.sidecar, chunks))
    for t in sorted(tensors, key=lambda t: (t.file, t.offset, t.n_bytes, t.name)):
        tree.update(_line("tensor", t.name, t.file, t.offset, t.n_bytes, t.dtype, t.shape, t.edges_blake3))
    return tree.hexdigest()


def _line(*values: Any) -> bytes:
    return _ENCODE(values).encode() + b"\n"


def holds(file: ModelFile, data: bytes, digest: Digest) -> bool:
    """Whether ``data`` is the content of the file, of which all digests are known."""
    view = memoryview(data)
    found = tuple(digest(view[at : at + CHUNK_BYTES]) for at in range(0, len(data), CHUNK_BYTES))
    return len(data) == file.n_bytes and found == file.chunks_blake3


def n_chunks(n_bytes: int) -> int:
    return -(-n_bytes // CHUNK_BYTES)


def edges(tensor: TensorInfo) -> tuple[tuple[int, int], ...]:
    """``(offset, n_bytes)`` of the tensor's part of its first chunk and, if the tensor ends in another chunk, of its
    part of that last chunk.

    Between the two lie only whole chunks, which have digests of their own.  So every byte of a fetch that begins and
    stops at tensors can be checked chunk by chunk, wherever the fetch cuts the file.
    """
    if tensor.n_bytes == 0:
        return ()
    end = tensor.offset + tensor.n_bytes
    border = (tensor.offset // CHUNK_BYTES + 1) * CHUNK_BYTES
    if end <= border:
        return ((tensor.offset, tensor.n_bytes),)
    last = (end - 1) // CHUNK_BYTES * CHUNK_BYTES
    return (tensor.offset, border - tensor.offset), (last, end - last)


class TensorDigests:
    """Computes the digests of the edges of one file's tensors.  The chunks come in file order, and ``tensors`` is in
    order of offset.
    """

    def __init__(self, tensors: Sequence[TensorInfo], digest: Digest) -> None:
        self._tensors, self._digest = tensors, digest
        self._edges = [(offset, n_bytes, i) for i, t in enumerate(tensors) for offset, n_bytes in edges(t)]
        self._edges.sort(reverse=True)  # the next edge is the last item
        self._digests: list[list[str]] = [[] for _ in tensors]
        self._at = 0

    def update(self, chunk: bytes) -> None:
        """Take the next CHUNK_BYTES of the file; the last chunk may be shorter."""
        view = memoryview(chunk)
        while self._edges and self._edges[-1][0] < self._at + len(chunk):
            offset, n_bytes, i = self._edges.pop()
            self._digests[i].append(self._digest(view[offset - self._at : offset - self._at + n_bytes]))
        self._at += len(chunk)

    def tensors(self) -> tuple[TensorInfo, ...]:
        """The tensors with their digests; call this after ``update`` has seen the whole file."""
        return tuple(replace(t, edges_blake3=tuple(d)) for t, d in zip(self._tensors, self._digests, strict=True))
