"""One thread of a transfer: it reads chunks from the store, checks them, and goes on after a connection broke."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from fetchd.backoff import pause_s
from fetchd.chunks import Check, Chunk, digest
from fetchd.pacing import Pacer
from fetchd.progress import Progress
from fetchd.read_once import Board, Claim, Gap
from fetchd.reader_account import SHARE, STORE, ReaderAccount
from fetchd.segments import Segment
from fetchd.shared_connection import Read, SharedConnection
from fetchd.sources.base import Busy, Connection, Source, Target
from thaw.errors import ModelCorrupt, PlatformError, StoreUnavailable
from thaw.model import CHUNK_BYTES

_PROGRESS_BYTES: Final = 64 * 1024
"""After an attempt that brought this much, the count of failures begins again: the store as a whole works."""
_MOST_PAUSE_S: Final = 600.0
"""A start without progress for so long is given up anyway (THAW_START_DEADLINE_S), so a store that wants to be asked
only later has failed.  A cancelled fetch ends its pause at once."""


class FetchCancelled(PlatformError):
    """No group wants the bytes any more.  Readers of the segment get a PlatformError."""


@dataclass(frozen=True, slots=True)
class Origin:
    """The origin of a fetch's bytes.  ``learned`` belongs to the model's catalogue entry."""

    source: Source
    etags: dict[str, str]
    learned: dict[tuple[str, int, int], str]
    board: Board
    connections: int
    retries: int


@dataclass(frozen=True, slots=True)
class FetchContext:
    """What all readers of a fetch share."""

    origin: Origin
    segment: Segment
    pacer: Pacer
    progress: Progress
    stopped: threading.Event
    handover: threading.Condition
    """Guards which reader has which connection, and every ``ChunkReader.reading``.  Notified when a read begins."""


class ChunkReader:
    """A reader, and the throttle of its reads."""

    def __init__(self, context: FetchContext, shared: SharedConnection, chunk: Chunk) -> None:
        """``chunk``: any chunk of the fetch."""
        self._context, self._shared, self.chunk = context, shared, chunk
        self._has_turn = False
        self._n_handed_over = 0
        self.reading: Read | None = None
        """The read that may be given another connection now."""
        self.claim: Claim | None = None
        """The claim on the chunk; None while the store wants a pause."""
        self.account: ReaderAccount  # made by the thread that reads

    @property
    def chunk_s(self) -> float:
        """The time that a chunk takes on this reader's connection."""
        return self._shared.chunk_s

    # turns ---------------------------------------------------------------------------------------------------------

    def begin_turn(self) -> None:
        with self.account.waiting_for(self._waits_for(CHUNK_BYTES)):  # it waits for the same as the other reader
            self._acquire_turn()

    def try_turn(self) -> bool:
        """Take the turn if the other reader of this connection does not have it."""
        self._has_turn = self._shared.turn.acquire(blocking=False)
        return self._has_turn

    def end_turn(self) -> None:
        """Give the turn back.  This may be called twice."""
        if self._has_turn:
            self._has_turn = False
            self._shared.turn.release()

    def _acquire_turn(self) -> None:
        self._shared.turn.acquire()
        self._has_turn = True

    def hand_over_to(self, slow: ChunkReader) -> None:
        """Give this reader's connection, and the turn on it, to a reader with a read.  Get that one's for a new
        connection.  The caller holds the lock of the handover, and this reader has the turn."""
        slow._shared.give_up()
        self._shared, slow._shared = slow._shared, self._shared
        slow.reading = None
        slow._n_handed_over += 1

    # reading -------------------------------------------------------------------------------------------------------

    def read(self, chunk: Chunk) -> None:
        """Raises ModelCorrupt when a part of the chunk fails its checksum twice."""
        c, self.chunk, self._n_handed_over = self._context, chunk, 0
        gaps = c.origin.board.copy(c.segment, chunk, needs_no_store=self.end_turn)
        copied = chunk.n_bytes - sum(g.n_bytes for g in gaps)
        if copied:
            c.progress.count(chunk, copied, copied=True)
        failed = self._fetch(chunk, gaps)
        if failed is not None:
            c.progress.count_refetch()
            c.progress.count(chunk, -chunk.n_bytes)
            failed = self._fetch_alone(chunk)
        if failed is not None:
            raise ModelCorrupt(
                f"{chunk.file}: {failed.what} failed its checksum twice (bytes {failed.offset} to "
                f"{failed.offset + failed.n_bytes - 1} of the file)",
                hint="somebody has changed the object at the store, or it is damaged: push the model again",
            )

    def release(self) -> None:
        if self.claim is not None:
            self._context.origin.board.release(self.claim)
            self.claim = None

    def interrupt(self) -> None:
        self._shared.interrupt()

    def _fetch_alone(self, chunk: Chunk) -> Check | None:
        """Fetch all of a chunk on a connection of its own: the turn may be with a reader that waits for this chunk."""
        shared, self._shared = self._shared, SharedConnection(self._context.origin.source)
        try:
            return self._fetch(chunk, [Gap(0, chunk.n_bytes)])
        finally:
            alone, self._shared = self._shared, shared
            alone.close()

    def _waits_for(self, n_bytes: int) -> str:
        is_paced = self._context.pacer.quantum(n_bytes) < n_bytes
        return SHARE if is_paced else STORE

    def _fetch(self, chunk: Chunk, gaps: Sequence[Gap]) -> Check | None:
        """Read the gaps; return the first check of the chunk that fails."""
        segment, learned = self._context.segment, self._context.origin.learned
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

    def _fill(self, file: str, offset: int, target: Target) -> None:
        """Fill the target; after a broken connection go on from the byte reached."""
        c, failures = self._context, 0
        while target.left:
            reached = target.done
            try:
                self._read_on(file, offset, target)
            except StoreUnavailable as e:
                self._shared.close()
                self._check_stopped()
                failures = 1 if target.done - reached >= _PROGRESS_BYTES else failures + 1
                after_s = pause_s(failures, e)
                if failures >= c.origin.retries or after_s > _MOST_PAUSE_S:
                    raise StoreUnavailable(f"{e.message} (gave up after {failures} attempts)", hint=e.hint) from e
                c.progress.count_retry()
                if isinstance(e, Busy):
                    self._leave_alone(after_s)
                else:
                    c.stopped.wait(after_s)
                    self._check_stopped()

    def _read_on(self, file: str, offset: int, target: Target) -> None:
        """Fill the target, or return earlier when this reader has been given another connection.  Raises as
        Connection.read_into()."""
        connection, etags, reached = self._connected(), self._context.origin.etags, target.done
        read = Read(target, target.left, time.monotonic(), self._n_handed_over)
        try:
            with self._offering(read):
                etag = connection.read_into(file, offset, target, self, etags.get(file, ""))
        except StoreUnavailable:
            if self._keeps(connection):
                raise
            return
        self._pin(file, etag)
        if self._keeps(connection):
            self._shared.note_read(target.done - reached, read.began_s)

    @contextmanager
    def _offering(self, read: Read) -> Iterator[None]:
        """Inside the block, another reader may give its connection to this read.  Without the turn, this reader uses a
        connection of its own and is given none."""
        with self._context.handover:
            self.reading = read if self._has_turn else None
            self._context.handover.notify_all()
        try:
            yield
        finally:
            with self._context.handover:
                self.reading = None

    def _keeps(self, connection: Connection) -> bool:
        """Return False, and close it, if ``connection`` was given up for the one that this reader has now."""
        if self._shared.has(connection):
            return True
        connection.close()
        return False

    def _leave_alone(self, after_s: float) -> None:
        """Pause without the claim and without the turn: the store may give others the bytes that it does not give us.
        Afterwards the read goes on behind the bytes that we have, even if others have read the chunk meanwhile."""
        c, board, had_turn = self._context, self._context.origin.board, self._has_turn
        self.release()
        self.end_turn()
        c.stopped.wait(after_s)
        if had_turn:  # the turn before the claim, as at first: a reader with a claim must not wait for a turn
            self._acquire_turn()
        self._check_stopped()
        while self.claim is None:
            version = board.version
            found = board.claim(c.segment, self.chunk, c.pacer)
            if isinstance(found, Claim):
                self.claim = found
            else:
                board.wait(version, found, c.pacer, c.stopped.is_set)
                self._check_stopped()

    def _connected(self) -> Connection:
        connection = self._shared.get()
        self._check_stopped()  # the cancel may have come before there was a connection to interrupt
        return connection

    def _pin(self, file: str, etag: str) -> None:
        """The first answer decides which version of the object this fetch reads."""
        pinned = self._context.origin.etags.setdefault(file, etag)
        if etag != pinned:
            raise ModelCorrupt(f"{file} changed at the store during the fetch", hint="start again")

    def _check_stopped(self) -> None:
        if self._context.stopped.is_set():
            raise FetchCancelled("the fetch was cancelled")

    # the throttle --------------------------------------------------------------------------------------------------

    def quantum(self, most: int) -> int:
        return self._context.pacer.quantum(most)

    def before_read(self, n_bytes: int) -> None:
        read, began_s = self.reading, time.monotonic()
        if read is not None:
            read.is_held_back = True
        self._context.pacer.take(n_bytes, self._context.stopped.is_set, later=self.chunk.later)
        if read is not None:
            read.began_s, read.is_held_back = read.began_s + time.monotonic() - began_s, False
        self._check_stopped()

    def after_read(self, n_bytes: int) -> None:
        self._context.progress.count(self.chunk, n_bytes)
        self._context.pacer.count(n_bytes)
