"""The table of fetches.

Stages that want the same bytes share one fetch.  Requests with the epoch of an earlier scheduler are refused.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from dataclasses import replace

from fetchd import metrics, places
from fetchd.chunk_reader import FetchCancelled
from fetchd.fetch import Fetch, Machinery, Member, Wishes
from fetchd.janitor import Heart, Janitor
from fetchd.segments import SegmentKey, SegmentStore, fetch_holder
from relay.protocol.messages import FetchCancel, FetchDone, FetchStart, FetchStarted, FetchStatus
from thaw.checkpoints import checkpoint
from thaw.errors import BadRequest, MemoryTooSmall, NotFound, PoolFull, StaleEpoch, from_info
from thaw.logs import Log
from thaw.plan import PlanModel
from thaw.tracing.trace import Phase, event

_RUNNING = "running"


class FetchTable:
    def __init__(self, store: SegmentStore, machinery: Machinery, janitor: Janitor, heart: Heart, log: Log) -> None:
        self._store, self._machinery = store, machinery
        self._janitor, self._heart, self._log = janitor, heart, log
        self._host_id, self._hold_s = machinery.settings.host_id, machinery.settings.hold_s
        self._lock = threading.RLock()
        self._epoch = 0
        self._members: dict[tuple[str, int], Member] = {}
        self._running: dict[str, Fetch] = {}  # by segment id
        self._threads: set[threading.Thread] = set()

    def start(self, request: FetchStart) -> FetchStarted:
        """Begin a fetch, join one, or find the bytes resident.  A repeat changes its pace, deadline, rank and weight.

        Raises StaleEpoch, BadRequest, MemoryTooSmall, PoolFull, Throttled.
        """
        _check_ranges(request)
        request = self._of_version(request)
        stamp = self._machinery.catalog.stamp(request.model.uri, request.model.version)
        with self._lock:
            self._check_epoch(request.epoch)
            member = self._members.get((request.group_id, request.stage))
            if member is not None and (member.error is not None or member.fetch.segment.error is not None):
                self._store.drop(member.fetch.segment, member.holder)  # still held if only the later part failed
                member = None
            if member is None:
                self._check_places(request.namespace)
                member = self._join(request, stamp)
            else:
                member.wishes = _wishes(request)
                member.fetch.apply_wishes()
            segment = member.fetch.segment
            return FetchStarted(segment.segment_id, segment.n_bytes, member.resident, member.left_out_bytes)

    def cancel(self, request: FetchCancel) -> None:
        """Cancel a group's fetches.  An unknown group is no error, so a cancel may be repeated."""
        with self._lock:
            self._check_epoch(request.epoch)
            for key in [k for k in self._members if k[0] == request.group_id]:
                self._leave(self._members.pop(key))

    def wait(self, group_id: str, stage: int, timeout_s: float | None = None) -> FetchDone | None:
        """Wait for the first part and return the report; None after ``timeout_s``.  Raises the fetch's error."""
        with self._lock:
            member = self._member(group_id, stage)
        if not member.done.wait(timeout_s):
            return None
        if member.error is not None:
            raise from_info(member.error)
        return member.report()

    def statuses(self) -> tuple[FetchStatus, ...]:
        with self._lock:
            return tuple(m.fetch.status(m) for m in self._members.values() if m.fetch.running)

    def stop(self) -> None:
        with self._lock:
            for fetch in self._running.values():
                fetch.cancel()
            threads = list(self._threads)
        for thread in threads:
            thread.join(timeout=5)

    def _check_places(self, namespace: str) -> None:
        """Count the stages that wait, and the fetches that nobody wants but that have not ended: they keep their slabs.

        Raises Throttled.
        """
        unfinished = [m.request.namespace for m in self._members.values() if not m.done.is_set()]
        unfinished += [f.left_by for f in self._running.values() if not f.members]
        places.check_fetches(unfinished.count(namespace), len(unfinished), namespace)

    def _of_version(self, request: FetchStart) -> FetchStart:
        """Return the request with a version: one without gets the newest version."""
        if request.model.version:
            return request
        facts = self._machinery.catalog.inspect(request.model.uri)
        return replace(request, model=PlanModel(facts.uri, facts.sha256, facts.etag, facts.n_bytes))

    def _join(self, request: FetchStart, stamp: str) -> Member:
        holder = fetch_holder(request.group_id, request.stage)
        begin = event(Phase.FETCH_BEGIN, group_id=request.group_id, stage=request.stage, host=self._host_id)
        fetch = self._fetch_of(request, stamp, holder)
        segment = fetch.segment
        resident = segment.complete
        left_out = 0 if segment.key.later else sum(r.n_bytes for r in request.later_ranges)
        member = Member(request, fetch, begin, resident, _wishes(request), left_out)
        self._members[request.group_id, request.stage] = member
        fetch.members.append(member)
        if resident or not fetch.running:
            self._end_member(member)
            metrics.FETCHES.labels(outcome="resident").inc()
        else:
            fetch.apply_wishes()
            if segment.segment_id not in self._running:
                self._launch(fetch)
            elif segment.key.later and fetch.first_part_is_here:
                self._finish(member)
        self._log.event(
            "fetch_begin",
            group_id=request.group_id,
            stage=request.stage,
            uri=request.model.uri,
            segment_id=segment.segment_id,
            n_bytes=segment.n_bytes,
            resident=resident,
            left_out_bytes=left_out,
        )
        return member

    def _fetch_of(self, request: FetchStart, stamp: str, holder: str) -> Fetch:
        """Return the fetch whose segment has or will have the bytes.

        A stage needs its later part only to become a whole worker, so it does without when the pool has no room.
        """
        model = request.model
        key = SegmentKey(model.uri, model.version, request.ranges, request.later_ranges, stamp)
        try:
            return self._known(key, holder) or self._new(key, holder, spare=request.spare)
        except (MemoryTooSmall, PoolFull):
            if not key.later:
                raise
        key = key._replace(later=())
        return self._known(key, holder) or self._new(key, holder)

    def _known(self, key: SegmentKey, holder: str) -> Fetch | None:
        segment = self._store.find(key, holder)
        if segment is None:
            return None
        return self._running.get(segment.segment_id) or Fetch(segment, self._machinery)

    def _new(self, key: SegmentKey, holder: str, *, spare: bool = False) -> Fetch:
        return Fetch(self._store.create(key, holder, spare=spare), self._machinery, self._first_part_came)

    def _launch(self, fetch: Fetch) -> None:
        segment = fetch.segment
        self._store.hold(segment.segment_id, _RUNNING)
        self._running[segment.segment_id] = fetch
        self._heart.add(segment)
        thread = threading.Thread(target=self._run, args=(fetch,), name="fetch", daemon=True)
        self._threads.add(thread)
        thread.start()

    def _run(self, fetch: Fetch) -> None:
        fetch.run()
        segment = fetch.segment
        with self._lock:
            self._heart.remove(segment)
            del self._running[segment.segment_id]
            fetch.running = False
            _count(fetch)
            self._log.event(
                "fetch_end",
                segment_id=segment.segment_id,
                n_bytes=segment.n_bytes,
                error=fetch.error.message if fetch.error else None,
                **fetch.describe(False),
            )
            for member in fetch.members:
                self._end_member(member)
            self._threads.discard(threading.current_thread())
            self._store.drop(segment, _RUNNING)
        self._store.note_change()

    def _first_part_came(self, fetch: Fetch) -> None:
        with self._lock:
            if fetch.segment.key.later:  # without later ranges _run reports it, with the complete statistics
                for member in fetch.members:
                    self._finish(member)

    def _end_member(self, member: Member) -> None:
        """Call when the whole fetch has succeeded or failed.  The member's hold waits ``hold_s`` for a grant."""
        self._finish(member)
        if member.error is not None:  # a first part that arrived stays usable when the later part failed
            self._store.drop(member.fetch.segment, member.holder)
        self._janitor.call_later(self._hold_s, self._expiry(member))

    def _finish(self, member: Member) -> None:
        member.finish(self._host_id, self._heart.stops_since(member.begin.mono_ns))

    def _expiry(self, member: Member) -> Callable[[], None]:
        def expire() -> None:
            key = (member.request.group_id, member.request.stage)
            with self._lock:
                if self._members.get(key) is member:
                    del self._members[key]
                    self._store.drop(member.fetch.segment, member.holder)

        return expire

    def _leave(self, member: Member) -> None:
        """The group's interest ends; the fetch goes on while another group shares it."""
        fetch = member.fetch
        fetch.members.remove(member)
        if not member.done.is_set():
            member.error = FetchCancelled("the fetch was cancelled").info()
            member.done.set()
        if fetch.running and not fetch.members:
            fetch.left_by = member.request.namespace
            fetch.cancel()
        elif fetch.running:
            fetch.apply_wishes()
        self._store.drop(fetch.segment, member.holder)

    def _member(self, group_id: str, stage: int) -> Member:
        member = self._members.get((group_id, stage))
        if member is None:
            raise NotFound(f"no fetch of group {group_id}, stage {stage}", hint="start it")
        return member

    def _check_epoch(self, epoch: int) -> None:
        if epoch < self._epoch:
            raise StaleEpoch(f"epoch {epoch} is over; {self._epoch} has been seen")
        self._epoch = epoch


def _wishes(request: FetchStart) -> Wishes:
    return Wishes(request.pace_bytes_per_s, _deadline(request.deadline_ms), request.background, request.weight)


def _deadline(remaining_ms: int | None) -> float:
    return math.inf if remaining_ms is None else time.monotonic() + remaining_ms / 1000


def _count(fetch: Fetch) -> None:
    outcome = "done" if fetch.error is None else "cancelled" if fetch.cancelled else "failed"
    metrics.FETCHES.labels(outcome=outcome).inc()


def _check_ranges(request: FetchStart) -> None:
    if not request.ranges or not any(r.n_bytes for r in request.ranges):
        raise BadRequest("a fetch needs at least one byte")
    if not (request.weight > 0 and math.isfinite(request.weight)):
        raise BadRequest(f"a fetch of weight {request.weight!r} has no place on the link", hint="leave it at 1")
    for r in (*request.ranges, *request.later_ranges):
        if not checkpoint.is_fetchable(r.file) or r.offset < 0 or r.n_bytes < 0:
            raise BadRequest(f"range [{r.offset}, +{r.n_bytes}) of {r.file!r:.100} cannot be fetched")
