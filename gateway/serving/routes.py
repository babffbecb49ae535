"""The route table: which READY instances this gateway may send an action to.  It is pure; waiting_room.py locks it.

A pipeline group is one route, to its first stage.  When another stage of the group is lost, the route is removed too: a
request sent there would only be lost.  A first stage that has become one worker misses no other stage; it may hold more
requests than it has slots now, and gets no further ones before some have ended.

An entry holds an invoker's report (InstanceRecord) and this gateway's own count of requests on the instance.  Other
gateways use the same slots, and this gateway does not see it.  When the instance refuses one of our requests for that,
or cannot be reached, the entry is ``full`` until a slot of it is released here, its record changes, or some time has
passed.  It is not dropped: an invoker sends no further report of an idle instance that gets no requests.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

from thaw.ids import ActionName, GroupId, InstanceId
from thaw.instance import InstanceRecord, InstanceState


@dataclass(slots=True, eq=False)
class Route:
    """``handed`` counts requests ever sent: the first ``slots`` of them may be those the start was made for."""

    record: InstanceRecord
    ready_s: float
    inflight: int = 0
    handed: int = 0
    full: bool = False

    @property
    def free(self) -> bool:
        return not self.full and self.inflight < self.record.slots


@lru_cache(maxsize=4096)
def version_key(version: str) -> tuple[int, ...]:
    return tuple(int(part) if part.isdigit() else 0 for part in version.split("."))


class RouteTable:
    def __init__(self) -> None:
        self._routes: dict[ActionName, dict[InstanceId, Route]] = {}
        self._retired: set[InstanceId] = set()

    def apply(self, record: InstanceRecord, now_s: float) -> bool:
        """Take in an invoker's report.  Return True when the instance may have become free for a request."""
        if not record.takes_requests:
            if record.state is InstanceState.GONE and record.error is not None:
                self._remove_group(record)
            return False
        known = self._routes.get(record.action, {}).get(record.instance_id)
        if record.state is not InstanceState.READY:
            self._remove(record.action, record.instance_id)
            if record.state is InstanceState.GONE:
                self._retired.discard(record.instance_id)
            return False
        if record.instance_id in self._retired:
            return False
        if known is None:
            self._routes.setdefault(record.action, {})[record.instance_id] = Route(record, now_s)
        else:
            known.record, known.full = record, False
        return True

    def replace(self, records: Iterable[InstanceRecord], now_s: float) -> set[ActionName]:
        """Start over from the registry, keeping counts of what is in flight.  Returns every action with a route."""
        ready = {r.instance_id: r for r in records if r.state is InstanceState.READY and r.takes_requests}
        for routes in list(self._routes.values()):
            for route in list(routes.values()):
                if route.record.instance_id not in ready:
                    self._remove(route.record.action, route.record.instance_id)
        for record in ready.values():
            self.apply(record, now_s)
        return set(self._routes)

    def take(self, action: ActionName, version: str, model_version: str = "") -> Route | None:
        """A slot on the least loaded instance that runs ``version`` or a later one; the caller releases it.
        ``model_version``: only an instance with this version of the model will do."""
        wanted = version_key(version)
        free = [
            r
            for r in self._routes.get(action, {}).values()
            if r.free
            and version_key(r.record.action_version) >= wanted
            and r.record.model_version in (model_version or r.record.model_version, "")
        ]
        if not free:
            return None
        route = min(free, key=lambda r: r.inflight / r.record.slots)
        route.inflight += 1
        route.handed += 1
        return route

    def release(self, route: Route, *, ran: bool = True) -> None:
        route.inflight -= 1
        if ran:
            route.full = False
        else:
            route.handed -= 1

    def drop(self, route: Route) -> None:
        """The instance left, or broke under a request.  Its invoker's next report brings it back."""
        self._remove(route.record.action, route.record.instance_id)

    def other_model(self, action: ActionName, model_version: str) -> str:
        """Return the version of the model that the action's instances run if none runs ``model_version``; else, and
        if there is no instance, return an empty string."""
        found = {route.record.model_version for route in self._routes.get(action, {}).values()}
        return "" if found & {model_version, ""} else max(found, default="")

    def is_any_full(self, action: ActionName) -> bool:
        return any(route.full for route in self._routes.get(action, {}).values())

    def retry_full(self, action: ActionName) -> None:
        """The refusal was some time ago: the instances are asked again."""
        for route in self._routes.get(action, {}).values():
            route.full = False

    def retire(self, action: ActionName) -> None:
        """The action was deleted: a new one of the same name must not run on its instances."""
        self._retired.update(self._routes.pop(action, {}))

    def groups(self, action: ActionName) -> frozenset[GroupId]:
        """Return the groups that are ready, with or without a free slot."""
        return frozenset(r.record.group_id for r in self._routes.get(action, {}).values())

    def records(self, action: ActionName) -> tuple[InstanceRecord, ...]:
        """Return what takes the action's requests: of a group its first stage."""
        return tuple(route.record for route in self._routes.get(action, {}).values())

    def count(self) -> int:
        return sum(len(routes) for routes in self._routes.values())

    def _remove_group(self, lost: InstanceRecord) -> None:
        for route in list(self._routes.get(lost.action, {}).values()):
            if route.record.group_id == lost.group_id and route.record.n_stages > 1:
                self.drop(route)

    def _remove(self, action: ActionName, instance_id: InstanceId) -> None:
        routes = self._routes.get(action)
        if routes is None:
            return
        routes.pop(instance_id, None)
        if not routes:
            del self._routes[action]
