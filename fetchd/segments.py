"""Segments: which are held, which stay resident, and which are evicted to make room.

::

    create ──▶ held (by fetches and containers) ──last holder goes──▶ resident ──room needed──▶ slabs back to the pool
                        ▲                                          │
                        └────────── same bytes wanted again ───────┘

A failed or cancelled segment is never resident.  A slab returns to the pool only when its segment has no holder.

A fetch that copies a chunk out of a segment *pins* that segment for as long as the copy takes.  A pin is no hold: a
segment that is only pinned counts as free, and a caller that needs its slabs waits until that one chunk is copied.
"""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple

from fetchd.slabs import SlabPool, create_sealable, seal_and_reopen
from relay.protocol.messages import PlacedRange, SegmentStatus
from relay.protocol.pool import content_key, n_slabs
from relay.protocol.segment import PAGE_BYTES, ControlPage, SegmentState, lay_out, segment_bytes
from thaw.errors import ErrorInfo, MemoryTooSmall, NotFound, PoolFull, ThawError
from thaw.hub.models import content_of
from thaw.ids import random_hex_id
from thaw.model import FileRange, TensorInfo


class SegmentKey(NamedTuple):
    """Keys with the same bytes may differ in their URI and version (hub/models.py).  The version is the root's SHA-256,
    or the etag while the model is unverified.  ``stamp`` tells whether local files were written after their index
    (Catalog.stamp)."""

    uri: str
    version: str
    ranges: tuple[FileRange, ...]
    later: tuple[FileRange, ...] = ()
    stamp: str = ""

    @property
    def content(self) -> str:
        """The name of these bytes in a host's reports."""
        return content_key(self.uri, self.version, self.ranges, self.later)

    @property
    def files(self) -> tuple[str, str]:
        """Equal for keys whose models have the same files."""
        return content_of(self.uri, self.version)

    def has_same_files(self, other: SegmentKey) -> bool:
        return (*self.files, self.stamp) == (*other.files, other.stamp)

    def has_same_bytes(self, other: SegmentKey) -> bool:
        return (self.ranges, self.later) == (other.ranges, other.later) and self.has_same_files(other)


MOST_SPARE_BYTES: Final = 136 << 20
MOST_SPARE: Final = 4
"""The size and the number of segments that have memory of their own beside the pool."""
_SPARE_SLAB_BYTES: Final = 4 << 20


class Arrived(NamedTuple):
    """``[begin, end)`` of one chunk of a file, verified, lies at ``segment_offset``."""

    begin: int
    end: int
    segment_offset: int


