"""The route table: which READY instances this gateway may send an action to.  It is pure; waiting_room.py locks it.

A pipeline group is one route, to its first stage.  When another stage of the group is lost, the route is removed too: a
request sent there would only be lost.  A first stage that has become one worker misses no other stage; it may hold more
requests than it has slots now, and gets no further ones before some have ended.

An entry holds an invoker's report (InstanceRecord) and this gateway's own count of requests on the instance.  Other
gateways use the same slots, and this gateway does not see it.  When the instance refuses one of our requests for that,
or cannot be reached, the entry is ``full`` until a slot of it is released here, its record changes, or some time has
passed.  It is not dropped: an invoker sends no further report of an idle instance that gets no requests.

An instance that is no route now may still have runs of ours, so its entry is kept aside with its counts until they have
ended, and is the instance's entry again if it becomes a route again.  If the instance drains because a host is emptied,
the entry ``leaves``, and the runs on it see that.  An instance of a deleted action never leaves: no other instance can
go on with its answers.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

from thaw.ids import ActionName, GroupId, HostId, InstanceId
from thaw.instance import InstanceRecord, InstanceState


@dataclass(slots=True, eq=False)
class Route:
    """``handed`` counts requests ever sent: the first ``slots`` of them may be those the start was made for."""

    record: InstanceRecord
    ready_s: float
    inflight: int = 0
    handed: int = 0
    full: bool = False
    leaves: bool = False  # the runs on it are to be moved

    @property
    def free(self) -> bool:
        return not self.full and self.inflight < self.record.slots


@dataclass(frozen=True, slots=True)
class Serving:
    """An instance that takes an action's requests.  A pipeline that is consolidating becomes ``n_workers`` workers."""

    record: InstanceRecord
    n_workers: int = 1


@dataclass(slots=True)
class _Doubt:
    """A pipeline that broke under a request, and its latest report since then."""

    action: ActionName
    reported: InstanceRecord | None = None


@lru_cache(maxsize=4096)
def version_key(version: str) -> tuple[int, ...]:
    return tuple(int(part) if part.isdigit() else 0 for part in version.split("."))


