"""A pipeline becomes one worker while it answers: when its host is asked, and the decisions after its switch.

Stage 0 is a full worker and owns the group's requests, so it switches alone, between two of its steps.  The scheduler
only asks for it, and learns from stage 0's record, which then says ``n_stages == 1``::

              group whole                       record of one stage
    PIPELINE ─────────────▶ ASKED ────────────────────────────────────────▶ ONE WORKER
                            │   ▲                                            plan rewritten, other stages released,
         refused, failed or │   │ the pause is over                          the credential revoked with the last one
         no answer in time  ▼   │
                           PAUSED ──TRIES times, or the engine cannot──▶ STAYS a pipeline (successors.py)

    from every state: record of one stage ──▶ ONE WORKER; the group ends or is released ──▶ nothing more is asked

=============== ============================== ================================ =================================
state           the plan in the registry has   the other stages                 when one of them has gone
=============== ============================== ================================ =================================
PIPELINE …STAYS all stages                     answer with stage 0              the group ends
ONE WORKER      stage 0                        *left behind*: told to go,       nothing ends; with the last one the
                                               idle or not, until they are gone relay server lets the group in no more
=============== ============================== ================================ =================================

Later stages that are to stay as workers of their own are asked with stage 0, and set apart at its switch (scale_up.py).

The plan is rewritten before any stage is released.  So a successor scheduler finds either all stages and asks again (a
host that is asked twice begins once), or one stage, and releases the stages left behind.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Final

from gateway.scheduler.decisions import (
    ConsolidateInstance,
    Decision,
    Flag,
    RevokeCredential,
    RewritePlan,
    TimerKind,
    Wake,
)
from gateway.scheduler.placement.plans import fetch_key, later_key, slots
from gateway.scheduler.policy import groups, scale_up
from gateway.scheduler.view.cluster import ClusterView
from gateway.scheduler.view.entries import Consolidation, GroupView
from thaw.errors import DeveloperError, ErrorInfo, Unavailable, from_info
from thaw.ids import CommandId, GroupId
from thaw.instance import InstanceState
from thaw.plan import Plan, PlanTransport

TRIES: Final = 5
PAUSE_S, LONGEST_PAUSE_S = 5.0, 60.0
"""The pause before a group is asked again doubles with every try.  The cause of a failure is mostly that a busy host
lacks memory."""


# asking ------------------------------------------------------------------------------------------------------------


def pursue(view: ClusterView, group: GroupView, now_s: float) -> list[Decision]:
    """Ask the host of a whole group's stage 0 to make one worker of the group, if that is possible and was not asked
    yet."""
    if group.consolidation is not None or not _can_fold(view, group):
        return []
    group.consolidation = Consolidation(n_workers=scale_up.n_workers(view, group, now_s))
    return _ask(view, group, group.consolidation, now_s)


def _can_fold(view: ClusterView, group: GroupView) -> bool:
    """True for a whole pipeline that is not to stay one, and whose stage 0 gets the rest of the model.  Only a full
    worker does, and not where its host's pool has no room for the rest."""
    plan = group.plan
    return (
        view.parts.consolidation
        and not group.is_starting
        and len(plan.stages) > 1
        and plan.keep >= 1
        and bool(plan.stages[0].later_ranges)
    )


def _ask(view: ClusterView, group: GroupView, state: Consolidation, now_s: float) -> list[Decision]:
    head = view.instances[group.instance_ids[0]]
    facts = view.action(group.plan.action).facts
    is_wanted = facts is not None and facts.version == group.plan.action_version
    if head.releasing is not None or head.state is not InstanceState.READY or not is_wanted:
        return _pause(group, state, now_s)  # it is about to end; if not, it is asked later
    state.asked, state.due_s = CommandId(view.new_id()), now_s + view.settings.consolidate_deadline_s
    return [
        ConsolidateInstance(head.record.host_id, head.record.instance_id, group.plan.group_id, state.asked),
        *scale_up.ask(view, group, state),
        Wake(state.due_s, TimerKind.CONSOLIDATE, group.plan.group_id),
    ]


def _pause(group: GroupView, state: Consolidation, now_s: float) -> list[Decision]:
    pause_s = min(LONGEST_PAUSE_S, PAUSE_S * 2 ** max(0, state.n_failed - 1))
    state.asked, state.due_s = None, now_s + pause_s
    return [Wake(state.due_s, TimerKind.CONSOLIDATE, group.plan.group_id)]


def is_pursued(group: GroupView) -> bool:
    """True while the group may become one worker soon."""
    return group.consolidation is not None and not group.consolidation.is_over