@dataclass(eq=False, slots=True)
class Segment:
    segment_id: str
    key: SegmentKey
    layout: tuple[PlacedRange, ...]
    n_bytes: int
    first_bytes: int  # the part that is fetched first: [0, first_bytes)
    slabs: tuple[int, ...]
    page: ControlPage
    control_fd: int
    pool: SlabPool
    content: str = field(init=False)
    """The segment's name in reports.  It is computed once: every status contains it, and a large model has thousands
    of ranges."""
    lock: threading.Lock = field(default_factory=threading.Lock)
    holders: dict[str, None] = field(default_factory=dict)  # in order of arrival
    pins: int = 0  # copies out of it that are running
    spare: bool = False  # its memory is its own, and it goes with its last holder
    tensors: tuple[TensorInfo, ...] = ()
    indexed: threading.Event = field(default_factory=threading.Event)
    """Set once ``tensors`` is final (or the fetch failed before): only then may a container be offered it."""
    error: ErrorInfo | None = None
    given_up: bool = False
    """The fetch was cancelled and may take a moment to end; no other stage may join it."""
    first_is_here: bool = False
    arrived: dict[tuple[str, int], list[Arrived]] = field(default_factory=dict)  # by file and number of the chunk

    def __post_init__(self) -> None:
        self.content = self.key.content

    def views(self, segment_offset: int, n_bytes: int) -> list[memoryview]:
        """Writable pieces of [segment_offset, +n_bytes), one per slab touched."""
        pieces: list[memoryview] = []
        while n_bytes > 0:
            number, at = divmod(segment_offset, self.pool.slab_bytes)
            count = min(n_bytes, self.pool.slab_bytes - at)
            pieces.append(self.pool.view(self.slabs[number])[at : at + count])
            segment_offset, n_bytes = segment_offset + count, n_bytes - count
        return pieces

    def copy(self, at: int, source: Segment, source_at: int, n_bytes: int) -> None:
        """Copy ``n_bytes`` of ``source``, which the caller has pinned, to byte ``at`` of this segment."""
        while n_bytes > 0:
            target = self.views(at, n_bytes)[0]
            piece = source.views(source_at, len(target))[0]
            target[: len(piece)] = piece
            at, source_at, n_bytes = at + len(piece), source_at + len(piece), n_bytes - len(piece)

    def arrived_in(self, file: str, number: int) -> tuple[Arrived, ...]:
        """The verified parts of one chunk."""
        return tuple(self.arrived.get((file, number), ()))

    def note_arrived(self, file: str, number: int, arrived: Arrived) -> None:
        self.arrived.setdefault((file, number), []).append(arrived)

    def read_only_fds(self) -> list[int]:
        return [self.control_fd, *(self.pool.read_only_fd(s) for s in self.slabs)]

    @property
    def complete(self) -> bool:
        return self.page.state is SegmentState.COMPLETE

    def advance(self, end: int) -> None:
        with self.lock:
            self.page.advance(end)

    def beat(self) -> None:
        with self.lock:
            self.page.beat()

    def set_index(self, tensors: Iterable[TensorInfo]) -> None:
        """Keep the tensors that lie wholly inside the layout, in the order in which they lie there; for a check of the
        model, which reads none of them, all."""
        if self.spare:
            self.tensors = tuple(replace(t, edges_blake3=()) for t in tensors)
            self.indexed.set()
            return
        spans: dict[str, list[PlacedRange]] = {}
        for p in self.layout:
            spans.setdefault(p.file, []).append(p)
        placed = ((_place(t, spans.get(t.file, ())), t) for t in tensors)
        inside = sorted(((at, t) for at, t in placed if at is not None), key=lambda found: found[0])
        self.tensors = tuple(replace(t, edges_blake3=()) for _, t in inside)  # a reader checks nothing
        self.indexed.set()

    def status(self) -> SegmentStatus:
        return SegmentStatus(
            self.segment_id,
            self.key.uri,
            self.n_bytes,
            self.page.end,
            tuple(self.holders),
            self.key.version,
            self.content,
            0 if self.spare else len(self.slabs),  # of the pool
            self.complete,
        )

    def serves(self, key: SegmentKey) -> bool:
        """Whether a start with ``key`` may use this segment.

        Complete segments serve every model with the same bytes.  A segment that is still being filled serves only its
        own model: its fetch may fail for reasons that concern only that model (access, a pause that its hub wants).
        Meanwhile, the start of another model gets a segment of its own, and read_once.py still reads each byte once.
        """
        if self.error is not None or not self.key.has_same_bytes(key):
            return False
        return self.complete or (not self.given_up and self.key.uri == key.uri)

    def finish(self) -> None:
        with self.lock:
            self.page.complete()

    def fail(self, error: ErrorInfo) -> None:
        with self.lock:
            if self.error is None:  # only the first error counts
                self.error = error
                self.page.fail(error)
        self.indexed.set()


def _place(tensor: TensorInfo, spans: Iterable[PlacedRange]) -> int | None:
    """The segment offset at which ``tensor`` begins; None when no range holds it whole."""
    for p in spans:
        if p.offset <= tensor.offset and tensor.offset + tensor.n_bytes <= p.offset + p.n_bytes:
            return p.segment_offset + tensor.offset - p.offset
    return None


def fetch_holder(group_id: str, stage: int) -> str:
    """The holder of a segment from the start of its fetch until a descriptor socket holds it."""
    return f"fetch:{group_id}/{stage}"