class RouteTable:
    def __init__(self) -> None:
        self._routes: dict[ActionName, dict[InstanceId, Route]] = {}
        self._aside: dict[InstanceId, Route] = {}  # no routes now: they have runs, or leave
        self._retired: set[InstanceId] = set()
        self._doubted: dict[InstanceId, _Doubt] = {}
        self._staying: dict[InstanceId, GroupId] = {}  # later stages that are to be workers too, and their pipelines

    def apply(self, record: InstanceRecord, now_s: float) -> bool:
        """Take in an invoker's report.  Return True when the instance may have become free for a request."""
        self._note_staying(record)
        if not record.takes_requests:
            if record.state is InstanceState.GONE and record.error is not None:
                self._remove_group(record)
            return False
        if record.state is not InstanceState.READY:
            self._leave(record)
            return False
        if record.instance_id in self._retired:
            return False
        if doubt := self._doubted.get(record.instance_id):
            doubt.reported = record
            return False
        routes = self._routes.setdefault(record.action, {})
        known = routes.get(record.instance_id) or self._aside.pop(record.instance_id, None) or Route(record, now_s)
        routes[record.instance_id] = known
        known.record, known.full, known.leaves = record, False, False
        return True

    def _leave(self, record: InstanceRecord) -> None:
        instance_id = record.instance_id
        route = self._routes.get(record.action, {}).get(instance_id) or self._aside.get(instance_id)
        self._remove(record.action, instance_id)
        self._doubted.pop(instance_id, None)
        if record.state is InstanceState.GONE:
            self._aside.pop(instance_id, None)
            self._retired.discard(instance_id)
        elif record.drained and route is not None and instance_id not in self._retired:
            route.leaves = True
            self._aside[instance_id] = route

    def replace(self, records: Iterable[InstanceRecord], now_s: float) -> set[ActionName]:
        """Start over from the registry, keeping the counts of requests in flight.  Returns every action with a
        route."""
        records = list(records)
        for draining in (r for r in records if r.state is InstanceState.DRAINING):
            self.apply(draining, now_s)
        ready = {r.instance_id: r for r in records if r.state is InstanceState.READY and r.takes_requests}
        for routes in list(self._routes.values()):
            for route in list(routes.values()):
                if route.record.instance_id not in ready:
                    self._remove(route.record.action, route.record.instance_id)
        for gone in self._aside.keys() - {r.instance_id for r in records}:
            del self._aside[gone]
        for doubt in self._doubted.values():
            doubt.reported = None
        self._staying.clear()
        for record in records:
            self._note_staying(record)
        for record in ready.values():
            self.apply(record, now_s)
        return set(self._routes)

    def _note_staying(self, record: InstanceRecord) -> None:
        """A later stage that stays in its pipeline for now.  As a worker it is a route like any other."""
        if record.stage > 0 and record.is_consolidating and record.state is InstanceState.READY:
            self._staying[record.instance_id] = record.group_id
        else:
            self._staying.pop(record.instance_id, None)

    def take(
        self,
        action: ActionName,
        version: str,
        *,
        exact: bool = False,
        moves: bool = False,
        model_version: str = "",
    ) -> Route | None:
        """A slot on the least loaded instance that runs ``version``, or with ``exact`` only that one and else a later
        one, too.  A run that ``moves`` goes to no host that is being emptied.  ``model_version``: only an instance with
        this version of the model will do.  The caller releases the slot."""
        wanted = version_key(version)
        emptied = self._emptied() if moves else frozenset()
        free = [
            r
            for r in self._routes.get(action, {}).values()
            if r.free
            and (version_key(r.record.action_version) >= wanted if not exact else r.record.action_version == version)
            and r.record.host_id not in emptied
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
        if not route.inflight and not route.leaves:
            self._aside.pop(route.record.instance_id, None)

    def _emptied(self) -> frozenset[HostId]:
        """Hosts that are being emptied, as far as the routes tell.  Of a pipeline any stage's host may be the one."""
        leaving = (r.record for r in self._aside.values() if r.leaves)
        return frozenset(record.host_id for record in leaving if record.n_stages == 1)

    def drop(self, route: Route) -> None:
        """The instance left, or broke under a request.  Its invoker's next report brings it back."""
        self._remove(route.record.action, route.record.instance_id)

    def doubt(self, route: Route) -> bool:
        """The instance broke under a request.  Return True for a pipeline that was not in doubt yet: it reports the end
        of that request, and only then its own end, so its reports count from ``trust`` on."""
        self.drop(route)
        if route.record.n_stages == 1 or route.record.instance_id in self._doubted:
            return False
        self._doubted[route.record.instance_id] = _Doubt(route.record.action)
        return True

    def trust(self, instance_id: InstanceId, now_s: float) -> bool:
        """Return True when the pipeline is a route again, because it has not ended since ``doubt``."""
        doubt = self._doubted.pop(instance_id, None)
        return doubt is not None and doubt.reported is not None and self.apply(doubt.reported, now_s)

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
        for instance_id in [i for i, doubt in self._doubted.items() if doubt.action == action]:
            del self._doubted[instance_id]
            self._retired.add(instance_id)
        for route in [r for r in self._aside.values() if r.record.action == action]:
            route.leaves = False
            del self._aside[route.record.instance_id]
            self._retired.add(route.record.instance_id)

    def groups(self, action: ActionName) -> frozenset[GroupId]:
        """Return the groups that are ready, with or without a free slot."""
        return frozenset(r.record.group_id for r in self._routes.get(action, {}).values())

    def serving(self, action: ActionName) -> tuple[Serving, ...]:
        """Return the instances that take the action's requests; for a group, its first stage."""
        records = (route.record for route in self._routes.get(action, {}).values())
        return tuple(Serving(r, 1 + sum(g == r.group_id for g in self._staying.values())) for r in records)

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
        route = routes.pop(instance_id, None)
        if route is not None and route.inflight:
            self._aside[instance_id] = route
        if not routes:
            del self._routes[action]
