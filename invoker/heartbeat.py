"""The heartbeat: this host reports its state once a second.  A host without a report for 10 s counts as lost.

Room in fetchd's pool is reported at once, with an event, because a start may be waiting for it.  fetchd tells when a
segment became complete or lost its last holder, the fleet when an instance has released its part of the pool.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping
from typing import Final

from invoker import metrics
from invoker.containers.fleet import Fleet
from invoker.containers.instance import State
from invoker.containers.stem_cells import StemCells
from invoker.device_kind import kind_of
from invoker.settings import InvokerSettings
from relay.protocol.messages import SegmentStatus, Status
from relay.state.registry import Registry
from thaw.clock import boot_id, wall_ms
from thaw.errors import PlatformError, ThawError
from thaw.host import Device, FetchReport, HeldSegment, HostReport, PoolReport, Resident
from thaw.ids import HostId, InstanceId
from thaw.logs import Log
from thaw.process.lasting import LastingThread

INTERVAL_S: Final = 1.0
_SUPPOSED_LINK: Final = 125e6
"""1 Gbit/s in bytes/s, while the link is neither measured nor declared."""
_FETCHD_S: Final = 5.0
_WATCH_S: Final = 30.0
"""A request for changes that finds none is repeated after this time, so that a fetchd that is gone is noticed."""


class Reporter:
    def __init__(
        self, settings: InvokerSettings, fleet: Fleet, cells: StemCells, registry: Registry, address: str, log: Log
    ) -> None:
        self._settings, self._fleet, self._cells, self._registry = settings, fleet, cells, registry
        self._address, self._log = address, log
        self._device_kind = kind_of(settings.device)
        self._started_ms = wall_ms()
        self._boot_id = boot_id()
        self._draining = self._handing_over = False
        self._stop = threading.Event()
        self._fetchd: Status | None = None
        self._pool: PoolReport | None = None
        self._news = threading.Event()
        self._sending = threading.Lock()  # the last report to be made must be the last to be written
        self._threads = [
            LastingThread(self._beat, "heartbeat"),
            # a thread of its own, so that a fetchd that hangs does not make the host look lost
            LastingThread(self._watch_fetchd, "fetchd-status"),
        ]
        self._watcher = LastingThread(self._watch_pool, "fetchd-pool")

    def start(self) -> None:
        """Write the first report before returning: a reader that sees an instance of this host finds the host."""
        self._look_at_fetchd()
        self._registry.report_host(self.report())
        for thread in (*self._threads, self._watcher):
            thread.start()

    def has_news(self) -> None:
        """There may be more room in the pool: ask fetchd, and report it at once."""
        self._news.set()

    def drain(self) -> None:
        self._draining = True
        self._send()

    def hand_over(self) -> None:
        """From now on the reports say that another invoker is about to take the host over."""
        self._handing_over = True
        self._send(announce=True)

    def stop(self) -> None:
        """The host leaves the registry, unless another invoker takes it over: then the last report stands until that
        one's first, or until its time is over."""
        self._stop.set()
        self._news.set()
        for thread in self._threads:
            thread.join(_FETCHD_S + INTERVAL_S)
        if self._handing_over:
            self._send(announce=True)
            return
        try:
            self._registry.forget_host(HostId(self._settings.host_id))
        except PlatformError as e:
            self._log.event("forget_failed", error=e.message)  # the lease ends by itself

    def report(self) -> HostReport:
        settings, ledger = self._settings, self._fleet.ledger
        cells = self._cells.view()
        held = ledger.holders()
        cell_bytes = sum(n for owner, n in held.items() if owner == "zygote" or owner.startswith("cell-"))
        free = ledger.free_bytes + cell_bytes  # stem cells are given up when an instance needs their memory
        device = Device(settings.device, self._device_kind, ledger.total_bytes, free)
        status = self._fetchd
        measured = (status.link_bytes_per_s if status is not None else 0.0) or None
        metrics.MEMORY_HELD.set(sum(held.values()))
        lives = self._fleet.all()
        states = Counter(live.state for live in lives)
        for state in State:
            metrics.INSTANCES.labels(state=state.value).set(states[state])
        return HostReport(
            HostId(settings.host_id),
            self._boot_id,
            self._address,
            (device,),
            settings.n_cores,
            measured or settings.link_bytes_per_s or _SUPPOSED_LINK,
            self._fleet.driver.share,
            self._fleet.driver.name,
            self._started_ms,
            wall_ms(),
            len(cells),
            tuple(sorted({c.kind for c in cells})),
            draining=self._draining,
            instances=tuple(live.record.instance_id for live in lives),
            fetches=_fetches(status),
            segment_bytes=status.pool_bytes - status.free_bytes if status is not None else 0,
            resident=_resident(status),
            stem_targets=self._cells.targets() if settings.stem_cells == "on" else (),
            pool=self._pool,
            declared_bytes_per_s=settings.link_bytes_per_s,
            measured_bytes_per_s=measured,
            handing_over=self._handing_over,
        )

    def _beat(self) -> None:
        while not self._stop.wait(INTERVAL_S):
            self._send()

    def _send(self, *, announce: bool = False) -> None:
        try:
            with self._sending:
                lease_s = self._settings.handover_s if self._handing_over else 0.0
                self._registry.report_host(self.report(), announce=announce, lease_s=lease_s)
        except PlatformError as e:
            self._log.event("heartbeat_failed", error=e.message)

    def _watch_fetchd(self) -> None:
        while True:
            has_news = self._news.wait(INTERVAL_S)
            if self._stop.is_set():
                return
            self._news.clear()  # before asking fetchd: a change meanwhile makes this loop ask again
            self._look_at_fetchd()
            if has_news:
                self._send(announce=True)

    def _look_at_fetchd(self) -> None:
        # read before the status: a later status no longer shows the parts of instances that have left by now
        seen_ms, users = wall_ms(), self._fleet.pool_users.names()
        try:
            status = self._fleet.fetch.status(deadline_s=_FETCHD_S)
        except ThawError:
            self._fetchd = self._pool = None  # reported as no segments and no fetches
            return
        lives = [(live.record, live.descriptor_socket_id) for live in self._fleet.all()]
        holders = {f"fetch:{r.group_id}/{r.stage}": r.instance_id for r, _ in lives}
        holders |= {f"door:{socket_id}": r.instance_id for r, socket_id in lives}
        held = tuple(_held(s, holders) for s in status.segments if s.holders)
        n_slabs = status.pool_bytes // status.slab_bytes if status.slab_bytes else 0
        self._fetchd = status
        self._pool = PoolReport(status.slab_bytes, n_slabs, seen_ms, held, users) if n_slabs else None

    def _watch_pool(self) -> None:
        version = 0
        while not self._stop.is_set():
            try:
                seen = self._fleet.fetch.await_pool_change(version, timeout_s=_WATCH_S)
            except ThawError:
                self._stop.wait(INTERVAL_S)  # fetchd is away, or is coming up
                continue
            if seen != version:
                version = seen
                self._news.set()


def _held(segment: SegmentStatus, instances: Mapping[str, InstanceId]) -> HeldSegment:
    """``instances`` are given by the names under which fetchd knows them."""
    found = {instances[h] for h in segment.holders if h in instances}
    return HeldSegment(segment.key, segment.n_slabs, segment.complete, tuple(sorted(found)))


def _fetches(status: Status | None) -> tuple[FetchReport, ...]:
    if status is None:
        return ()
    return tuple(
        FetchReport(
            f.group_id,
            f.n_bytes,
            f.done_bytes,
            f.bytes_per_s,
            f.stage,
            f.pending_bytes,
            f.later_bytes,
            f.left_out_bytes,
        )
        for f in status.fetches
    )


def _resident(status: Status | None) -> tuple[Resident, ...]:
    """Segments whose bytes have all arrived."""
    segments = () if status is None else status.segments
    return tuple(Resident(s.uri, s.n_bytes, s.version) for s in segments if s.end >= s.n_bytes > 0)
