"""The hosts that take new work, in the order in which one is asked to inspect a model.

A start asks before it is planned, so the answer to "which host?" must not cost a walk over all hosts.
"""

from __future__ import annotations

import bisect

from gateway.scheduler.view.hosts import HostView
from gateway.scheduler.view.model_places import ModelPlaces
from thaw.ids import HostId
from thaw.model import ModelFacts

_Key = tuple[int, HostId]


class LookOrder:
    """Call ``put`` after every change of a host."""

    def __init__(self) -> None:
        self._order: list[_Key] = []
        self._workers: dict[HostId, int] = {}
        self._hosts: dict[HostId, HostView] = {}
        self._places = ModelPlaces()

    def put(self, host: HostView) -> None:
        if host.draining:
            return self.drop(host.host_id)
        self._places.put(host)
        self._hosts[host.host_id] = host
        before = self._workers.get(host.host_id)
        if before == host.n_workers:
            return None
        if before is not None:
            self._take_out((before, host.host_id))
        self._workers[host.host_id] = host.n_workers
        bisect.insort(self._order, (host.n_workers, host.host_id))
        return None

    def drop(self, host_id: HostId) -> None:
        if self._hosts.pop(host_id, None) is not None:
            self._places.drop(host_id)
            self._take_out((self._workers.pop(host_id), host_id))

    def _take_out(self, key: _Key) -> None:
        del self._order[bisect.bisect_left(self._order, key)]

    def best(self, facts: ModelFacts | None, failed_on: HostId | None) -> HostView | None:
        """Return the host to ask; None without one.

        A host that has the model knows its description and need not read it.  Of several the host with the least work
        is asked.  The host that could not say it last (``failed_on``) comes last.
        """
        having = [] if facts is None else self._having(facts, failed_on)
        if having:
            return min(having, key=lambda h: (h.n_workers, h.host_id))
        first = next((host_id for _, host_id in self._order if host_id != failed_on), failed_on)
        return None if first is None else self._hosts.get(first)

    def _having(self, facts: ModelFacts, failed_on: HostId | None) -> list[HostView]:
        found = (self._hosts[i] for i in self._places.hosts(facts.uri, facts.version) if i != failed_on)
        return [h for h in found if h.has_model(facts.uri, facts.weight_bytes, facts.version)]
