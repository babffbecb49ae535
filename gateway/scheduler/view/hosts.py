"""The scheduler's knowledge of one host: its report, its link's ledger, and the memory it may still promise.

The host's report wins: memory that it reports as used and that the scheduler cannot account for counts as used
(``foreign``).  Reports lag behind decisions, so the scheduler counts its own reserves from the moment of the decision,
and not when the host confirms them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

from gateway.scheduler.placement.link_ledger import Discipline, LinkLedger
from gateway.scheduler.placement.plans import fetch_key, later_key
from gateway.scheduler.placement.pool_account import UNLIMITED, PoolAccount
from gateway.scheduler.placement.schemes import DeviceFits, Gpu
from gateway.scheduler.placement.stage_bytes import Stages
from thaw.host import Device, FetchReport, HostReport
from thaw.hub.models import is_same_content
from thaw.ids import HostId, InstanceId
from thaw.instance import InstanceRecord

ASSUMED_LINK: Final = 125e6
"""1 Gbit/s, for a host that reports no link, a negative one or not a number."""
LARGEST_LINK: Final = 1e12
LARGEST_FETCH: Final = 10**14
OLDEST_S: Final = 10.0
"""A lease runs out after this, so an older report does not come from a host that is there."""
_LINK_CHANGE: Final = 0.05
"""A measured rate fluctuates; the ledger is not told of a relative change that is smaller than this."""


@dataclass(slots=True)
class DeviceView:
    device: Device
    foreign: int = 0  # used by others than the instances we know
    reserved: int = 0  # by instances we know, from decision to GONE
    releasing: int = 0  # the part of ``reserved`` that a release was sent for
    n_workers: int = 0
    is_kept: bool = False  # for the action that is first in turn: for all others nothing is free here

    @property
    def free(self) -> int:
        return -self.device.memory_bytes if self.is_kept else self.device.memory_bytes - self.foreign - self.reserved


@dataclass(frozen=True, slots=True)
class Room:
    """The devices of a host that suit a kind of function, as placement sees them.  A room is kept until something
    changes: a start examines every host, and few hosts have changed since the last start."""

    devices: tuple[DeviceView, ...]
    gpus: tuple[Gpu, ...]
    most_free: int
    most_idle: int  # the same on a device without a worker; -1: none is idle
    kind: str
    fits: DeviceFits = field(default_factory=dict)  # kept with ``gpus``


@dataclass(slots=True)
class HostView:
    host_id: HostId
    ledger: LinkLedger
    report: HostReport
    devices: dict[str, DeviceView] = field(default_factory=dict)
    draining: bool = False  # nothing starts here: it is being emptied, or handed over to another invoker
    departed: dict[InstanceId, tuple[str, int]] = field(default_factory=dict)
    """Instances that have gone since the last report, with device and reserve: the host's ``free`` does not show it
    yet."""

    fetching: set[str] = field(default_factory=set)
    """Keys of the ledger's fetches whose progress the last report told."""
    least_lag_s: float = math.inf
    """The smallest difference seen between this clock and the host's: that of the freshest report."""
    strangers: dict[InstanceId, float] = field(default_factory=dict)
    """Instances that the host reports and the registry does not know, and since when (by this clock)."""
    as_reported: bool = False
    """True when no memory was held or let go since the last report, and that report had no odd value and no fetch."""
    n_workers: int = 0
    most_free: int = -1
    most_idle: int = -1
    """``most_free`` and ``most_idle`` are those of ``room(for_model=True)``: an index walks over hundreds of hosts."""
    pool: PoolAccount = field(default_factory=PoolAccount)
    """Its memory for models."""
    reported_s: float = 0.0
    """When the report was first taken in, by this clock."""
    on_change: Callable[[HostView], None] = field(default=lambda _: None)
    """Tells the indexes of every change of the host's memory, its pace or its draining."""
    _rooms: dict[bool, Room] = field(default_factory=dict)

    def room(self, *, for_model: bool) -> Room:
        """Models go to accelerators where a host has one, ordinary functions to its CPU slice where it has one."""
        if not self._rooms:
            self._look()
        return self._rooms[for_model]

    def _look(self) -> None:
        cpu = tuple([d for d in self.devices.values() if d.device.kind == "cpu"])
        other = tuple([d for d in self.devices.values() if d.device.kind != "cpu"])
        for_models = _room(other or cpu)
        self._rooms = {True: for_models, False: _room(cpu) if cpu and other else for_models}

    def _changed(self) -> None:
        self._look()
        self.n_workers = sum(d.n_workers for d in self.devices.values())
        room = self.room(for_model=True)
        self.most_free, self.most_idle = room.most_free, room.most_idle
        self.on_change(self)

    @property
    def enforces_shares(self) -> bool:
        """True when low workers here are held to their share of a device."""
        return self.report.share == "enforced"

    def cell_s(self, kind: str) -> float:
        """Return when a start of this kind has a stem cell here, by this clock: -inf where a cell waits, inf where none
        is being made.  The answer is in whole seconds, because the host reports once a second and hosts with equal
        answers are examined as one."""
        if kind in self.report.stem_kinds:
            return -math.inf
        making = [t.ready_in_s for t in self.report.stem_targets if t.kind == kind and t.ready_in_s is not None]
        if not making or not math.isfinite(making[0]):
            return math.inf
        return float(math.ceil(self.reported_s + max(0.0, making[0])))

    def has_model(self, uri: str, n_bytes: int, version: str) -> bool:
        """True when the whole model lies in this host's memory in its present version: one that was pushed since must
        be fetched."""
        return any(
            r.n_bytes >= n_bytes and is_same_content(uri, version, r.uri, r.version) for r in self.report.resident
        )

    def pool_ever_takes(self, stages: Stages) -> bool:
        """True when the host's memory for models is large enough for the whole model, without regard to its present
        use."""
        return self.pool.slab_bytes == 0 or stages.slabs(1, self.pool.slab_bytes) <= self.pool.n_slabs

    def pool_takes(self, stages: Stages | None, n_stages: int) -> bool:
        """True when the largest part of a model in ``n_stages`` stages fits into the host's memory for models now."""
        return self.pool_parts(stages, n_stages) > 0

    def pool_parts(self, stages: Stages | None, n_stages: int) -> int:
        """Return how many such parts fit."""
        pool = self.pool
        if pool.is_doubted:
            return 0
        if stages is None or pool.slab_bytes == 0:
            return UNLIMITED
        if n_stages == 1 and pool.shares(stages.whole.key):
            return UNLIMITED  # shared with an instance that has the whole model
        return max(0, pool.free_slabs()) // stages.slabs(n_stages, pool.slab_bytes)

    def hold(self, device: str, n_bytes: int) -> None:
        if (view := self.devices.get(device)) is not None:
            view.reserved += n_bytes
            view.n_workers += 1
            self.as_reported = False
            self._changed()

    def set_leaving(self, record: InstanceRecord, *, leaving: bool) -> None:
        """The memory of an instance here will soon be free, or will not be after all."""
        self.pool.set_leaving(record.instance_id, leaving=leaving)
        if (view := self.devices.get(record.device)) is not None:
            view.releasing += record.reserve_bytes if leaving else -record.reserve_bytes

    def keep(self, device: str, *, for_the_first: bool) -> None:
        if (view := self.devices.get(device)) is not None:
            view.is_kept = for_the_first
            self._changed()

    def let_go(self, instance_id: InstanceId, device: str, n_bytes: int) -> None:
        if (view := self.devices.get(device)) is not None:
            view.reserved -= n_bytes
            view.n_workers -= 1
            self._changed()
        self.as_reported = False
        self.departed[instance_id] = (device, n_bytes)

    def is_confirmed_by(self, report: HostReport) -> bool:
        """True when the report says the same as the last one and the scheduler has done nothing there in between.  With
        a thousand hosts, most reports are such.

        A stem cell that is being made is ready in some seconds *from now*, so a report of it never says the same as the
        last one.
        """
        last = self.report
        if report is last:
            return self.as_reported
        return (
            self.as_reported
            and not report.fetches
            and report.instances == last.instances
            and report.devices == last.devices
            and report.network_bytes_per_s == last.network_bytes_per_s
            and report.boot_id == last.boot_id
            and report.seen_wall_ms >= last.seen_wall_ms
            and report.draining == last.draining
            and report.handing_over == last.handing_over
            and report.stem_kinds == last.stem_kinds
            and report.resident == last.resident
            and report.share == last.share
            and report.stem_targets == last.stem_targets
            and all(t.ready_in_s is None for t in report.stem_targets)
        )

    def confirm(self, report: HostReport, now_s: float) -> None:
        """Take over a report that confirms the last one: only its age is new."""
        if report.seen_wall_ms != self.report.seen_wall_ms:
            self._age_s(report, now_s)
        self.report = report
        self.pool.take_report(report.pool)

    def take_report(self, report: HostReport, ours: Mapping[InstanceId, tuple[str, int]], now_s: float) -> list[str]:
        """Take over a heartbeat; ``ours`` are the known instances here (device, reserve).  Returns a sentence for each
        odd value."""
        odd: list[str] = []
        counted = dict(self.departed)
        self.departed = {i: held for i, held in self.departed.items() if i in report.instances}
        counted.update(ours)
        self.pool.take_report(report.pool)
        self._take_link(report, now_s, odd)
        self._take_fetches(report, now_s, odd)
        fresh = {d.name: DeviceView(_sane(d, odd)) for d in report.devices}
        for device, n_bytes in ours.values():
            if device in fresh:
                fresh[device].reserved += n_bytes
                fresh[device].n_workers += 1
        for name, view in fresh.items():
            seen = sum(b for i, (d, b) in counted.items() if d == name and i in report.instances)
            # stem cells are reported as free: a host gives them up before it refuses a start
            view.foreign = max(0, view.device.memory_bytes - view.device.free_bytes - seen)
            if name in self.devices:
                view.releasing, view.is_kept = self.devices[name].releasing, self.devices[name].is_kept
        if (report.seen_wall_ms, report.boot_id) != (self.report.seen_wall_ms, self.report.boot_id) or not self.devices:
            self.reported_s = now_s
        self.devices, self.report, self.draining = fresh, report, not report.takes_starts
        self.as_reported = not (odd or report.fetches or self.fetching)
        self._changed()
        return odd

    def _take_link(self, report: HostReport, now_s: float, odd: list[str]) -> None:
        link, said = sane_link(report.network_bytes_per_s), report.network_bytes_per_s
        if link != said:
            odd.append(f"network_bytes_per_s {said!r} taken as {link:g}")
        if abs(link - self.ledger.bytes_per_s) > _LINK_CHANGE * self.ledger.bytes_per_s:
            self.ledger.set_bandwidth(link, now_s)
        if report.boot_id == self.report.boot_id and report.seen_wall_ms < self.report.seen_wall_ms:
            odd.append(f"its clock went back {self.report.seen_wall_ms - report.seen_wall_ms} ms")

    def _take_fetches(self, report: HostReport, now_s: float, odd: list[str]) -> None:
        """Correct the ledger by the bytes that fetchd really has left to fetch.  A report that was seen before tells
        nothing new."""
        if report.seen_wall_ms == self.report.seen_wall_ms and report.boot_id == self.report.boot_id and self.devices:
            return
        age_s, told = self._age_s(report, now_s), set[str]()
        for fetch in report.fetches:
            pending, rate = _sane_fetch(fetch, self.ledger.bytes_per_s, odd)
            later, moved = min(max(0, fetch.later_bytes), LARGEST_FETCH), rate * age_s
            first_key, later_key_ = fetch_key(fetch.group_id, fetch.stage), later_key(fetch.group_id, fetch.stage)
            self.ledger.correct(first_key, max(0.0, pending - moved), now_s)
            self.ledger.correct(later_key_, max(0.0, later - (0.0 if pending else moved)), now_s)
            told |= {first_key, later_key_}
        for key in self.fetching - told:
            self.ledger.correct(key, 0.0, now_s)  # this fetch was in progress and is no longer reported
        self.fetching = told

    def _age_s(self, report: HostReport, now_s: float) -> float:
        """Return how old the report's numbers are, compared with the freshest report so far: the clocks differ by an
        unknown offset.  After a clock has jumped, its offset is learned anew."""
        lag_s = now_s - report.seen_wall_ms / 1000
        if report.boot_id != self.report.boot_id or lag_s - self.least_lag_s > OLDEST_S:
            self.least_lag_s = lag_s
        self.least_lag_s = min(self.least_lag_s, lag_s)
        return lag_s - self.least_lag_s


