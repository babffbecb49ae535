"""Transfers one fetch's bytes: readers on several connections take chunks from a shared counter.

::

    chunk    0     1     2     3     4     5            each reader: next chunk → recv into the slab → digest
            [ok]  [ok]  [..]  [ok]  [..]  [  ]          end = the end of chunk 1: 3 is there, but 2 is not

Two readers take turns on one connection: while one computes a digest, which takes about a fifth of the time that the
bytes took on a fast link, the other asks for the next chunk.

A chunk that another segment has is copied; a chunk that another fetch is reading is put off (read_once.py).  When a
connection breaks, the store is asked again from the byte reached; so it is when a connection is much slower than
another one (shared_connection.py).  A chunk whose digest is wrong is fetched once more, from the store.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from typing import Final

from fetchd.chunk_reader import ChunkReader, FetchCancelled, FetchContext, Origin
from fetchd.chunks import Chunk
from fetchd.pacing import Pacer
from fetchd.progress import Progress
from fetchd.read_once import Claim
from fetchd.reader_account import OTHERS, ReaderAccount
from fetchd.segments import Arrived, Segment
from fetchd.shared_connection import SharedConnection

_READERS_PER_CONNECTION: Final = 2


class Transfer:
    """Fills one segment.  ``on_first`` is called once the chunks that are not ``later`` are there."""

    def __init__(
        self, origin: Origin, segment: Segment, chunks: Sequence[Chunk], pacer: Pacer, on_first: Callable[[], None]
    ) -> None:
        self.chunks, self.pacer = chunks, pacer
        self.progress = Progress(origin.source.kind, chunks)
        self.connections = max(1, min(origin.connections, len(chunks)))
        self.stopped = threading.Event()
        self._origin, self._segment, self._on_first = origin, segment, on_first
        self._lock = threading.Lock()
        self._next = 0
        self._put_off: list[int] = []  # in order; another fetch was reading a part of each
        self._verified = [False] * len(chunks)
        self._prefix = 0
        self._n_first = sum(not c.later for c in chunks)
        self._first_is_here, self._all_is_here = threading.Event(), threading.Event()  # or the fetch has ended
        self._error: Exception | None = None
        self._handover = threading.Condition()
        context = FetchContext(origin, segment, pacer, self.progress, self.stopped, self._handover)
        self._shared = [SharedConnection(origin.source) for _ in range(self.connections)]
        n_readers = min(_READERS_PER_CONNECTION * self.connections, max(1, len(chunks)))
        self._readers = [ChunkReader(context, self._shared[i % self.connections], chunks[0]) for i in range(n_readers)]

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
        self._all_is_here.set()
        self.pacer.wake()
        self._origin.board.wake()
        self._wake_waiting()
        for connection in self._shared:
            connection.interrupt()
        for reader in self._readers:  # one may have a connection of its own
            reader.interrupt()

    def _read(self, reader: ChunkReader) -> None:
        spent, reader.account = 0.0, ReaderAccount()
        try:
            while (taken := self._take_in_turn(reader)) is not None:
                i, reader.claim = taken
                try:
                    reader.read(self.chunks[i])
                    spent = self._account(spent)
                    self._mark(i, reader.account)
                finally:
                    reader.end_turn()
                    reader.release()
        except FetchCancelled:
            pass
        except Exception as e:  # noqa: BLE001 - edge of a thread: a defect must end the fetch, not hang it
            self._fail(e)
        finally:
            self._account(spent)

    def _account(self, spent: float) -> float:
        """Add this thread's CPU time since ``spent``; return the thread's CPU clock."""
        now = time.thread_time()
        self.progress.count_cpu(now - spent)
        return now

    # the next chunk ------------------------------------------------------------------------------------------------

    def _take_in_turn(self, reader: ChunkReader) -> tuple[int, Claim] | None:
        """Wait for the reader's turn, and only then take a chunk: nobody else should wait for one that is not read.
        None when the fetch needs this reader no more."""
        while True:
            reader.begin_turn()
            self._help_watermark(reader)
            taken = self._take(reader.account)
            if taken is None or isinstance(taken, tuple):
                break
            reader.end_turn()  # the reader of a chunk that others wait for may need it
            self._wait_for_readers(reader, taken)
        if taken is None:
            reader.end_turn()
        return taken

    def _take(self, account: ReaderAccount) -> tuple[int, Claim] | threading.Event | None:
        """Return the next chunk that no other fetch is reading; sleep while there is none.  When no chunk can be taken
        before others have arrived, return the event of that; None when all have.

        No later chunk is requested before the first part is there: a store sends all that was requested, and the
        kernel accepts megabytes of it, however slowly we read.
        """
        board = self._origin.board
        while not self.stopped.is_set():
            version = board.version
            with self._lock:
                found, blockers = self._claim_next()
                if found is not None:
                    return found
                if not self._put_off:
                    return self._awaited()
            with account.waiting_for(OTHERS):
                board.wait(version, blockers, self.pacer, self.stopped.is_set)
        return None

    def _awaited(self) -> threading.Event | None:
        if self._prefix == len(self.chunks):
            return None
        return self._first_is_here if self._next < len(self.chunks) else self._all_is_here

    def _claim_next(self) -> tuple[tuple[int, Claim] | None, list[Pacer]]:
        """Claim a chunk if one is free, and return the fetches in the way of the others.

        Chunks that were put off come first: they are nearer to the watermark.
        """
        blockers: list[Pacer] = []
        for i in tuple(self._put_off):
            claim = self._origin.board.claim(self._segment, self.chunks[i], self.pacer)
            if isinstance(claim, Claim):
                self._put_off.remove(i)
                return (i, claim), blockers
            blockers += claim
        while self._next < (len(self.chunks) if self._first_is_here.is_set() else self._n_first):
            i = self._next
            self._next += 1
            claim = self._origin.board.claim(self._segment, self.chunks[i], self.pacer)
            if isinstance(claim, Claim):
                return (i, claim), blockers
            self._put_off.append(i)
            blockers += claim
        return None, blockers

    def _mark(self, i: int, account: ReaderAccount) -> None:
        chunk = self.chunks[i]
        end = chunk.offset + chunk.n_bytes
        self._segment.note_arrived(chunk.file, chunk.number, Arrived(chunk.offset, end, chunk.segment_offset))
        with self._lock:
            self._verified[i] = True
            if i != self._prefix:
                return
            before = self._prefix
            while self._prefix < len(self.chunks) and self._verified[self._prefix]:
                self._prefix += 1
            last = self.chunks[self._prefix - 1]
            self._segment.advance(last.segment_offset + last.n_bytes)
            first_is_here = before < self._n_first <= self._prefix
            all_is_here = self._prefix == len(self.chunks)
        if first_is_here:
            self._first_is_here.set()
            self._wake_waiting()
            self._on_first()
        if all_is_here:
            self.progress.statistics.last_reader = account.attrs()
            self._all_is_here.set()
            self._wake_waiting()

    def _fail(self, error: Exception) -> None:
        with self._lock:
            self._error = self._error or error
        self.cancel()

    # slow connections ----------------------------------------------------------------------------------------------

    def _help_watermark(self, reader: ChunkReader) -> None:
        """Give the reader's connection, if it is much faster, to the reader of the chunk at the watermark."""
        with self._handover:
            at = self.chunks[self._prefix] if self._prefix < len(self.chunks) else None
            for slow in self._readers:
                if slow.chunk is at and self._overdue_in_s(reader, slow) <= 0:
                    self._hand_over(reader, slow)
                    return

    def _wait_for_readers(self, reader: ChunkReader, event: threading.Event) -> None:
        """Sleep until the others have read what they are reading.  The reader does not need its connection meanwhile,
        so any of them that has a slow one gets it."""
        with reader.account.waiting_for(OTHERS), self._handover:
            while not event.is_set():
                self._handover.wait(self._help_slowest(reader))

    def _help_slowest(self, reader: ChunkReader) -> float | None:
        """Return the seconds after which this may help, unless a read begins before; None for never."""
        slow = min(self._readers, key=lambda other: self._overdue_in_s(reader, other))
        seconds = self._overdue_in_s(reader, slow)
        if 0 < seconds < math.inf:
            return seconds
        if seconds == 0 and reader.try_turn():  # else the other reader of its connection has it, and will help
            self._hand_over(reader, slow)
            reader.end_turn()
        return None

    def _wake_waiting(self) -> None:
        with self._handover:
            self._handover.notify_all()

    def _overdue_in_s(self, reader: ChunkReader, other: ChunkReader) -> float:
        if other.reading is None or not self._origin.source.host:  # a file's reads have no connection
            return math.inf
        return other.reading.overdue_in_s(reader.chunk_s, time.monotonic())

    def _hand_over(self, reader: ChunkReader, slow: ChunkReader) -> None:
        reader.hand_over_to(slow)
        self.progress.count_slow_connection()
