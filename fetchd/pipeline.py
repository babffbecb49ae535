"""One fetch's bytes: chunks off a shared counter, several connections, a watermark behind the last verified byte.

::

    chunk    0     1     2     3     4     5            each reader: next chunk → recv into the slab → checksum
            [ok]  [ok]  [..]  [ok]  [..]  [  ]          end = the end of chunk 1: 3 is there, but 2 is not

A store that breaks off is asked again from the byte reached; a chunk that fails its checksum is fetched once more.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from fetchd.backoff import backoff_s
from fetchd.chunks import Chunk, checksum
from fetchd.pacing import Pacer
from fetchd.segments import Segment
from fetchd.sources.base import Connection, Source, Target
from thaw.errors import ModelCorrupt, PlatformError, StoreUnavailable, ThawError
from thaw.trace import Phase, TraceEvent, event

_PROGRESS_BYTES: Final = 64 * 1024
"""An attempt that brought so much was no failure of the store as a whole: counting begins anew."""


class FetchCancelled(PlatformError):
    """Nobody wants the bytes any more.  Readers of the segment see a PlatformError."""


@dataclass(slots=True)
class Statistics:
    fetched_bytes: int = 0
    retries: int = 0
    refetched: int = 0
    cpu_s: float = 0.0
    first_byte: TraceEvent | None = None
    began_s: float = 0.0


class Transfer:
    """Fills one segment.  ``etags`` and ``learned`` belong to the model's catalogue entry."""

    def __init__(
        self, source: Source, segment: Segment, chunks: Sequence[Chunk], etags: dict[str, str],
        learned: dict[tuple[str, int], str], pacer: Pacer, *, connections: int, retries: int,
    ) -> None:  # fmt: skip
        self.source, self.segment, self.chunks = source, segment, chunks
        self.etags, self.learned, self.pacer, self.retries = etags, learned, pacer, retries
        self.statistics = Statistics(began_s=time.monotonic())
        self.connections = max(1, min(connections, len(chunks)))
        self.stopped = threading.Event()
        self._lock = threading.Lock()
        self._next = 0
        self._verified = [False] * len(chunks)
        self._prefix = 0
        self._error: ThawError | None = None
        self._readers = [_Reader(self) for _ in range(self.connections)]

    def run(self) -> None:
        """Returns when every byte is verified.  Raises the first error; then no reader runs any more."""
        threads = [threading.Thread(target=self._read, args=(r,), name="fetch-reader") for r in self._readers]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        if self._error is not None:
            raise self._error
        if self._prefix < len(self.chunks):
            raise FetchCancelled("the fetch was cancelled")

    def cancel(self) -> None:
        self.stopped.set()
        self.pacer.wake()
        for reader in self._readers:
            reader.interrupt()

    def count(self, n_bytes: int) -> None:
        with self._lock:
            if self.statistics.first_byte is None:
                self.statistics.first_byte = event(Phase.FETCH_FIRST_BYTE)
            self.statistics.fetched_bytes += n_bytes

    def count_retry(self) -> None:
        with self._lock:
            self.statistics.retries += 1

    def _read(self, reader: _Reader) -> None:
        began = time.thread_time()
        try:
            while (i := self._take()) is not None:
                reader.read(self.chunks[i])
                self._mark(i)
        except FetchCancelled:
            pass
        except ThawError as e:
            self._fail(e)
        except Exception as e:  # noqa: BLE001 - edge of a thread: a defect must end the fetch, not hang it
            self._fail(PlatformError(f"fetch failed: {type(e).__name__}: {e}"))
        finally:
            reader.close()
            with self._lock:
                self.statistics.cpu_s += time.thread_time() - began

    def _take(self) -> int | None:
        with self._lock:
            if self.stopped.is_set() or self._next == len(self.chunks):
                return None
            self._next += 1
            return self._next - 1

    def _mark(self, i: int) -> None:
        with self._lock:
            self._verified[i] = True
            if i != self._prefix:
                return
            while self._prefix < len(self.chunks) and self._verified[self._prefix]:
                self._prefix += 1
            last = self.chunks[self._prefix - 1]
            self.segment.advance(last.segment_offset + last.n_bytes)

    def _fail(self, error: ThawError) -> None:
        with self._lock:
            self._error = self._error or error
        self.cancel()


class _Reader:
    """One connection of a transfer, and the throttle of its reads."""

    def __init__(self, transfer: Transfer) -> None:
        self._transfer = transfer
        self._lock = threading.Lock()
        self._connection: Connection | None = None

    def read(self, chunk: Chunk) -> None:
        """Raises ModelCorrupt when the chunk fails its checksum twice."""
        t = self._transfer
        for attempt in range(2):
            pieces = t.segment.views(chunk.segment_offset, chunk.n_bytes)
            self._fill(chunk, Target(pieces))
            if chunk.number is None:
                return
            digest = checksum(pieces)
            expected = chunk.xxh3 or t.learned.setdefault((chunk.file, chunk.number), digest)
            if digest == expected:
                return
            t.statistics.refetched += attempt == 0
        raise ModelCorrupt(f"{chunk.file}: chunk {chunk.number} failed its checksum twice",
                           hint="the object at the store is damaged: push the model again")  # fmt: skip

    def quantum(self, most: int) -> int:
        return self._transfer.pacer.quantum(most)

    def before_read(self, n_bytes: int) -> None:
        self._transfer.pacer.take(n_bytes, self._transfer.stopped.is_set)
        self._check_stopped()

    def after_read(self, n_bytes: int) -> None:
        self._transfer.count(n_bytes)

    def interrupt(self) -> None:
        with self._lock:
            if self._connection is not None:
                self._connection.interrupt()

    def close(self) -> None:
        with self._lock:
            if self._connection is not None:
                self._connection.close()
            self._connection = None

    def _fill(self, chunk: Chunk, target: Target) -> None:
        """Until the target is full, resuming where a broken connection left it."""
        t, failures = self._transfer, 0
        while target.left:
            reached = target.done
            try:
                etag = self._connected().read_into(chunk.file, chunk.offset, target, self, t.etags.get(chunk.file, ""))
                self._pin(chunk.file, etag)
            except StoreUnavailable as e:
                self.close()
                self._check_stopped()
                failures = 1 if target.done - reached >= _PROGRESS_BYTES else failures + 1
                if failures >= t.retries:
                    raise StoreUnavailable(f"{e.message} (gave up after {failures} attempts)", hint=e.hint) from e
                t.count_retry()
                t.stopped.wait(backoff_s(failures))
                self._check_stopped()

    def _connected(self) -> Connection:
        with self._lock:
            if self._connection is None:
                self._connection = self._transfer.source.connect()
            connection = self._connection
        self._check_stopped()  # a cancel that came before there was something to interrupt
        return connection

    def _pin(self, file: str, etag: str) -> None:
        """The first answer decides which version of the object this fetch is of."""
        pinned = self._transfer.etags.setdefault(file, etag)
        if etag != pinned:
            raise ModelCorrupt(f"{file} changed at the store during the fetch", hint="start again")

    def _check_stopped(self) -> None:
        if self._transfer.stopped.is_set():
            raise FetchCancelled("the fetch was cancelled")
