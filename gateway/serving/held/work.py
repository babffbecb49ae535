"""The running, starting and waiting work, and news of changes: the answers of held requests."""

from __future__ import annotations

import hashlib
import threading
from collections import defaultdict
from typing import Final

import redis

from gateway.serving.held.until_news import Looks
from relay.protocol.messages import DemandAdded
from relay.state.pool_members import members
from relay.state.registry import Registry
from thaw import wire
from thaw.ids import ActionName, GroupId, Namespace
from thaw.instance import InstanceRecord, InstanceState
from thaw.pools import is_pool_name
from thaw.process.bell import Bell
from thaw.work import Shared, Waiting, Work, Worker

_EVERYTHING: Final = ""


class _Snapshot:
    """The registry at one moment.  Each namespace's part is made once, for all requests that look at it."""

    def __init__(self, client: redis.Redis, registry: Registry) -> None:
        """Raises Unavailable."""
        self._records = [r for r in registry.instances() if r.action]
        self._demand: list[DemandAdded] = list(registry.demand())
        self._due_ms = _due_ms(registry) if any(r.state is InstanceState.STARTING for r in self._records) else {}
        self._shared = shared_by(client, {r.action for r in self._records} | {d.action for d in self._demand})
        self._lock = threading.Lock()
        self._parts: dict[str, tuple[str, Work]] = {}

    def part(self, namespace: Namespace | None) -> tuple[str, Work]:
        """The mark of the namespace's part and the part, or with None everything."""
        within = _EVERYTHING if namespace is None else f"{namespace}/"
        with self._lock:
            if within not in self._parts:
                work = self._within(within)
                self._parts[within] = (hashlib.sha256(wire.dumps(work)).hexdigest()[:16], work)
            return self._parts[within]

    def _within(self, within: str) -> Work:
        records = [r for r in self._records if r.action.startswith(within)]
        waiting: dict[ActionName, list[int]] = defaultdict(list)
        for demand in self._demand:
            if demand.action.startswith(within):
                waiting[demand.action].append(demand.queued_wall_ms)
        return Work(
            tuple(
                _worker(r, self._due_ms.get(r.group_id))
                for r in sorted(records, key=lambda r: (r.action, r.group_id, r.stage, r.instance_id))
            ),
            tuple(Waiting(action, len(times), min(times)) for action, times in sorted(waiting.items())),
            tuple(one for one in self._shared if one.action.startswith(within)),
        )


class WorkBook:
    def __init__(self, client: redis.Redis, registry: Registry) -> None:
        self._client, self._registry = client, registry
        self._looks = Looks[_Snapshot]()
        self.bell = Bell()
        """It rings for every instance that changes, and for every request that begins or ends to wait."""

    def look(self, namespace: Namespace | None) -> tuple[float, tuple[str, Work]]:
        """When the registry was read, and the mark and the work of the namespace, or with None of all.  Raises
        Unavailable."""
        began_s, snapshot = self._looks.recent(None, lambda: _Snapshot(self._client, self._registry))
        return began_s, snapshot.part(namespace)


def _due_ms(registry: Registry) -> dict[GroupId, int]:
    return {
        plan.group_id: plan.created_wall_ns // 1_000_000 + round(1000 * plan.predicted_ttft_s)
        for plan in registry.plans()
        if plan.predicted_ttft_s is not None
    }


def shared_by(client: redis.Redis, names: set[ActionName]) -> tuple[Shared, ...]:
    """Return which functions share the pools among the names.  A platform without adapters reads nothing."""
    pools = {name for name in names if is_pool_name(name)}
    found = (
        Shared(pool, functions)
        for namespace in {Namespace(pool.partition("/")[0]) for pool in pools}
        for pool, functions in members(client, namespace).items()
        if pool in pools
    )
    return tuple(sorted(found, key=lambda one: one.action))


def _worker(record: InstanceRecord, due_ms: int | None) -> Worker:
    return Worker(
        record.action,
        record.action_version,
        record.host_id,
        record.device,
        record.state,
        record.slots,
        record.stage,
        record.n_stages,
        record.created_wall_ms,
        record.idle_since_wall_ms,
        due_ms if record.state is InstanceState.STARTING else None,
    )
