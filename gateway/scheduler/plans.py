"""From a chosen scheme to Plan v1 (docs/formats/plan.md)."""

from __future__ import annotations

import math
from dataclasses import dataclass

from gateway.scheduler.events import ActionFacts
from thaw.ids import GroupId, HostId, InstanceId, PlanId
from thaw.instance import InstanceRecord, InstanceState, StartMode
from thaw.model import FileRange, ModelFacts
from thaw.plan import PLAN_VERSION, Plan, PlanModel, PlanStage, StageRole


@dataclass(frozen=True, slots=True)
class Choice:
    """Where one worker goes, and what is foretold of its start."""

    host_id: HostId
    device: str
    device_kind: str
    fetch_within_s: float = math.inf
    predicted_ttft_s: float | None = None
    bound_ttft_s: float | None = None
    fallback: bool = False


def one_stage_plan(
    facts: ActionFacts, model: ModelFacts | None, choice: Choice, *, epoch: int, plan_id: str, group_id: str
) -> Plan:
    """``created_wall_ns`` is left 0: whoever writes the plan stamps it."""
    stage = PlanStage(
        0, choice.host_id, choice.device, StageRole.FULL, (0, 0 if model is None else model.n_layers),
        () if model is None else whole_files(model), (), facts.need_bytes, 1.0,
        None if math.isinf(choice.fetch_within_s) else max(0, int(choice.fetch_within_s * 1000)),
    )  # fmt: skip
    plan_model = None if model is None else PlanModel(model.uri, model.sha256, model.etag, model.n_bytes)
    return Plan(
        PLAN_VERSION, PlanId(plan_id), GroupId(group_id), epoch, facts.name, facts.version, (stage,), plan_model,
        predicted_ttft_s=choice.predicted_ttft_s, bound_ttft_s=choice.bound_ttft_s,
    )  # fmt: skip


def whole_files(model: ModelFacts) -> tuple[FileRange, ...]:
    """Every file from end to end, in the order of the facts: sidecars first."""
    return tuple(FileRange(name, 0, n_bytes) for name, n_bytes in model.files.items())


def starting_record(plan: Plan, stage: int, instance_id: InstanceId, facts: ActionFacts) -> InstanceRecord:
    """What the view holds of an instance until its host speaks of it."""
    at = plan.stages[stage]
    return InstanceRecord(
        instance_id, at.host, plan.action, plan.action_version, plan.group_id, InstanceState.STARTING, "", facts.slots,
        at.reserve_bytes, at.device, StartMode.COLD, keep_alive_s=facts.keep_alive_s,
    )  # fmt: skip
