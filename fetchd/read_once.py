"""Each byte of a model is read once per host.

A reader copies the bytes that another segment has, and waits for the bytes that another fetch is reading.

::

    segment A   [====verified====][reading]..............        A's range
    segment B            [copied ][ waits ][ claimed, read ]      B's range, cut at the same 8 MiB of the file

A reader decides this per chunk.  A claim is held only while its bytes are being read, not in a pause that the store has
asked for, and a reader that holds one never waits for another, so there is no deadlock.  If a claim ends without its
bytes, because its fetch failed or pauses, the readers that waited take them from the store.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass

from fetchd.chunks import Chunk
from fetchd.pacing import Pacer
from fetchd.segments import Segment, SegmentStore

Place = tuple[str, str, str, int]
"""(the model's files, in two words; file, chunk number)"""


@dataclass(frozen=True, slots=True)
class Gap:
    """Bytes of a chunk that only the store has; ``at`` counts from the chunk's first byte."""

    at: int
    n_bytes: int


@dataclass(frozen=True, slots=True)
class Claim:
    place: Place
    begin: int
    end: int
    owner: Pacer


class Board:
    """The claims of all readers.  Thread-safe."""

    def __init__(self, store: SegmentStore) -> None:
        self._store = store
        self._changed = threading.Condition()
        self._claims: dict[Place, list[Claim]] = {}
        self._version = 0

    @property
    def version(self) -> int:
        """A number that grows with every claim that ends; read it before you try claims for :meth:`wait`."""
        return self._version

    def claim(self, segment: Segment, chunk: Chunk, owner: Pacer) -> Claim | list[Pacer]:
        """Return the right to read ``chunk``, or the pacers of the fetches that are reading a part of it."""
        place = (*segment.key.files, chunk.file, chunk.number)
        wanted = Claim(place, chunk.offset, chunk.offset + chunk.n_bytes, owner)
        with self._changed:
            present = self._claims.setdefault(place, [])
            others = [c.owner for c in present if c.begin < wanted.end and wanted.begin < c.end]
            if others:
                return others
            present.append(wanted)
            return wanted

    def release(self, claim: Claim) -> None:
        with self._changed:
            present = self._claims[claim.place]
            present.remove(claim)
            if not present:
                del self._claims[claim.place]
            self._version += 1
            self._changed.notify_all()

    def wait(self, version: int, blockers: list[Pacer], me: Pacer, cancelled: Callable[[], bool]) -> None:
        """Sleep until a claim has ended since ``version`` was read; ``blockers`` read with our rank meanwhile."""
        with ExitStack() as stack:
            stack.enter_context(me.waiting_for([b for b in blockers if b is not me]))
            with self._changed:
                self._changed.wait_for(lambda: self._version != version or cancelled())

    def wake(self) -> None:
        """Let every sleeper check its ``cancelled`` again."""
        with self._changed:
            self._changed.notify_all()

    def copy(self, segment: Segment, chunk: Chunk, needs_no_store: Callable[[], None] = lambda: None) -> list[Gap]:
        """Copy the parts of ``chunk`` that other segments of the same model have; return the parts that none has.

        ``needs_no_store`` is called before the bytes are copied, when they are all of the chunk.
        """
        at, end, gaps = chunk.offset, chunk.offset + chunk.n_bytes, list[Gap]()
        copies: list[tuple[int, Segment, int, int]] = []
        pinned = self._store.pin(segment.key, chunk.file, chunk.number)
        try:
            pieces = [(*p, s) for s in pinned for p in s.arrived_in(chunk.file, chunk.number)]
            for begin, stop, offset, source in sorted(pieces, key=lambda p: p[:2]):
                if stop <= at or begin >= end:
                    continue
                if begin > at:
                    gaps.append(Gap(at - chunk.offset, begin - at))
                    at = begin
                n_bytes = min(stop, end) - at
                copies.append((chunk.segment_offset + at - chunk.offset, source, offset + at - begin, n_bytes))
                at += n_bytes
            if at < end:
                gaps.append(Gap(at - chunk.offset, end - at))
            if not gaps:
                needs_no_store()
            for each in copies:
                segment.copy(*each)
        finally:
            self._store.unpin(pinned)
        return gaps
