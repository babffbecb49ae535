"""The memory that evictions would free on each device, so that only a few groups are examined to choose victims.

A *spare* group may be evicted for another action (``ActionView.is_spare`` and ``ClusterView.may_go`` say which).  The
rule: spare groups are taken in order of idleness, longest first, until some device has room; the victims are the groups
on that device.  For this rule two things are kept up to date:

* for every device the bytes that are *soon* free (free, or being released) and the bytes it *could* have if its spare
  groups were evicted: a need that no eviction can meet is refused at once;
* for every device its spare groups in order of idleness: where few devices could have room, each one is asked when it
  would have room.

A property test compares the answers with the rule itself over all instances.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final, NamedTuple

from gateway.scheduler.placement.schemes import DeviceFits, Gpu
from gateway.scheduler.view.hosts import HostView, Room
from thaw.ids import HostId, InstanceId

Where = tuple[HostId, str]
"""A device."""

FEW_DEVICES: Final = 64
"""If no more devices than this could have room, they are asked one by one.  If more could, some group near the front of
the order is on one of them."""

_MODELS, _FUNCTIONS, _BOTH = "models", "functions", "both"
_FOR = {True: (_MODELS, _BOTH), False: (_FUNCTIONS, _BOTH)}


class _Bytes(NamedTuple):
    use: str
    soon: int
    could: int
    at_most: int  # if none of our instances were there


class _Part(NamedTuple):
    """The memory that a spare group holds on one device.  Parts sort in the order in which the walk over the groups
    comes to them."""

    idle_since_s: float
    head: InstanceId
    place: int  # among the members of its group
    n_bytes: int


class Emptied(NamedTuple):
    """The devices of a host as if its spare groups were evicted; ``room``: the devices at the time when this was worked
    out."""

    room: Room
    gpus: tuple[Gpu, ...]
    fits: DeviceFits


class _Sorted:
    """Devices by bytes."""

    def __init__(self) -> None:
        self._order: list[tuple[int, Where]] = []

    def move(self, where: Where, before: int | None, after: int | None) -> None:
        if before is not None:
            del self._order[bisect.bisect_left(self._order, (before, where))]
        if after is not None:
            bisect.insort(self._order, (after, where))

    def n_with(self, n_bytes: int) -> int:
        return len(self._order) - self._first(n_bytes)

    def with_room(self, n_bytes: int) -> list[Where]:
        return [where for _, where in self._order[self._first(n_bytes) :]]

    def most(self, suits: Callable[[Where], bool]) -> tuple[int, Where] | None:
        return next((found for found in reversed(self._order) if suits(found[1])), None)

    def _first(self, n_bytes: int) -> int:
        return bisect.bisect_left(self._order, (n_bytes,))


class IdleMemory:
    def __init__(self) -> None:
        self._bytes: dict[Where, _Bytes] = {}
        self._of_host: dict[HostId, tuple[Where, ...]] = {}
        self._soon = {use: _Sorted() for use in (_MODELS, _FUNCTIONS, _BOTH)}
        self._could = {use: _Sorted() for use in (_MODELS, _FUNCTIONS, _BOTH)}
        self._releasing: set[Where] = set()
        self._parts: dict[Where, list[_Part]] = {}
        self._evictable: dict[Where, int] = {}
        self._order: list[tuple[float, InstanceId]] = []
        self._groups: dict[InstanceId, tuple[float, tuple[tuple[Where, int], ...]]] = {}
        self._emptied: dict[HostId, Emptied] = {}

    # changes -------------------------------------------------------------------------------------------------------

    def put_host(self, host: HostView) -> None:
        """Call this after every change of the host's memory."""
        if host.draining:
            return self.drop_host(host.host_id)
        models, functions = host.room(for_model=True).devices, host.room(for_model=False).devices
        same = models is functions or models == functions
        found: list[Where] = []
        for use, devices in ((_BOTH, models),) if same else ((_MODELS, models), (_FUNCTIONS, functions)):
            for device in devices:
                where = host.host_id, device.device.name
                found.append(where)
                soon = device.free + device.releasing
                self._move(
                    where,
                    _Bytes(
                        use, soon, soon + self._evictable.get(where, 0), device.device.memory_bytes - device.foreign
                    ),
                )
                (self._releasing.add if device.releasing else self._releasing.discard)(where)
        if (before := self._of_host.get(host.host_id)) != (now := tuple(found)):
            for where in set(before or ()) - set(now):
                self._forget(where)
            self._of_host[host.host_id] = now

    def drop_host(self, host_id: HostId) -> None:
        for where in self._of_host.pop(host_id, ()):
            self._forget(where)

    def put_group(self, head: InstanceId, idle_since_s: float, parts: Iterable[tuple[Where, int]]) -> None:
        """Add a spare group with all that its members hold, in the order of the members."""
        known = idle_since_s, tuple(parts)
        if self._groups.get(head) == known:
            return
        self.drop_group(head)
        self._groups[head] = known
        bisect.insort(self._order, (idle_since_s, head))
        for place, (where, n_bytes) in enumerate(known[1]):
            bisect.insort(self._parts.setdefault(where, []), _Part(idle_since_s, head, place, n_bytes))
            self._evict(where, n_bytes)

    def drop_group(self, head: InstanceId) -> None:
        """The group is not spare (any more)."""
        if (known := self._groups.pop(head, None)) is None:
            return
        idle_since_s, parts = known
        del self._order[bisect.bisect_left(self._order, (idle_since_s, head))]
        for place, (where, n_bytes) in enumerate(parts):
            here = self._parts[where]
            del here[bisect.bisect_left(here, _Part(idle_since_s, head, place, n_bytes))]
            if not here:
                del self._parts[where]
            self._evict(where, -n_bytes)

    def _evict(self, where: Where, n_bytes: int) -> None:
        self._evictable[where] = self._evictable.get(where, 0) + n_bytes
        if not self._evictable[where]:
            del self._evictable[where]
        if (known := self._bytes.get(where)) is not None:
            self._move(where, known._replace(could=known.could + n_bytes))

    def _move(self, where: Where, now: _Bytes) -> None:
        before = self._bytes.get(where)
        if before == now:
            return
        self._emptied.pop(where[0], None)
        if before is not None and before.use != now.use:
            self._forget(where)
            before = None
        self._bytes[where] = now
        if before is None or before.soon != now.soon:
            self._soon[now.use].move(where, before and before.soon, now.soon)
        if before is None or before.could != now.could:
            self._could[now.use].move(where, before and before.could, now.could)

    def _forget(self, where: Where) -> None:
        known = self._bytes.pop(where)
        self._emptied.pop(where[0], None)
        self._soon[known.use].move(where, known.soon, None)
        self._could[known.use].move(where, known.could, None)
        self._releasing.discard(where)

    # queries -------------------------------------------------------------------------------------------------------

    def is_soon_free(self, n_bytes: int, *, for_model: bool) -> bool:
        """True when some device has ``n_bytes`` free, now or once the releases in progress have ended."""
        return any(self._soon[use].n_with(n_bytes) for use in _FOR[for_model])

    def releasing(self, *, for_model: bool) -> list[tuple[Where, int]]:
        """Return the devices on which a release is in progress, with the bytes that are free after it."""
        return [
            (where, known.soon)
            for where in sorted(self._releasing)
            if (known := self._bytes[where]).use in _FOR[for_model]
        ]

    @property
    def is_empty(self) -> bool:
        """True when no group is spare."""
        return not self._order

    def hosts(self, n_groups: int) -> set[HostId]:
        """Return the hosts of the ``n_groups`` spare groups that are idle longest."""
        return {where[0] for _, head in self._order[:n_groups] for where, _ in self._groups[head][1]}

    def could_have(self, where: Where) -> int:
        """Return the bytes free on a device once its spare groups are evicted; -1 for an unknown device."""
        known = self._bytes.get(where)
        return -1 if known is None else known.could

    def emptied(self, host: HostView) -> Emptied:
        """Return the host's devices for models as if its spare groups were evicted.  Workers that would have to be
        evicted still count, so a device that is idle now comes first."""
        room, known = host.room(for_model=True), self._emptied.get(host.host_id)
        if known is None or known.room is not room:
            gpus = tuple(Gpu(self.could_have((host.host_id, d.device.name)), d.n_workers) for d in room.devices)
            known = self._emptied[host.host_id] = Emptied(room, gpus, {})
        return known

    def lacking(self, where: Where, n_bytes: int) -> list[InstanceId]:
        """Return the heads of the groups that must be evicted for ``n_bytes`` on the device, longest idle first; [] if
        the releases in progress are enough."""
        if self._bytes[where].soon >= n_bytes:
            return []
        last = self._when(where, n_bytes)
        return [] if last is None else _heads(self._parts[where][: last[1]])

    def nearest(self, n_bytes: int, *, for_model: bool) -> Where | None:
        """Return the device that lacks least of ``n_bytes``, among those that are large enough."""
        found = (self._could[use].most(lambda where: self._bytes[where].at_most >= n_bytes) for use in _FOR[for_model])
        return max((f for f in found if f is not None), default=(0, None))[1]

    def longest_idle(self, n_bytes: int, taken: Mapping[Where, int], *, for_model: bool) -> list[InstanceId]:
        """Return the heads of the groups whose eviction makes room for ``n_bytes``, beside the bytes that are ``taken``
        on a device already; [] when no eviction helps."""
        uses = _FOR[for_model]
        n_devices = sum(self._could[use].n_with(n_bytes) for use in uses)
        if n_devices > FEW_DEVICES:
            return self._walk(n_bytes, taken, uses)
        found = [
            (*last, where)
            for use in uses
            for where in self._could[use].with_room(n_bytes)
            if (last := self._when(where, n_bytes + taken.get(where, 0))) is not None
        ]
        if not found:
            return []
        _, n_parts, where = min(found)
        return _heads(self._parts[where][:n_parts])

    def _when(self, where: Where, n_bytes: int) -> tuple[_Part, int] | None:
        """Return the part whose eviction gives enough room, and how many parts are evicted up to it."""
        free = self._bytes[where].soon
        for n, part in enumerate(self._parts.get(where, ()), 1):
            free += part.n_bytes
            if free >= n_bytes:
                return part, n
        return None

    def _walk(self, n_bytes: int, taken: Mapping[Where, int], uses: Sequence[str]) -> list[InstanceId]:
        gained: dict[Where, int] = {}
        n_parts: dict[Where, int] = {}
        for _, head in self._order:
            for where, part in self._groups[head][1]:
                known = self._bytes.get(where)
                if known is None or known.use not in uses:
                    continue
                gained[where] = gained.get(where, 0) + part
                n_parts[where] = n_parts.get(where, 0) + 1
                if known.soon - taken.get(where, 0) + gained[where] >= n_bytes:
                    return _heads(self._parts[where][: n_parts[where]])
        return []


def _heads(parts: Iterable[_Part]) -> list[InstanceId]:
    return list(dict.fromkeys(part.head for part in parts))
