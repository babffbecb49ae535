"""Writes a model's files into a directory, chunk by chunk, and goes on where an earlier process was killed.

::

    model.safetensors.part     chunk 0 ✓ │ chunk 1 ✓ │ half of chunk 2     its chunks are compared with the digests …
    model.safetensors          … and only a file that is complete and whole gets its name

A chunk is 8 MiB, the unit of the model's digests.  A model without an index has no digests: its files begin anew.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO, Final, TypeVar

from thaw.checkpoints import checkpoint, hash_tree
from thaw.checkpoints.leaf_digest import digest
from thaw.errors import ModelChanged, ModelCorrupt, PlatformError, ProtocolError, ThawError, Throttled, Unavailable
from thaw.kserve.model_port import File, Listing, ModelPortClient
from thaw.logs import Log
from thaw.model import CHUNK_BYTES

T = TypeVar("T")

_PAUSE_S: Final = 1.0
_LONGEST_PAUSE_S: Final = 15.0
_WRONG_CHUNKS: Final = 3
"""A chunk that is wrong may have been damaged on its way.  One that is wrong so often is not asked for again."""
_VERSIONS: Final = 5
"""A model that is pushed again during its download is begun again so often."""


class Download:
    """One model.  ``patience_s``: the longest time without a new byte."""

    def __init__(self, port: ModelPortClient, name: str, directory: Path, patience_s: float, log: Log) -> None:
        self._port, self._name, self._directory, self._log = port, name, directory, log
        self._patience_s = patience_s
        self._progress_s = time.monotonic()

    def run(self) -> Listing:
        """Raises the port's errors, ModelCorrupt for bytes that are not the model's, and OSError of the directory."""
        for left in range(_VERSIONS - 1, -1, -1):
            listing = self._patiently(lambda: self._port.listing(self._name))
            try:
                for file in listing.files:
                    self._file(listing, file)
            except ModelChanged:
                if not left:
                    raise
                continue
            write_shards(self._directory, listing)
            return listing
        raise AssertionError  # the last round returns or raises

    def _file(self, listing: Listing, file: File) -> None:
        path = self._directory / file.name
        path.parent.mkdir(parents=True, exist_ok=True)
        digests = self._digests(listing, file)
        if digests is not None and path.is_file() and path.stat().st_size == file.n_bytes:
            with path.open("rb") as done:
                if held_chunks(done, digests) == len(digests):
                    return
        part = path.with_name(f"{path.name}.part")
        with part.open("r+b" if part.is_file() else "w+b") as out:
            kept = CHUNK_BYTES * held_chunks(out, digests) if digests is not None else 0
            out.truncate(min(kept, file.n_bytes))
            self._fill(listing, file, digests, out)
        part.replace(path)
        self._log.event("file_written", file=file.name, n_bytes=file.n_bytes, kept_bytes=min(kept, file.n_bytes))

    def _digests(self, listing: Listing, file: File) -> tuple[str, ...] | None:
        if not listing.verified:
            return None
        found = self._patiently(lambda: self._port.digests(self._name, listing.version, file.name))
        if len(found) != hash_tree.n_chunks(file.n_bytes):
            raise ProtocolError(f"{file.name}: {len(found)} digests for {file.n_bytes} bytes")
        return found

    def _fill(self, listing: Listing, file: File, digests: tuple[str, ...] | None, out: BinaryIO) -> None:
        wrong = 0

        def more() -> None:
            """Append what one answer brings."""
            nonlocal wrong
            at = out.seek(0, os.SEEK_END)
            if digests is None:
                at = out.seek(0)
                out.truncate()
            if at >= file.n_bytes:
                return
            with self._port.bytes_of(self._name, listing.version, file, at) as body:
                while at < file.n_bytes:
                    data = body.read(min(CHUNK_BYTES, file.n_bytes - at))
                    if digests is not None and digest(data) != digests[at // CHUNK_BYTES]:
                        wrong += 1
                        raise _wrong(file, at, wrong)
                    out.write(data)
                    at, wrong, self._progress_s = at + len(data), 0, time.monotonic()

        self._patiently(more)
        out.flush()

    def _patiently(self, ask: Callable[[], T]) -> T:
        """Call ``ask`` until it succeeds, or fails for a reason that does not pass, or no byte came for too long."""
        pause_s = _PAUSE_S
        while True:
            began_s = self._progress_s
            try:
                return ask()
            except ThawError as e:
                if self._progress_s > began_s:
                    pause_s = _PAUSE_S
                if not passes(e) or time.monotonic() + pause_s > self._progress_s + self._patience_s:
                    raise
                self._log.event("waits", error=e.message, hint=e.hint, seconds=pause_s)
            threading.Event().wait(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)


def passes(error: ThawError) -> bool:
    """Whether the same request may succeed later."""
    return isinstance(error, PlatformError | Throttled) and not isinstance(error, ModelChanged)


def _wrong(file: File, at: int, n_times: int) -> ThawError:
    where = f"{file.name}: the chunk at byte {at} is not the model's"
    if n_times < _WRONG_CHUNKS:
        return Unavailable(where)
    return ModelCorrupt(f"{where}, {n_times} times", hint="something between this pod and its node changes bytes")


def held_chunks(file: BinaryIO, digests: tuple[str, ...]) -> int:
    """How many chunks at the beginning of ``file`` have their digests."""
    for number, (data, wanted) in enumerate(zip(_chunks(file), digests, strict=False)):
        if digest(data) != wanted:
            return number
    return min(len(digests), -(-file.tell() // CHUNK_BYTES))


def _chunks(file: BinaryIO) -> Iterator[bytes]:
    file.seek(0)
    while data := file.read(CHUNK_BYTES):
        yield data


def write_shards(directory: Path, listing: Listing) -> None:
    """Write the index of the shards, which a push leaves out because the headers of the weights say the same."""
    weights = [f for f in listing.files if f.name.endswith(".safetensors")]
    if len(weights) < 2:
        return
    places: dict[str, str] = {}
    n_bytes = 0
    for file in weights:
        with (directory / file.name).open("rb") as f:
            length = checkpoint.header_bytes(file.name, f.read(checkpoint.LENGTH_BYTES), file.n_bytes)
            for tensor in checkpoint.parse_header(file.name, f.read(length), file.n_bytes):
                places[tensor.name] = file.name
                n_bytes += tensor.n_bytes
    text = json.dumps({"metadata": {"total_size": n_bytes}, "weight_map": dict(sorted(places.items()))}, indent=1)
    part = directory / f"{checkpoint.SHARDS_NAME}.part"
    part.write_text(text)
    part.replace(directory / checkpoint.SHARDS_NAME)
