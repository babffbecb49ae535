"""The policy's events besides the messages of the event stream.  The loop makes them; only Rebuilt carries a clock."""

from __future__ import annotations

import math
from dataclasses import dataclass

from gateway.scheduler.decisions import TimerKind
from relay.protocol.messages import (
    CommandRefused,
    ConsolidationFailed,
    DemandAdded,
    DemandRemoved,
    InstanceChanged,
    ModelInspected,
)
from thaw.action import KIND_PYTHON, Action
from thaw.config import MOST_INSTANCES
from thaw.errors import ErrorInfo, ProtocolError
from thaw.host import HostReport
from thaw.ids import ActionName, GatewayId, GroupId, Namespace
from thaw.instance import InstanceRecord
from thaw.model import ModelFacts
from thaw.plan import Plan
from thaw.quotas import OwnQuotas

MIB = 1024 * 1024


@dataclass(frozen=True, slots=True)
class ActionFacts:
    """The facts of an action that scheduling needs.  They are small (there is no code in here), so ten thousand are
    cheap."""

    name: ActionName
    version: str
    kind: str
    need_bytes: int  # device memory of a full worker: weights and all the rest
    slots: int
    max_instances: int
    keep_alive_s: float
    min_instances: int = 0
    model_uri: str = ""  # empty: an ordinary function
    max_stages: int = 1
    forced_stages: int | None = None
    slo_ttft_s: float = 7.5
    slo_tpot_s: float = 0.2
    transport: str = "auto"
    keep: int | None = None
    timeout_s: float = 300.0
    fetch_bytes_per_s: int | None = None  # the most that each of its containers may fetch; None: what the link allows
    refused: ErrorInfo | None = None  # why its model may not be run any more

    @property
    def is_llm(self) -> bool:
        return bool(self.model_uri)


def facts_of(action: Action) -> ActionFacts:
    """Raises ProtocolError for a record with numbers that cannot be used (no deployment accepts them now)."""
    try:
        facts = _plain_facts(action)
        numbers = (facts.keep_alive_s, float(facts.need_bytes), float(facts.slots))
    except OverflowError as e:
        raise ProtocolError(f"{action.name}: {e}") from e
    if not all(map(math.isfinite, numbers)) or max(facts.min_instances, facts.max_instances) > MOST_INSTANCES:
        raise ProtocolError(f"{action.name}: its scaling is out of bounds")
    return facts


def _plain_facts(action: Action) -> ActionFacts:
    config = action.config
    if not action.is_llm or config is None:
        return ActionFacts(
            action.name,
            action.version,
            action.exec.kind or KIND_PYTHON,
            action.limits.memory * MIB,
            max(1, action.limits.concurrency),
            action.max_instances,
            action.keep_alive_s,
            0 if action.is_sequence else action.min_instances,
            timeout_s=action.limits.timeout / 1000,
        )
    scaling = config.scaling
    return ActionFacts(
        action.name,
        action.version,
        action.exec.kind,
        config.reserve_bytes,
        max(1, min(scaling.max_batch, config.limits.concurrency)),
        scaling.max_instances,
        scaling.keep_alive_s,
        scaling.min_instances,
        config.model.uri,
        min(scaling.max_stages, action.most_stages or scaling.max_stages),
        scaling.stages,
        config.slo.ttft_ms / 1000,
        config.slo.tpot_ms / 1000,
        config.transport,
        scaling.keep,
        action.limits.timeout / 1000,
        fetch_bytes_per_s=config.fetch_bytes_per_s,
    )


@dataclass(frozen=True, slots=True)
class ActionSeen:
    """``changed``: created or updated just now (its model is inspected again), not merely read for the first time."""

    facts: ActionFacts
    changed: bool = False


@dataclass(frozen=True, slots=True)
class ActionDeleted:
    action: ActionName


@dataclass(frozen=True, slots=True)
class QuotasSeen:
    """An operator's own values for a namespace."""

    namespace: Namespace
    own: OwnQuotas


@dataclass(frozen=True, slots=True)
class HostsSeen:
    """Every host with a live lease.  A host that the view knows and this event does not name is lost."""

    reports: tuple[HostReport, ...]


@dataclass(frozen=True, slots=True)
class HostSeen:
    """One host's report, between two reports of all hosts: it has news that some action may wait for."""

    report: HostReport


@dataclass(frozen=True, slots=True)
class GatewaysLost:
    gateways: frozenset[GatewayId]


@dataclass(frozen=True, slots=True)
class StartRefused:
    """A start that was decided could not be commanded: the relay server did not take its group's credential."""

    group_id: GroupId
    error: ErrorInfo


@dataclass(frozen=True, slots=True)
class Timer:
    kind: TimerKind
    key: str


@dataclass(frozen=True, slots=True)
class Rebuilt:
    """The registry's content: at the start of a leadership, and after the event stream was away."""

    wall_ms: int
    hosts: tuple[HostReport, ...]
    instances: tuple[InstanceRecord, ...]
    demand: tuple[DemandAdded, ...]
    plans: tuple[Plan, ...]
    models: tuple[ModelFacts, ...]
    actions: tuple[ActionFacts, ...]
    credentials: tuple[GroupId, ...] = ()
    quotas: tuple[QuotasSeen, ...] = ()


Demand = DemandAdded | DemandRemoved
OtherEvent = (
    InstanceChanged
    | ModelInspected
    | CommandRefused
    | ConsolidationFailed
    | ActionSeen
    | ActionDeleted
    | QuotasSeen
    | HostsSeen
    | HostSeen
    | GatewaysLost
    | StartRefused
    | Timer
    | Rebuilt
)
Event = Demand | OtherEvent
