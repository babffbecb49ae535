"""A fetch as a list of chunks: what is read by one request and checked as one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import xxhash

from relay.messages import PlacedRange
from thaw.errors import ModelCorrupt
from thaw.model import CHUNK_BYTES, ModelIndex


@dataclass(frozen=True, slots=True)
class Chunk:
    """Bytes read and checked as one.  ``xxh3`` is empty while unknown; ``number`` is None for a part of a chunk.

    Only whole chunks of a file have a checksum: the ends of a range that begins or stops inside one rely on TCP and
    on the etag.
    """

    file: str
    offset: int
    n_bytes: int
    segment_offset: int
    number: int | None
    xxh3: str = ""


def plan_chunks(layout: Sequence[PlacedRange], index: ModelIndex) -> list[Chunk]:
    """Cut the ranges at the files' chunk boundaries.  Raises ModelCorrupt for bytes that the model does not have."""
    files = {f.name: f for f in index.files}
    chunks: list[Chunk] = []
    for p in layout:
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
            known = file.chunks_xxh3[number] if whole and file.chunks_xxh3 else ""
            chunks.append(Chunk(p.file, at, count, p.segment_offset + at - p.offset, number if whole else None, known))
            at += count
    return chunks


def checksum(pieces: Sequence[memoryview]) -> str:
    """XXH3-64 over the pieces, as the index writes it; the GIL is free meanwhile."""
    digest = xxhash.xxh3_64()
    for piece in pieces:
        digest.update(piece)
    return digest.hexdigest()
