"""The largest device and the sizes of the pools of all hosts: a start that can never fit is refused at once.

Every start asks for them, and hosts hardly ever change their sizes.  Both are therefore kept until a host comes, goes
or reports another size.
"""

from __future__ import annotations

from collections.abc import Mapping

from gateway.scheduler.view.hosts import HostView
from thaw.host import HostReport
from thaw.ids import HostId


class Largest:
    """``hosts`` is the view's own; ``changed`` is called after every change that may matter here."""

    def __init__(self, hosts: Mapping[HostId, HostView]) -> None:
        self._hosts = hosts
        self._device: dict[bool, int | None] = {}
        self._pools: frozenset[tuple[int, int]] | None = None

    def changed(self) -> None:
        self._device.clear()
        self._pools = None

    def device(self, *, for_model: bool) -> int | None:
        """Bytes of the largest device any host has for such functions; None without hosts."""
        if for_model not in self._device:
            rooms = (h.room(for_model=for_model) for h in self._hosts.values())
            sizes = (d.device.memory_bytes for room in rooms for d in room.devices)
            self._device[for_model] = max(sizes, default=None)
        return self._device[for_model]

    def pools(self) -> frozenset[tuple[int, int]]:
        """Return the sizes of all pools, as (bytes of a slab, slabs); empty when some host does not report its pool."""
        if self._pools is None:
            found = {(h.pool.slab_bytes, h.pool.n_slabs) for h in self._hosts.values()}
            self._pools = frozenset() if any(slab_bytes == 0 for slab_bytes, _ in found) else frozenset(found)
        return self._pools


def same_sizes(one: HostReport, other: HostReport) -> bool:
    if one is other:
        return True
    return _pool(one) == _pool(other) and _devices(one) == _devices(other)


def _devices(report: HostReport) -> list[tuple[str, int]]:
    return [(d.kind, d.memory_bytes) for d in report.devices]


def _pool(report: HostReport) -> tuple[int, int] | None:
    return None if report.pool is None else (report.pool.slab_bytes, report.pool.n_slabs)
