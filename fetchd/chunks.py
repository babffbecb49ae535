"""A fetch as a list of chunks.  A chunk is read by one request and checked before the watermark passes it."""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from blake3 import blake3

from relay.protocol.messages import PlacedRange
from thaw.checkpoints import hash_tree
from thaw.errors import ModelCorrupt
from thaw.model import CHUNK_BYTES, ModelFile, ModelIndex, TensorInfo


@dataclass(frozen=True, slots=True)
class Check:
    """``[offset, +n_bytes)`` of the file must have this BLAKE3; empty while unknown."""

    what: str  # "chunk 3", "tensor model.norm.weight"
    offset: int
    n_bytes: int
    blake3: str


@dataclass(frozen=True, slots=True)
class Chunk:
    """Bytes of one chunk of a file, read by one request.  ``later`` marks bytes of the fetch's later part.

    A whole chunk has one check.  When a range cuts a chunk, the edges of the tensors in the remaining part are checked
    instead.  A tensor that the range itself cuts relies on TCP and on the etag for that piece.
    """

    file: str
    offset: int
    n_bytes: int
    segment_offset: int
    checks: tuple[Check, ...]
    later: bool = False

    @property
    def number(self) -> int:
        """Which chunk of the file it is (a part of)."""
        return self.offset // CHUNK_BYTES


def plan_chunks(layout: Sequence[PlacedRange], index: ModelIndex, n_first: int | None = None) -> list[Chunk]:
    """Cut the ranges at the files' chunk borders; the chunks of ranges from number ``n_first`` on are ``later``.

    Raises ModelCorrupt for bytes that the model does not have.
    """
    files = {f.name: f for f in index.files}
    tensors = _Tensors(index)
    chunks: list[Chunk] = []
    for i, p in enumerate(layout):
        file = files.get(p.file)
        if file is None or p.offset + p.n_bytes > file.n_bytes:
            has = "no such file" if file is None else f"{file.n_bytes} bytes"
            raise ModelCorrupt(f"{p.file}: [{p.offset}, +{p.n_bytes}) was planned; the model has {has}")
        at, end = p.offset, p.offset + p.n_bytes
        while at < end:
            number = at // CHUNK_BYTES
            border = min((number + 1) * CHUNK_BYTES, file.n_bytes)
            count = min(border, end) - at
            whole = at == number * CHUNK_BYTES and at + count == border
            checks = _whole(file, number, count) if whole else tensors.checks(p.file, at, count)
            later = n_first is not None and i >= n_first
            chunks.append(Chunk(p.file, at, count, p.segment_offset + at - p.offset, checks, later))
            at += count
    return chunks


def digest(pieces: Sequence[memoryview]) -> str:
    """Return the BLAKE3 of the pieces, written as in the index.  It does not hold the GIL while it computes."""
    state = blake3()
    for piece in pieces:
        state.update(piece)
    return state.hexdigest()


def _whole(file: ModelFile, number: int, n_bytes: int) -> tuple[Check, ...]:
    known = file.chunks_blake3[number] if file.chunks_blake3 else ""
    return (Check(f"chunk {number}", number * CHUNK_BYTES, n_bytes, known),)


class _Tensors:
    """A model's tensors by place, for the few chunks that a range cuts."""

    def __init__(self, index: ModelIndex) -> None:
        self._by_file: dict[str, list[TensorInfo]] = {}
        for t in index.tensors:  # in order of offset within a file
            self._by_file.setdefault(t.file, []).append(t)

    def checks(self, file: str, offset: int, n_bytes: int) -> tuple[Check, ...]:
        """The tensors' edges that lie wholly inside the part of a chunk ``[offset, +n_bytes)``."""
        found = (c for t in self._overlapping(file, offset, n_bytes) for c in _edge_checks(t))
        return tuple(c for c in found if offset <= c.offset and c.offset + c.n_bytes <= offset + n_bytes)

    def _overlapping(self, file: str, offset: int, n_bytes: int) -> Iterator[TensorInfo]:
        tensors = self._by_file.get(file, [])
        first = bisect.bisect_right(tensors, offset, key=lambda t: t.offset + t.n_bytes)
        for i in range(first, len(tensors)):
            if tensors[i].offset >= offset + n_bytes:
                return
            yield tensors[i]


def _edge_checks(t: TensorInfo) -> Iterator[Check]:
    edges = hash_tree.edges(t)
    for (offset, n_bytes), known in zip(edges, t.edges_blake3 or ("",) * len(edges), strict=True):
        yield Check(f"tensor {t.name}", offset, n_bytes, known)
