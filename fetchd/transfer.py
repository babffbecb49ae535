"""Transfers one fetch's bytes: readers on several connections take chunks from a shared counter.

::

    chunk    0     1     2     3     4     5            each reader: next chunk → recv into the slab → digest
            [ok]  [ok]  [..]  [ok]  [..]  [  ]          end = the end of chunk 1: 3 is there, but 2 is not

Two readers take turns on one connection: while one computes a digest, which takes about a fifth of the time that the
bytes took on a fast link, the other asks for the next chunk.

A chunk that another segment has is copied; a chunk that another fetch is reading is put off (read_once.py).  When a
connection breaks, the store is asked again from the byte reached.  A chunk whose digest is wrong is fetched once
more, from the store.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from fetchd import metrics
from fetchd.backoff import pause_s
from fetchd.chunks import Check, Chunk, digest
from fetchd.pacing import Pacer
from fetchd.read_once import Board, Claim, Gap
from fetchd.reader_account import OTHERS, SHARE, STORE, ReaderAccount
from fetchd.segments import Arrived, Segment
from fetchd.sources.base import Busy, Connection, Source, Target
from thaw.errors import ModelCorrupt, PlatformError, StoreUnavailable
from thaw.model import CHUNK_BYTES
from thaw.tracing.trace import Phase, TraceEvent, event

_READERS_PER_CONNECTION: Final = 2
_PROGRESS_BYTES: Final = 64 * 1024
"""After an attempt that brought this much, the count of failures begins again: the store as a whole works."""
_MOST_PAUSE_S: Final = 600.0
"""A start without progress for so long is given up anyway (THAW_START_DEADLINE_S), so a store that wants to be asked
only later has failed.  A cancelled fetch ends its pause at once."""


class FetchCancelled(PlatformError):
    """No group wants the bytes any more.  Readers of the segment get a PlatformError."""


@dataclass(slots=True)
class Statistics:
    fetched_bytes: int = 0  # from the store
    copied_bytes: int = 0  # from other segments
    retries: int = 0
    refetched: int = 0
    cpu_s: float = 0.0
    first_byte: TraceEvent | None = None
    began_s: float = 0.0
    last_reader: dict[str, object] = field(default_factory=dict)  # the account of the connection that ended last


@dataclass(frozen=True, slots=True)
class Origin:
    """The origin of a fetch's bytes.  ``learned`` belongs to the model's catalogue entry."""

    source: Source
    etags: dict[str, str]
    learned: dict[tuple[str, int, int], str]
    board: Board
    connections: int
    retries: int


class Transfer:
    """Fills one segment.  ``on_first`` is called once the chunks that are not ``later`` are there."""

    def __init__(
        self, origin: Origin, segment: Segment, chunks: Sequence[Chunk], pacer: Pacer, on_first: Callable[[], None]
    ) -> None:
        self.origin, self.segment, self.chunks, self.pacer = origin, segment, chunks, pacer
        self.statistics = Statistics(began_s=time.monotonic())
        self.connections = max(1, min(origin.connections, len(chunks)))
        self.stopped = threading.Event()
        self._on_first = on_first
        self._fetched = metrics.BYTES.labels(source=origin.source.kind)
        self._copied = metrics.BYTES.labels(source="memory")
        self._lock = threading.Lock()
        self._next = 0
        self._put_off: list[int] = []  # in order; another fetch was reading a part of each
        self._verified = [False] * len(chunks)
        self._prefix = 0
        self._n_first = sum(not c.later for c in chunks)
        self._first_is_here = threading.Event()  # or the fetch has ended
        self._first_left = sum(c.n_bytes for c in chunks if not c.later)
        self._later_left = sum(c.n_bytes for c in chunks if c.later)
        self._error: Exception | None = None
        self._shared = [_SharedConnection(origin.source) for _ in range(self.connections)]
        n_readers = min(_READERS_PER_CONNECTION * self.connections, max(1, len(chunks)))
        self._readers = [_Reader(self, self._shared[i % self.connections]) for i in range(n_readers)]

    @property
    def pending_bytes(self) -> tuple[int, int]:
        """The numbers of bytes that have not arrived yet: those of the first part, and those of the later part."""
        return max(self._first_left, 0), max(self._later_left, 0)

    def run(self) -> None:
        """Return when every byte is verified.  Raises the first error, after all readers have ended."""
        if not self._n_first:
            self._first_is_here.set()
            self._on_first()
        threads = [threading.Thread(target=self._read, args=(r,), name="fetch-reader") for r in self._readers]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        for shared in self._shared:
            shared.close()
        if self._error is not None:
            raise self._error
        if self._prefix < len(self.chunks):
            raise FetchCancelled("the fetch was cancelled")

    def cancel(self) -> None:
        self.stopped.set()
        self._first_is_here.set()
        self.pacer.wake()
        self.origin.board.wake()
        for reader in self._readers:
            reader.interrupt()

    def count(self, chunk: Chunk, n_bytes: int, *, copied: bool = False) -> None:
        """Record that ``n_bytes`` of ``chunk`` are in the segment; a negative number takes damaged bytes back."""
        with self._lock:
            if chunk.later:
                self._later_left -= n_bytes
            else:
                self._first_left -= n_bytes
            if n_bytes < 0:
                return
            if self.statistics.first_byte is None:
                self.statistics.first_byte = event(Phase.FETCH_FIRST_BYTE)
            if copied:
                self.statistics.copied_bytes += n_bytes
            else:
                self.statistics.fetched_bytes += n_bytes
        (self._copied if copied else self._fetched).inc(n_bytes)

    def count_retry(self) -> None:
        with self._lock:
            self.statistics.retries += 1

    def _read(self, reader: _Reader) -> None:
        spent, reader.account = 0.0, ReaderAccount()
        try:
            while (taken := self._take_in_turn(reader)) is not None:
                i, reader.claim = taken
                try:
                    reader.read(self.chunks[i])
                    spent = self._account(spent)
                    self._mark(i)
                finally:
                    reader.end_turn()
                    reader.release()
        except FetchCancelled:
            pass
        except Exception as e:  # noqa: BLE001 - edge of a thread: a defect must end the fetch, not hang it
            self._fail(e)
        finally:
            self._account(spent)
            with self._lock:
                self.statistics.last_reader = reader.account.attrs()

    def _account(self, spent: float) -> float:
        """Add this thread's CPU time since ``spent``; return the thread's CPU clock."""
        now = time.thread_time()
        with self._lock:
            self.statistics.cpu_s += now - spent
        return now

    def _take_in_turn(self, reader: _Reader) -> tuple[int, Claim] | None:
        """Wait for the reader's turn, and only then take a chunk: nobody else should wait for one that is not read."""
        reader.begin_turn()
        taken = self._take(reader.account)
        if taken is None:
            reader.end_turn()
        return taken

    def _take(self, account: ReaderAccount) -> tuple[int, Claim] | None:
        """Return the next chunk that no other fetch is reading; sleep while there is none.  None when all are taken.

        No later chunk is requested before the first part is there: a store sends all that was requested, and the
        kernel accepts megabytes of it, however slowly we read.
        """
        board = self.origin.board
        while not self.stopped.is_set():
            version = board.version
            with self._lock:
                found, blockers = self._claim_next()
                if found is not None or not (self._put_off or self._next < len(self.chunks)):
                    return found
                is_early = not self._put_off
            with account.waiting_for(OTHERS):
                if is_early:
                    self._first_is_here.wait()
                else:
                    board.wait(version, blockers, self.pacer, self.stopped.is_set)
        return None

    def _claim_next(self) -> tuple[tuple[int, Claim] | None, list[Pacer]]:
        """Claim a chunk if one is free, and return the fetches in the way of the others.

        Chunks that were put off come first: they are nearer to the watermark.
        """
        blockers: list[Pacer] = []
        for i in tuple(self._put_off):
            claim = self.origin.board.claim(self.segment, self.chunks[i], self.pacer)
            if isinstance(claim, Claim):
                self._put_off.remove(i)
                return (i, claim), blockers
            blockers += claim
        while self._next < (len(self.chunks) if self._first_is_here.is_set() else self._n_first):
            i = self._next
            self._next += 1
            claim = self.origin.board.claim(self.segment, self.chunks[i], self.pacer)
            if isinstance(claim, Claim):
                return (i, claim), blockers
            self._put_off.append(i)
            blockers += claim
        return None, blockers

    def _mark(self, i: int) -> None:
        chunk = self.chunks[i]
        end = chunk.offset + chunk.n_bytes
        self.segment.note_arrived(chunk.file, chunk.number, Arrived(chunk.offset, end, chunk.segment_offset))
        with self._lock:
            self._verified[i] = True
            if i != self._prefix:
                return
            before = self._prefix
            while self._prefix < len(self.chunks) and self._verified[self._prefix]:
                self._prefix += 1
            last = self.chunks[self._prefix - 1]
            self.segment.advance(last.segment_offset + last.n_bytes)
            first_is_here = before < self._n_first <= self._prefix
        if first_is_here:
            self._first_is_here.set()
            self._on_first()

    def _fail(self, error: Exception) -> None:
        with self._lock:
            self._error = self._error or error
        self.cancel()