class SegmentStore:
    def __init__(self, pool: SlabPool, *, retain: bool) -> None:
        self._pool, self._retain = pool, retain
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._version = 0
        self._n_begun = 0  # segments with memory of their own that are not in the store yet
        self._by_id: dict[str, Segment] = {}  # least recently released first among those without holders

    def find(self, key: SegmentKey, holder: str) -> Segment | None:
        """Return a usable segment of exactly these bytes, now also held by ``holder``."""
        with self._lock:
            for segment in self._by_id.values():
                if segment.serves(key):
                    segment.holders[holder] = None
                    return segment
        return None

    def create(self, key: SegmentKey, holder: str, *, spare: bool = False) -> Segment:
        """Return a new segment held by ``holder``; evict segments without a holder to make room.  With ``spare`` it is
        small, has memory of its own, and is not kept: a full pool is a cache's normal state, and what it holds may be
        the next start's.

        Raises MemoryTooSmall when it can never fit, and PoolFull when it does not fit now, before any byte is fetched.
        """
        layout = lay_out((*key.ranges, *key.later))
        n_bytes, first_bytes = segment_bytes(layout), segment_bytes(layout[: len(key.ranges)])
        pool = self._own_pool(n_bytes) if spare else self._pool  # without the lock: its memory is faulted in
        count = n_slabs((*key.ranges, *key.later), pool.slab_bytes)
        with self._lock:
            if not spare:
                self._make_room(count, n_bytes)
            slabs = pool.take(count)
            page, control_fd = _control_page(n_bytes)
            segment = Segment(random_hex_id(), key, layout, n_bytes, first_bytes, slabs, page, control_fd, pool)
            self._n_begun -= spare
            segment.holders[holder], segment.spare = None, spare
            self._by_id[segment.segment_id] = segment
        return segment

    def hold(self, segment_id: str, holder: str) -> Segment:
        """Raises NotFound when the segment was evicted or never was."""
        with self._lock:
            segment = self._by_id.get(segment_id)
            if segment is None:
                raise NotFound(f"no segment {segment_id}", hint="start the fetch again")
            segment.holders[holder] = None
            return segment

    def pin(self, key: SegmentKey, file: str, number: int) -> list[Segment]:
        """Return the segments that have verified bytes of a chunk of the model of ``key``.

        Their slabs stay in place until :meth:`unpin`.  The caller must call it soon, because another thread may be
        waiting for the slabs.
        """
        with self._lock:
            found = [s for s in self._by_id.values() if s.key.has_same_files(key) and (file, number) in s.arrived]
            for segment in found:
                segment.pins += 1
        return found

    def unpin(self, segments: Iterable[Segment]) -> None:
        with self._lock:
            for segment in segments:
                segment.pins -= 1
            self._changed.notify_all()

    def drop(self, segment: Segment, holder: str) -> None:
        with self._lock:
            segment.holders.pop(holder, None)
            if segment.holders or segment.segment_id not in self._by_id:
                return
            if self._retain and segment.complete and not segment.spare:
                self._by_id[segment.segment_id] = self._by_id.pop(segment.segment_id)  # now the most recent
            else:
                self._remove(segment)
            self.note_change()

    def note_change(self) -> None:
        """Tell callers that wait for room that a segment became complete or lost its last holder."""
        with self._lock:
            self._version += 1
            self._changed.notify_all()

    def await_change(self, version: int, timeout_s: float) -> int:
        """Return the present version as soon as it differs from ``version``, or after ``timeout_s``."""
        with self._changed:
            self._changed.wait_for(lambda: self._version != version, timeout_s)
            return self._version

    def statuses(self) -> tuple[SegmentStatus, ...]:
        with self._lock:
            segments = tuple(self._by_id.values())
            return tuple(s.status() for s in segments)

    def _own_pool(self, n_bytes: int) -> SlabPool:
        """Raises MemoryTooSmall, PoolFull, PlatformError."""
        if n_bytes > MOST_SPARE_BYTES:
            raise MemoryTooSmall(f"{n_bytes} bytes are too many for a segment beside the pool")
        with self._lock:
            if sum(s.spare for s in self._by_id.values()) + self._n_begun >= MOST_SPARE:
                hint = "nothing to do: the next look finds room"
                raise PoolFull(f"{MOST_SPARE} models are being looked at", hint=hint)
            self._n_begun += 1
        try:
            return SlabPool(-(-n_bytes // _SPARE_SLAB_BYTES), _SPARE_SLAB_BYTES)
        except BaseException:
            with self._lock:
                self._n_begun -= 1
            raise

    def _make_room(self, count: int, n_bytes: int) -> None:
        while self._pool.free_slabs < count:
            idle = [s for s in self._by_id.values() if not s.holders]
            available = self._pool.free_slabs + sum(len(s.slabs) for s in idle)
            if count > available:
                raise self._too_full(count, n_bytes, available)
            self._remove(idle[0])  # one at a time: holders may change while it waits for a copy

    def close(self) -> None:
        """Remove all segments, whoever holds them."""
        with self._lock:
            for segment in list(self._by_id.values()):
                self._remove(segment)

    def _too_full(self, count: int, n_bytes: int, available: int) -> ThawError:
        size = self._pool.slab_bytes
        error = MemoryTooSmall if count > self._pool.n_slabs else PoolFull
        return error(
            f"the model needs {n_bytes} bytes of host memory ({count} slabs of {size}); "
            f"{available * size} of {self._pool.n_slabs * size} bytes are not in use",
            hint="raise THAW_FETCHD_POOL_MB, or wait until another model has gone",
        )

    def _remove(self, segment: Segment) -> None:
        """Take the segment out of the store.  Its slabs are free when this returns."""
        del self._by_id[segment.segment_id]
        self._changed.wait_for(lambda: segment.pins == 0)  # a chunk is copied in milliseconds
        os.close(segment.control_fd)
        segment.page.close()
        if segment.spare:
            segment.pool.close()
        else:
            self._pool.give_back(segment.slabs)


def _control_page(n_bytes: int) -> tuple[ControlPage, int]:
    fd = create_sealable("thaw-segment", PAGE_BYTES)
    mapped = mmap.mmap(fd, PAGE_BYTES, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
    return ControlPage(mapped, n_bytes), seal_and_reopen(fd)
