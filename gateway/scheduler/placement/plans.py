"""From a chosen scheme to Plan v1 (docs/formats/plan.md)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from gateway.scheduler.events import ActionFacts
from gateway.scheduler.placement.stage_bytes import StageBytes, Stages
from thaw.ids import GroupId, HostId, InstanceId, PlanId
from thaw.instance import InstanceRecord, InstanceState, StartMode
from thaw.plan import PLAN_VERSION, Plan, PlanModel, PlanStage, PlanTransport, StageRole
from thaw.tracing.bound import Term


@dataclass(frozen=True, slots=True)
class Seat:
    """The place of one worker of a group."""

    host_id: HostId
    device: str
    device_kind: str
    role: StageRole = StageRole.FULL


@dataclass(frozen=True, slots=True)
class Choice:
    """The places of a group's workers, stage 0 first, and the prediction of its start."""

    seats: tuple[Seat, ...]
    fetch_within_s: float = math.inf
    predicted_ttft_s: float | None = None
    bound_ttft_s: float | None = None
    predicted_terms: tuple[Term, ...] = ()
    bound_terms: tuple[Term, ...] = ()
    fallback: bool = False
    keep: int = 1
    why: Mapping[str, object] = field(default_factory=dict)  # for the trace

    @property
    def n_stages(self) -> int:
        return len(self.seats)


@dataclass(frozen=True, slots=True)
class Names:
    """The identifiers of a new plan."""

    epoch: int
    plan_id: str
    group_id: str


def group_plan(
    facts: ActionFacts, stages: Stages | None, choice: Choice, names: Names, transport: PlanTransport
) -> Plan:
    """``created_wall_ns`` is left 0: the code that writes the plan stamps it.  ``stages`` is None without a model."""
    n = choice.n_stages
    parts = (StageBytes((0, 0), (), (), 0),) if stages is None else stages.of(n)
    deadline_ms = None if math.isinf(choice.fetch_within_s) else max(0, int(choice.fetch_within_s * 1000))
    made = tuple(_stage(facts, (k, n, choice.keep), seat, parts[k], deadline_ms) for k, seat in enumerate(choice.seats))
    model = None if stages is None else stages.facts
    plan_model = None if model is None else PlanModel(model.uri, model.sha256, model.etag, model.n_bytes)
    return Plan(
        PLAN_VERSION,
        PlanId(names.plan_id),
        GroupId(names.group_id),
        names.epoch,
        facts.name,
        facts.version,
        made,
        plan_model,
        transport,
        choice.keep,
        predicted_ttft_s=choice.predicted_ttft_s,
        bound_ttft_s=choice.bound_ttft_s,
        predicted_terms=choice.predicted_terms,
        bound_terms=choice.bound_terms,
    )


def _stage(
    facts: ActionFacts, place: tuple[int, int, int], seat: Seat, part: StageBytes, deadline_ms: int | None
) -> PlanStage:
    """``place``: the number of the stage, how many there are, and how many of them outlive the group.  Only these get
    the rest of the model, and the first one of a group that stays a pipeline."""
    k, n, keep = place
    full = seat.role is StageRole.FULL
    reserve = facts.need_bytes if full else low_reserve(facts.need_bytes, n)
    return PlanStage(
        k,
        seat.host_id,
        seat.device,
        seat.role,
        part.layers,
        part.first,
        part.rest if full and k < max(1, keep) else (),
        reserve,
        reserve / facts.need_bytes if facts.need_bytes else 1.0,
        deadline_ms,
        facts.fetch_bytes_per_s,
    )


def low_reserve(need_bytes: int, n_stages: int) -> int:
    return -(-need_bytes // n_stages)


def starting_record(plan: Plan, stage: int, instance_id: InstanceId, facts: ActionFacts) -> InstanceRecord:
    """Return the record that the view holds of an instance until its host reports it."""
    at, n = plan.stages[stage], len(plan.stages)
    return InstanceRecord(
        instance_id,
        at.host,
        plan.action,
        plan.action_version,
        plan.group_id,
        InstanceState.STARTING,
        "",
        slots(facts, n) if stage == 0 else 0,
        at.reserve_bytes,
        at.device,
        StartMode.COLD,
        keep_alive_s=facts.keep_alive_s,
        stage=stage,
        n_stages=n,
        model_version=plan.model.version if plan.model is not None else "",
    )


def slots(facts: ActionFacts, n_stages: int) -> int:
    """Return how many requests a group holds at once: as many batches are in flight as it has stages."""
    return facts.slots * n_stages


def fetch_key(group_id: str, stage: int) -> str:
    """The key of a stage's first ranges in its host's ledger."""
    return f"{group_id}/{stage}"


def later_key(group_id: str, stage: int) -> str:
    """The key of the ranges that the stage fetches behind the traffic."""
    return f"{group_id}/{stage}/later"
