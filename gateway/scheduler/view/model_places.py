"""In which hosts' memory a model lies, or a part of it, as they report it."""

from __future__ import annotations

from collections.abc import Collection

from gateway.scheduler.view.hosts import HostView
from thaw.host import Resident
from thaw.hub.models import place_of_content
from thaw.ids import HostId


class ModelPlaces:
    """Call ``put`` after every change of a host."""

    def __init__(self) -> None:
        self._hosts: dict[str, set[HostId]] = {}  # by place_of_content
        self._places: dict[HostId, frozenset[str]] = {}
        self._read: dict[HostId, tuple[Resident, ...]] = {}

    def put(self, host: HostView) -> None:
        resident = host.report.resident
        if self._read.get(host.host_id) is not resident:  # most changes of a host are of its devices
            self._read[host.host_id] = resident
            self._change(host.host_id, frozenset(place_of_content(r.uri, r.version) for r in resident))

    def drop(self, host_id: HostId) -> None:
        self._read.pop(host_id, None)
        self._change(host_id, frozenset())

    def hosts(self, uri: str, version: str) -> Collection[HostId]:
        return self._hosts.get(place_of_content(uri, version), ())

    def _change(self, host_id: HostId, places: frozenset[str]) -> None:
        before = self._places.pop(host_id, frozenset())
        if places:
            self._places[host_id] = places
        for place in places - before:
            self._hosts.setdefault(place, set()).add(host_id)
        for place in before - places:
            self._hosts[place].discard(host_id)
            if not self._hosts[place]:
                del self._hosts[place]