def refused(
    view: ClusterView, group: GroupView, command_id: CommandId, error: ErrorInfo, now_s: float
) -> list[Decision] | None:
    """A host has refused a command.  None if it was none of these."""
    if group.consolidation is not None and group.consolidation.asked == command_id:
        return failed(view, group.plan.group_id, error, now_s)
    stage = scale_up.asked_as(group, command_id)
    return None if stage is None else scale_up.failed(view, stage, error, now_s)


def failed(view: ClusterView, group_id: GroupId, error: ErrorInfo, now_s: float) -> list[Decision]:
    """The group is a pipeline still: try again after a pause, unless its engine cannot do it or has failed often
    enough."""
    group = view.groups.get(group_id)
    state = None if group is None else group.consolidation
    if group is None or state is None or state.asked is None:
        return []
    state.asked = None
    state.n_failed += 1
    state.is_over = state.n_failed >= TRIES or isinstance(from_info(error), DeveloperError)
    said = {"group_id": group_id, "action": group.plan.action, "code": error.code, "error": error.message}
    flag = Flag("consolidation_failed", {**said, "in_a_row": state.n_failed, "stays_a_pipeline": state.is_over})
    return [flag, *([] if state.is_over else _pause(group, state, now_s))]


def due(view: ClusterView, group_id: GroupId, now_s: float) -> list[Decision]:
    """Handle the timer: the pause is over, or a host has not answered in time."""
    group = view.groups.get(group_id)
    state = None if group is None else group.consolidation
    if group is None or state is None or state.is_over or now_s < state.due_s:
        return []
    if state.asked is None:
        return _ask(view, group, state, now_s)
    error = Unavailable(f"its host did not answer within {view.settings.consolidate_deadline_s:g} s")
    return failed(view, group_id, error.info(), now_s)


# consequences ------------------------------------------------------------------------------------------------------


def has_switched(view: ClusterView, plan: Plan) -> bool:
    """True when stage 0 has become one worker and its plan does not say so yet."""
    return len(plan.stages) > 1 and any(
        m.record.takes_requests and m.record.n_stages == 1 for m in view.members(plan.group_id)
    )


def folded(plan: Plan) -> Plan:
    """Return the plan of the one worker.  Its ranges stay as they were fetched: they name the segment that the host
    holds."""
    first, last = plan.stages[0], plan.stages[-1]
    whole = replace(first, layers=(first.layers[0], last.layers[1]))
    return replace(plan, stages=(whole,), transport=PlanTransport(), keep=1)


def fold(view: ClusterView, group: GroupView, now_s: float) -> list[Decision]:
    """Stage 0 answers alone from now on.  The stages that are to stay go on by themselves.  The others go at once: no
    request needs them."""
    asked = None if group.consolidation is None else group.consolidation.kept
    apart = scale_up.set_apart(view, group.plan, asked, now_s)
    kept = {kept.stage for kept in view.kept.values() if kept.pipeline == group.plan.group_id}
    for stage in group.plan.stages:
        if (host := view.hosts.get(stage.host)) is not None:
            host.ledger.remove(fetch_key(group.plan.group_id, stage.stage), now_s)
            if stage.stage not in kept:
                host.ledger.remove(later_key(group.plan.group_id, stage.stage), now_s)
    facts = view.action(group.plan.action).facts
    group.plan, group.consolidation = folded(group.plan), None
    group.instance_ids, group.command_ids = group.instance_ids[:1], group.command_ids[:1]
    group.slots = slots(facts, 1) if facts is not None else view.instances[group.instance_ids[0]].record.slots
    return [*apart, RewritePlan(group.plan), *_dismiss(view, group, now_s), *groups.last_left(view, group)]


def resume(view: ClusterView, group: GroupView, now_s: float) -> list[Decision]:
    """Go on where a former scheduler stopped: ask again, or release the stages that were left behind."""
    return [*_dismiss(view, group, now_s), *pursue(view, group, now_s)]


def _dismiss(view: ClusterView, group: GroupView, now_s: float) -> list[Decision]:
    """Release the stages that are left behind, but for those that stay."""
    left = view.left_behind(group)
    return groups.dismiss(view, [m for m in left if m.record.instance_id not in view.kept], now_s)


def stale_credentials(
    view: ClusterView, known: Iterable[GroupId], decided: Iterable[Decision]
) -> Iterable[RevokeCredential]:
    """Revoke the credentials that no group needs: of groups without a plan, and of workers that left their pipeline
    behind.  ``decided`` revokes some already."""
    done = {d.group_id for d in decided if isinstance(d, RevokeCredential)}
    for group_id in sorted(set(known) - done):
        group = view.groups.get(group_id)
        if group is None or (len(group.plan.stages) == 1 and not view.left_behind(group)):
            yield RevokeCredential(group_id)