class _SharedConnection:
    """A connection, made when it is needed, that readers use in turns.  Any thread may interrupt it."""

    def __init__(self, source: Source) -> None:
        self.turn = threading.Lock()
        self._source = source
        self._lock = threading.Lock()
        self._connection: Connection | None = None

    def get(self) -> Connection:
        with self._lock:
            if self._connection is None:
                self._connection = self._source.connect()
            return self._connection

    def interrupt(self) -> None:
        with self._lock:
            if self._connection is not None:
                self._connection.interrupt()

    def close(self) -> None:
        with self._lock:
            if self._connection is not None:
                self._connection.close()
            self._connection = None


class _Reader:
    """One thread of a transfer, and the throttle of its reads."""

    def __init__(self, transfer: Transfer, shared: _SharedConnection) -> None:
        self._transfer, self._shared = transfer, shared
        self._has_turn = False
        self._chunk: Chunk = transfer.chunks[0]
        self.claim: Claim | None = None
        """The claim on the chunk; None while the store wants a pause."""
        self.account: ReaderAccount  # made by the thread that reads

    def begin_turn(self) -> None:
        with self.account.waiting_for(self._waits_for(CHUNK_BYTES)):  # it waits for the same as the other reader
            self._acquire_turn()

    def _acquire_turn(self) -> None:
        self._shared.turn.acquire()
        self._has_turn = True

    def end_turn(self) -> None:
        """Give the turn back.  This may be called twice."""
        if self._has_turn:
            self._has_turn = False
            self._shared.turn.release()

    def read(self, chunk: Chunk) -> None:
        """Raises ModelCorrupt when a part of the chunk fails its checksum twice."""
        t, self._chunk = self._transfer, chunk
        gaps = t.origin.board.copy(t.segment, chunk, needs_no_store=self.end_turn)
        copied = chunk.n_bytes - sum(g.n_bytes for g in gaps)
        if copied:
            t.count(chunk, copied, copied=True)
        failed = self._fetch(chunk, gaps)
        if failed is not None:
            t.statistics.refetched += 1
            t.count(chunk, -chunk.n_bytes)
            failed = self._fetch_alone(chunk)
        if failed is not None:
            raise ModelCorrupt(
                f"{chunk.file}: {failed.what} failed its checksum twice (bytes {failed.offset} to "
                f"{failed.offset + failed.n_bytes - 1} of the file)",
                hint="somebody has changed the object at the store, or it is damaged: push the model again",
            )

    def _fetch_alone(self, chunk: Chunk) -> Check | None:
        """Fetch all of a chunk on a connection of its own: the turn may be with a reader that waits for this chunk."""
        shared, self._shared = self._shared, _SharedConnection(self._transfer.origin.source)
        try:
            return self._fetch(chunk, [Gap(0, chunk.n_bytes)])
        finally:
            alone, self._shared = self._shared, shared
            alone.close()

    def _waits_for(self, n_bytes: int) -> str:
        is_paced = self._transfer.pacer.quantum(n_bytes) < n_bytes
        return SHARE if is_paced else STORE

    def _fetch(self, chunk: Chunk, gaps: Sequence[Gap]) -> Check | None:
        """Read the gaps; return the first check of the chunk that fails."""
        segment, learned = self._transfer.segment, self._transfer.origin.learned
        for gap in gaps:
            target = Target(segment.views(chunk.segment_offset + gap.at, gap.n_bytes))
            with self.account.waiting_for(self._waits_for(gap.n_bytes)):
                self._fill(chunk.file, chunk.offset + gap.at, target)
        self.end_turn()
        for check in chunk.checks:
            at = chunk.segment_offset + check.offset - chunk.offset
            found = digest(segment.views(at, check.n_bytes))
            if found != (check.blake3 or learned.setdefault((chunk.file, check.offset, check.n_bytes), found)):
                return check
        return None

    def quantum(self, most: int) -> int:
        return self._transfer.pacer.quantum(most)

    def before_read(self, n_bytes: int) -> None:
        self._transfer.pacer.take(n_bytes, self._transfer.stopped.is_set, later=self._chunk.later)
        self._check_stopped()

    def after_read(self, n_bytes: int) -> None:
        self._transfer.count(self._chunk, n_bytes)
        self._transfer.pacer.count(n_bytes)

    def interrupt(self) -> None:
        self._shared.interrupt()

    def release(self) -> None:
        if self.claim is not None:
            self._transfer.origin.board.release(self.claim)
            self.claim = None

    def _fill(self, file: str, offset: int, target: Target) -> None:
        """Fill the target; after a broken connection go on from the byte reached."""
        t, failures = self._transfer, 0
        etags, retries = t.origin.etags, t.origin.retries
        while target.left:
            reached = target.done
            try:
                etag = self._connected().read_into(file, offset, target, self, etags.get(file, ""))
                self._pin(file, etag)
            except StoreUnavailable as e:
                self._shared.close()
                self._check_stopped()
                failures = 1 if target.done - reached >= _PROGRESS_BYTES else failures + 1
                after_s = pause_s(failures, e)
                if failures >= retries or after_s > _MOST_PAUSE_S:
                    raise StoreUnavailable(f"{e.message} (gave up after {failures} attempts)", hint=e.hint) from e
                t.count_retry()
                if isinstance(e, Busy):
                    self._leave_alone(after_s)
                else:
                    t.stopped.wait(after_s)
                    self._check_stopped()

    def _leave_alone(self, after_s: float) -> None:
        """Pause without the claim and without the turn: the store may give others the bytes that it does not give us.
        Afterwards the read goes on behind the bytes that we have, even if others have read the chunk meanwhile."""
        t, board, had_turn = self._transfer, self._transfer.origin.board, self._has_turn
        self.release()
        self.end_turn()
        t.stopped.wait(after_s)
        if had_turn:  # the turn before the claim, as at first: a reader with a claim must not wait for a turn
            self._acquire_turn()
        self._check_stopped()
        while self.claim is None:
            version = board.version
            found = board.claim(t.segment, self._chunk, t.pacer)
            if isinstance(found, Claim):
                self.claim = found
            else:
                board.wait(version, found, t.pacer, t.stopped.is_set)
                self._check_stopped()

    def _connected(self) -> Connection:
        connection = self._shared.get()
        self._check_stopped()  # the cancel may have come before there was a connection to interrupt
        return connection

    def _pin(self, file: str, etag: str) -> None:
        """The first answer decides which version of the object this fetch reads."""
        pinned = self._transfer.origin.etags.setdefault(file, etag)
        if etag != pinned:
            raise ModelCorrupt(f"{file} changed at the store during the fetch", hint="start again")

    def _check_stopped(self) -> None:
        if self._transfer.stopped.is_set():
            raise FetchCancelled("the fetch was cancelled")
