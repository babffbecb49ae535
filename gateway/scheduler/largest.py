"""The largest device and the largest pool of models of all hosts: what never fits is refused at once.

Every start asks, and hosts change their sizes hardly ever, so both are kept until one comes, goes or says otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping

from gateway.scheduler.hosts import HostView
from thaw.host import HostReport
from thaw.ids import HostId


class Largest:
    """``hosts`` is the view's own; ``changed`` is called after whatever may matter here."""

    def __init__(self, hosts: Mapping[HostId, HostView]) -> None:
        self._hosts = hosts
        self._device: dict[bool, int | None] = {}
        self._pools: list[int] | None = None

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

    def pool(self) -> int | None:
        """Bytes of the largest pool; None without hosts, or where one does not say."""
        if self._pools is None:
            pools = [h.report.segment_pool_bytes for h in self._hosts.values()]
            self._pools = [] if 0 in pools else sorted(pools)[-1:]
        return self._pools[0] if self._pools else None


def same_sizes(one: HostReport, other: HostReport) -> bool:
    if one is other:
        return True
    return one.segment_pool_bytes == other.segment_pool_bytes and _devices(one) == _devices(other)


def _devices(report: HostReport) -> list[tuple[str, int]]:
    return [(d.kind, d.memory_bytes) for d in report.devices]
