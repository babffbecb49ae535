"""Tells a namespace's tenant how its models stand, and when that changes: what an operator of a cluster shows.

It lives on the event stream, which every gateway reads, so all gateways say the same of what happened since they
started.  Why a start failed is remembered until an instance is ready or the action changes.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import replace

from gateway.serving.action_cache import namespace_of, simple_name
from relay.protocol.messages import ColdStarted, StartFailed
from relay.state.registry import Registry
from thaw import wire
from thaw.action import Action
from thaw.errors import ErrorInfo, Unavailable
from thaw.ids import ActionName, InstanceId, Namespace
from thaw.instance import InstanceRecord, InstanceState
from thaw.standing import ColdStart, Standing, Standings

_MIB = 1 << 20


class StandingsOf:
    """``actions`` lists a namespace's actions, from the state server."""

    def __init__(self, registry: Registry, actions: Callable[[Namespace], list[Action]]) -> None:
        self._registry, self._actions = registry, actions
        self._changed = threading.Condition()
        self._n_changes: Counter[Namespace] = Counter()
        self._n_reloads = 0
        self._instances: dict[InstanceId, InstanceRecord] = {}
        self._trouble: dict[ActionName, ErrorInfo] = {}
        self._cold: dict[ActionName, ColdStart] = {}

    # what events do --------------------------------------------------------------------------------------------------

    def instance_changed(self, record: InstanceRecord) -> None:
        """Called with every report; those that change no state (an instance became idle) wake nobody."""
        with self._changed:
            known = self._instances.get(record.instance_id)
            if record.state is InstanceState.GONE:
                self._instances.pop(record.instance_id, None)
                was_serving = known is not None and known.state is not InstanceState.STARTING
                if record.error is not None and not was_serving:
                    self._trouble[record.action] = replace(record.error, printed="")
            else:
                self._instances[record.instance_id] = record
                if record.state is InstanceState.READY and record.takes_requests:
                    self._trouble.pop(record.action, None)
            if known is None or known.state is not record.state:
                self._note(record.action)

    def start_failed(self, failed: StartFailed) -> None:
        with self._changed:
            self._trouble[failed.action] = replace(failed.error, printed="")
            self._note(failed.action)

    def cold_started(self, started: ColdStarted) -> None:
        with self._changed:
            self._cold[started.action] = ColdStart(started.at_wall_ms, started.ttft_ms, started.start_mode)
            self._note(started.action)

    def action_changed(self, action: ActionName, *, deleted: bool) -> None:
        with self._changed:
            self._trouble.pop(action, None)
            if deleted:
                self._cold.pop(action, None)
            self._note(action)

    def reload(self, records: Collection[InstanceRecord]) -> None:
        """Take over the registry's truth after a (re)connection: anything may have changed."""
        with self._changed:
            self._instances = {r.instance_id: r for r in records}
            self._n_reloads += 1
            self._changed.notify_all()

    # what a tenant asks ----------------------------------------------------------------------------------------------

    def wait(self, namespace: Namespace, known: str, wait_s: float) -> Standings:
        """Return how the namespace's models stand as soon as that has another token than ``known``, or after
        ``wait_s``.  Raises Unavailable."""
        until_s = time.monotonic() + wait_s
        while True:
            with self._changed:
                before = self._seen(namespace)
            found = self._now(namespace)
            if found.token != known:
                return found
            with self._changed:
                left_s = max(0.0, until_s - time.monotonic())
                if not self._changed.wait_for(lambda seen=before: self._seen(namespace) != seen, left_s):  # type: ignore[misc]
                    return self._now(namespace)  # what no event tells of, as the room on hosts

    def _now(self, namespace: Namespace) -> Standings:
        actions = sorted((a for a in self._actions(namespace) if a.is_llm), key=lambda a: a.name)
        found = tuple(self._standing(action) for action in actions)
        token = hashlib.sha256(b"\n".join(map(wire.dumps, found))).hexdigest()[:32]
        return Standings(token, found)

    def _standing(self, action: Action) -> Standing:
        assert action.config is not None  # noqa: S101  it is a model's
        with self._changed:
            own = [r for r in self._instances.values() if r.action == action.name]
            trouble, cold_start = self._trouble.get(action.name), self._cold.get(action.name)
        heads = Counter(r.state for r in own if r.takes_requests and r.action_version == action.version)
        ready, starting = heads[InstanceState.READY], heads[InstanceState.STARTING]
        if trouble is None and ready + starting < action.config.scaling.min_instances:
            trouble = self._without_room(action.config.reserve_bytes)
        return Standing(
            simple_name(action.name),
            action.version,
            action.config,
            action.annotations,
            ready,
            starting,
            trouble,
            cold_start,
        )

    def _without_room(self, reserve_bytes: int) -> ErrorInfo | None:
        """Why no host can take another whole worker now, or None.  A pipeline needs less of each host, and then its
        start is seen."""
        hosts = [h for h in self._registry.live_hosts() if not h.draining]
        free = max((d.free_bytes for h in hosts for d in h.devices), default=0)
        if not hosts:
            return Unavailable("There is no host that takes work.", hint="thaw host list").info()
        if free >= reserve_bytes:
            return None
        return Unavailable(
            f"An instance needs {reserve_bytes // _MIB} MiB of device memory; the most that one of {len(hosts)} "
            f"host(s) has free is {free // _MIB} MiB.",
            hint="add a host, or lower resources.gpu_memory_mb or scaling.min_instances",
        ).info()

    def _seen(self, namespace: Namespace) -> tuple[int, int]:
        return self._n_reloads, self._n_changes[namespace]

    def _note(self, action: ActionName) -> None:
        self._n_changes[namespace_of(action)] += 1
        self._changed.notify_all()