def _room(devices: tuple[DeviceView, ...]) -> Room:
    gpus = tuple([Gpu(d.free, d.n_workers) for d in devices])
    most_free = max([g.free for g in gpus], default=-1)
    most_idle = max([g.free for g in gpus if g.n_workers == 0], default=-1)
    return Room(devices, gpus, most_free, most_idle, devices[0].device.kind if devices else "")


def _sane_fetch(fetch: FetchReport, link: float, odd: list[str]) -> tuple[float, float]:
    """Return (bytes left, bytes/s).  Raises nothing: values that make no sense are noted in ``odd`` and made
    harmless."""
    left = fetch.pending_bytes or max(0, fetch.n_bytes - fetch.done_bytes)
    pending = float(min(max(0, left), max(0, fetch.n_bytes), LARGEST_FETCH))
    rate = min(max(0.0, fetch.bytes_per_s), link) if math.isfinite(fetch.bytes_per_s) else 0.0
    if pending != left or not math.isfinite(fetch.bytes_per_s) or fetch.bytes_per_s < 0:
        odd.append(
            f"fetch of {fetch.group_id}/{fetch.stage}: {left} of {fetch.n_bytes} bytes left at "
            f"{fetch.bytes_per_s:g} bytes/s taken as {pending:g} at {rate:g}"
        )
    return pending, rate


def sane_link(bytes_per_s: float) -> float:
    if not math.isfinite(bytes_per_s) or bytes_per_s <= 0:
        return ASSUMED_LINK
    return min(bytes_per_s, LARGEST_LINK)


def _sane(device: Device, odd: list[str]) -> Device:
    total = max(0, device.memory_bytes)
    free = min(max(0, device.free_bytes), total)
    if (total, free) == (device.memory_bytes, device.free_bytes):
        return device
    odd.append(f"device {device.name}: {device.free_bytes} of {device.memory_bytes} bytes free taken as {free}")
    return Device(device.name, device.kind, total, free)


def new_host(report: HostReport, discipline: Discipline, now_s: float) -> HostView:
    ledger = LinkLedger(sane_link(report.network_bytes_per_s), discipline, now_s)
    return HostView(report.host_id, ledger, report)
