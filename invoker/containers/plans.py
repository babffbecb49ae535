"""The checks of a plan before a host acts on it.  docs/formats/plan.md; vectors in tests/vectors/plan.json."""

from __future__ import annotations

from thaw.errors import ProtocolError
from thaw.plan import PLAN_VERSION, Plan, PlanStage, StageRole, TransportKind


def check_plan(plan: Plan) -> None:
    """Raises ProtocolError for another version or a plan that contradicts itself."""
    if plan.version != PLAN_VERSION:
        raise ProtocolError(f"plan version {plan.version}; this host reads {PLAN_VERSION}")
    if len(plan.group_id) != 32 or set(plan.group_id) - set("0123456789abcdef"):
        raise ProtocolError(f"group id {plan.group_id!r} is not 32 hex digits")
    if not plan.stages or [s.stage for s in plan.stages] != list(range(len(plan.stages))):
        raise ProtocolError("the stages of a plan are numbered from 0 without a gap")
    for stage in plan.stages:
        _check_stage(stage)
    ends = [0, *(s.layers[1] for s in plan.stages)]
    if any(stage.layers[0] != end for stage, end in zip(plan.stages, ends, strict=False)):
        raise ProtocolError("the layers of a plan's stages do not join")
    if not 0 <= plan.keep <= len(plan.stages):
        raise ProtocolError(f"keep is {plan.keep} of {len(plan.stages)} stages")
    if len(plan.stages) > 1:
        _check_group(plan)


def _check_group(plan: Plan) -> None:
    """Several stages: each has something to compute, and a way to the others."""
    if plan.model is None:
        raise ProtocolError("an ordinary function has one stage")
    for stage in plan.stages:
        if stage.layers[0] == stage.layers[1]:
            raise ProtocolError(f"stage {stage.stage} has no layer")
        if stage.later_ranges and stage.role is not StageRole.FULL:
            raise ProtocolError(f"stage {stage.stage} fetches more than its layers and reserves no memory for it")
    transport = plan.transport
    if transport.kind == TransportKind.NONE or not transport.address or not transport.credential_ref:
        raise ProtocolError(f"{len(plan.stages)} stages have no way to reach one another")


def _check_stage(stage: PlanStage) -> None:
    first, last = stage.layers
    if first < 0 or last < first:
        raise ProtocolError(f"stage {stage.stage} has layers [{first}, {last})")
    if not 0.0 < stage.share <= 1.0:
        raise ProtocolError(f"stage {stage.stage} has a share of {stage.share}")
    if stage.reserve_bytes < 0:
        raise ProtocolError(f"stage {stage.stage} reserves {stage.reserve_bytes} bytes")
    for part in (*stage.first_ranges, *stage.later_ranges):
        if part.offset < 0 or part.n_bytes <= 0:
            raise ProtocolError(f"stage {stage.stage} wants {part.n_bytes} bytes of {part.file} from {part.offset}")
