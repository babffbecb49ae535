"""From the registry and the event stream to the policy's events."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Final

import redis

from gateway.scheduler.events import (
    ActionDeleted,
    ActionFacts,
    ActionSeen,
    Event,
    GatewaysLost,
    HostSeen,
    HostsSeen,
    QuotasSeen,
    Rebuilt,
    StartRefused,
    Timer,
    facts_of,
)
from gateway.scheduler.io.group_credentials import GroupCredentials
from gateway.scheduler.view.cluster import ClusterView
from relay.protocol.messages import (
    ActionChanged,
    CommandRefused,
    ConsolidationFailed,
    DemandAdded,
    DemandRemoved,
    HostChanged,
    InstanceChanged,
    ModelInspected,
    ModelsAllowedChanged,
    QuotasChanged,
)
from relay.state.allowed_models import AllowedModels, ModelLeave
from relay.state.clock import StateClock
from relay.state.quotas import NamespaceQuotas
from relay.state.records import Records
from relay.state.recount import recount
from relay.state.registry import LEASE_MS, Registry
from thaw.action import Action
from thaw.clock import wall_ms
from thaw.errors import NotFound, ProtocolError, RequestError
from thaw.ids import ActionName, Namespace
from thaw.logs import Log
from thaw.model_uri import ModelPolicy

_RECOUNT_S: Final = 60.0
"""A rolling upgrade leaves wrong counts for so long."""

_FOR_POLICY: Final = (
    DemandAdded,
    DemandRemoved,
    InstanceChanged,
    ModelInspected,
    CommandRefused,
    ConsolidationFailed,
    StartRefused,
    Timer,
)


class Reading:
    """Reads the registry for the policy.  Raises PlatformError when the state server does not answer."""

    def __init__(
        self, client: redis.Redis, credentials: GroupCredentials, log: Log, clock: StateClock, models: ModelPolicy
    ) -> None:
        self._registry, self._records, self._credentials = Registry(client, clock), Records(client), credentials
        self._client, self._log = client, log
        self._recounted_s = 0.0
        self._quotas = NamespaceQuotas(client)
        self._models = ModelLeave(models, AllowedModels(client))

    def rebuilt(self) -> Rebuilt:
        allowed = self._models.allowed.all()
        self._recount()
        # instances before demand: a request served in between is seen as waiting, and its removal is an event
        return Rebuilt(
            hosts=tuple(self._registry.live_hosts()),
            instances=tuple(self._registry.instances()),
            plans=tuple(self._registry.plans()),
            models=tuple(self._registry.models()),
            demand=tuple(self._registry.demand()),
            # after demand: an action that a request names and this does not have is gone, not new
            actions=tuple(
                facts
                for a in self._records.all_actions()
                if (facts := self._facts(a, allowed.get(a.namespace, ()))) is not None
            ),
            wall_ms=wall_ms(),
            credentials=tuple(self._credentials.groups()),
            quotas=tuple(QuotasSeen(namespace, own) for namespace, own in self._quotas.all().items()),
        )

    def heartbeats(self, view: ClusterView) -> Iterator[Event]:
        yield HostsSeen(tuple(self._registry.live_hosts()))
        if time.monotonic() - self._recounted_s > _RECOUNT_S:
            self._recount()
        now_ms = wall_ms()
        # a gateway's first heartbeat may come after its first request
        holders = {d.demand.gateway for d in view.demand.values() if now_ms - d.demand.queued_wall_ms > LEASE_MS}
        lost = frozenset(g for g in holders if not self._registry.is_gateway_alive(g))
        if lost:
            yield GatewaysLost(lost)

    def _recount(self) -> None:
        """Put the namespaces' counts right, which an older gateway or scheduler may not have kept."""
        recount(self._client)
        self._recounted_s = time.monotonic()

    def events_of(self, items: Iterable[object], view: ClusterView) -> Iterator[Event]:
        """Yield the policy's events for the messages.  An action that the policy does not know yet is read first, once
        for all messages."""
        read: set[ActionName] = set()
        for item in items:
            if isinstance(item, ActionChanged):
                read.add(item.action)
                yield self._action(item.action, changed=True)
            elif isinstance(item, ModelsAllowedChanged):
                names = [name for name in _llms_of(item.namespace, view) if name not in read]
                read.update(names)
                yield from (self._action(name, changed=True) for name in names)
            elif isinstance(item, QuotasChanged):
                yield QuotasSeen(item.namespace, self._quotas.of(item.namespace))
            elif isinstance(item, HostChanged):
                report = self._registry.live_host(item.host_id)
                yield HostsSeen(tuple(self._registry.live_hosts())) if report is None else HostSeen(report)
            elif isinstance(item, _FOR_POLICY):
                if isinstance(item, DemandAdded) and item.action not in read and view.action(item.action).facts is None:
                    read.add(item.action)
                    yield self._action(item.action, changed=False, namespace=item.namespace)
                yield item

    def _action(self, name: ActionName, *, changed: bool, namespace: Namespace | None = None) -> Event:
        owner = namespace or Namespace(name.partition("/")[0])
        try:
            action = self._records.action(owner, name)
            facts = self._facts(action, self._models.allowed.of(owner) if action.is_llm else ())
        except (NotFound, ProtocolError):
            facts = None
        return ActionDeleted(name) if facts is None else ActionSeen(facts, changed)

    def _facts(self, action: Action, allowed: Sequence[str]) -> ActionFacts | None:
        """``allowed``: the own prefixes of the action's namespace.  Return None for a function that is served by its
        pool, and for a record that nothing can be started from: one record must not keep the scheduler from all
        others."""
        if action.served_by != action.name:
            return None
        try:
            facts = facts_of(action)
        except ProtocolError as e:
            self._log.event("action_refused", action=action.name, error=e.message)
            return None
        try:
            self._models.check_among(action, allowed)
        except RequestError as e:
            return replace(facts, refused=e.info())
        return facts


def _llms_of(namespace: Namespace, view: ClusterView) -> Iterator[ActionName]:
    for name, action in view.actions.items():
        if action.facts is not None and action.facts.is_llm and name.partition("/")[0] == namespace:
            yield name
