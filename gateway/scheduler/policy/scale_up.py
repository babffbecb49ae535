"""A pipeline becomes several workers: which of its later stages stay, and how each goes on (ParaServe 6.1).

Stage 0 becomes a worker with all requests in flight (consolidation.py).  A full stage k ≥ 1 that is to stay loads the
rest of the model meanwhile, leaves the pipeline when stage 0 has switched, and builds an engine of its own around the
model that it has.  It is then a group by itself, with a name that follows from the pipeline's (thaw/ids.py)::

              stage 0 asked          stage 0 is one worker                record of a group of its own
    PIPELINE ───────────────▶ ASKED ───────────────────────▶ SET APART ─────────────────────────────▶ WORKER
                               │                                 │
                 its load fails│                                 │it has gone, failed, or makes no progress,
                               ▼                                 ▼or its host is drained
                         left behind like a low stage        released; demand may start another worker

A stage that is set apart has the plan of its worker in the registry, written before that of the pipeline is rewritten.
So a successor scheduler knows every stage that stays: by its record, which says that it is consolidating, and by that
plan.  Requests in flight never depend on it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from gateway.scheduler.decisions import (
    ConsolidateInstance,
    Decision,
    DropPlan,
    Flag,
    PlanWorker,
    TimerKind,
    Wake,
)
from gateway.scheduler.placement.plans import later_key, slots
from gateway.scheduler.placement.window import keep
from gateway.scheduler.policy import groups
from gateway.scheduler.policy.starts import free_slots, n_kept, rescale
from gateway.scheduler.view.cluster import ClusterView
from gateway.scheduler.view.entries import Consolidation, GroupView, InstanceView, KeptStage
from thaw.errors import ErrorInfo
from thaw.ids import CommandId, GroupId, InstanceId, own_group
from thaw.instance import InstanceRecord, InstanceState
from thaw.plan import Plan, PlanTransport


def n_workers(view: ClusterView, group: GroupView, now_s: float) -> int:
    """How many workers of a whole group are to stay: as many as its requests need now, or as the function says."""
    plan, action = group.plan, view.action(group.plan.action)
    able, facts = 1 + len(_able(plan)), action.facts
    if able == 1 or facts is None:
        return 1
    head = view.instances[group.instance_ids[0]]
    wanted = facts.keep
    if wanted is None:
        n_others = free_slots(view, action, facts, now_s, without=head.record.instance_id)
        arrivals = action.window.count(now_s)
        wanted = keep(head.record.inflight, len(action.waiting), arrivals, n_others, facts.slots, able)
    begun = 1 + sum(m.record.stage > 0 and m.record.is_consolidating for m in view.members(plan.group_id))
    room = 1 + facts.max_instances - action.n_serving - n_kept(view, action)
    return max(1, min(able, max(wanted, begun), room))


def _able(plan: Plan) -> tuple[int, ...]:
    """The stages beside the first that get the rest of the model, so that they can become workers."""
    return tuple(s.stage for s in plan.stages[1 : plan.keep] if s.later_ranges)


def ask(view: ClusterView, group: GroupView, state: Consolidation) -> list[Decision]:
    """Ask the stages that are to stay, and that were not asked yet.  They begin to load with stage 0."""
    decided: list[Decision] = []
    for stage in _able(group.plan)[: state.n_workers - 1]:
        member = view.instances[group.instance_ids[stage]]
        if member.record.instance_id in state.kept or member.state is not InstanceState.READY:
            continue
        command_id = state.kept[member.record.instance_id] = CommandId(view.new_id())
        decided.append(
            ConsolidateInstance(member.record.host_id, member.record.instance_id, group.plan.group_id, command_id)
        )
    return decided


# the switch of stage 0 ---------------------------------------------------------------------------------------------


def own_plan(plan: Plan, stage: int) -> Plan:
    """The plan of the worker that a stage becomes.  Its ranges name the segment that its host holds."""
    whole = replace(plan.stages[stage], stage=0, layers=(0, plan.stages[-1].layers[1]))
    group_id = own_group(plan.group_id, stage)
    return replace(plan, group_id=group_id, stages=(whole,), transport=PlanTransport(), keep=1)


def set_apart(view: ClusterView, plan: Plan, asked: Iterable[InstanceId] | None, now_s: float) -> list[Decision]:
    """Stage 0 has left the pipeline of ``plan``: the stages that are to stay go on by themselves.

    ``asked`` are those that this scheduler has asked; None: a former one did, and their records tell.
    """
    decided: list[Decision] = []
    wanted = None if asked is None else frozenset(asked)
    for member in view.members(plan.group_id):
        record = member.record
        stays = record.is_consolidating if wanted is None else record.instance_id in wanted
        if record.stage in _able(plan) and stays and member.releasing is None:
            kept = KeptStage(own_plan(plan, record.stage), plan.group_id, record.stage, now_s)
            decided += [PlanWorker(kept.plan), *put(view, record, kept)]
    return decided


def put(view: ClusterView, record: InstanceRecord, kept: KeptStage) -> list[Decision]:
    view.kept[record.instance_id] = kept
    return [_look_again(view, record, kept)]


def _look_again(view: ClusterView, record: InstanceRecord, kept: KeptStage) -> Wake:
    return Wake(kept.since_s + view.settings.start_deadline_s, TimerKind.KEPT, record.instance_id)


def found_again(view: ClusterView, plans: Sequence[Plan], now_s: float) -> list[Decision]:
    """A former scheduler has set stages apart: their records still name the pipeline, and their plans the worker."""
    planned, decided = {p.group_id: p for p in plans}, list[Decision]()
    for instance_id in sorted(view.instances):
        record = view.instances[instance_id].record
        plan = planned.get(own_group(record.group_id, record.stage)) if record.stage else None
        if plan is not None and record.is_consolidating:
            decided += put(view, record, KeptStage(plan, record.group_id, record.stage, now_s))
    return decided


# after a stage was set apart ---------------------------------------------------------------------------------------


def joined(view: ClusterView, record: InstanceRecord, before: InstanceView | None, now_s: float) -> list[Decision]:
    """A stage is a worker by itself from this record on: it gets its group, and the pipeline is without it."""
    if before is None or before.record.group_id == record.group_id or record.n_stages > 1:
        return []
    kept, decided = view.kept.pop(record.instance_id, None), list[Decision]()
    view.set_releasing(view.instances[record.instance_id], None)  # a release of its pipeline is none of it
    pipeline = view.groups.get(before.record.group_id)
    left = [] if pipeline is None or len(pipeline.plan.stages) > 1 else groups.last_left(view, pipeline)
    if kept is None:
        if pipeline is None or len(pipeline.plan.stages) == 1:  # it was given up; it serves all the same
            return left
        kept = KeptStage(
            own_plan(pipeline.plan, before.record.stage), pipeline.plan.group_id, before.record.stage, now_s
        )
        decided.append(PlanWorker(kept.plan))  # its word came before that of stage 0
    _forget_fetch(view, record, kept, now_s)
    facts = view.action(record.action).facts
    n_slots = record.slots if facts is None else slots(facts, 1)
    view.put_group(GroupView(kept.plan, (record.instance_id,), (), n_slots, set(), now_s, is_starting=False))
    return [*decided, *left]


def lost(view: ClusterView, record: InstanceRecord, now_s: float) -> list[Decision]:
    """An instance has gone.  If it was set apart, its worker's plan goes too."""
    if (kept := view.kept.pop(record.instance_id, None)) is None:
        return []
    _forget_fetch(view, record, kept, now_s)
    return [DropPlan(kept.plan.group_id)]


def gone(view: ClusterView, record: InstanceRecord, before: InstanceView | None, now_s: float) -> list[Decision]:
    """An instance says itself that it has gone.  It may have become a worker without having been heard."""
    decided = lost(view, record, now_s)
    if before is not None and before.record.group_id != record.group_id:
        pipeline = view.groups.get(before.record.group_id)
        if pipeline is not None and len(pipeline.plan.stages) == 1:
            decided += groups.last_left(view, pipeline)
    return decided


def give_up(view: ClusterView, instance: InstanceView, now_s: float) -> list[Decision]:
    """Release a stage that was set apart.  If requests need another worker, one is started like any other.

    It may have become a worker in this moment, with gateways that know it: then a busy one stays.
    """
    return [
        *lost(view, instance.record, now_s),
        *groups.dismiss(view, [instance], now_s, only_idle=True),
        *rescale(view, instance.record.action, now_s),
    ]


def failed(view: ClusterView, instance_id: InstanceId, error: ErrorInfo, now_s: float) -> list[Decision]:
    """A later stage cannot become a worker.  As long as it is a stage of a pipeline, it goes on as one."""
    if (instance := view.instances.get(instance_id)) is None:
        return []
    record = instance.record
    said = {"group_id": record.group_id, "action": record.action, "stage": record.stage, "error": error.message}
    flag = Flag("worker_not_kept", {**said, "code": error.code})
    if instance_id in view.kept:
        return [flag, *give_up(view, instance, now_s)]
    return [flag] if _forget_asked(view, record.group_id, instance_id) else []


def _forget_asked(view: ClusterView, group_id: GroupId, instance_id: InstanceId) -> bool:
    group = view.groups.get(group_id)
    state = None if group is None else group.consolidation
    return state is not None and state.kept.pop(instance_id, None) is not None


def asked_as(group: GroupView, command_id: CommandId) -> InstanceId | None:
    """The later stage that was asked by this command."""
    asked = {} if group.consolidation is None else group.consolidation.kept
    return next((i for i, c in asked.items() if c == command_id), None)


def due(view: ClusterView, instance_id: InstanceId, now_s: float) -> list[Decision]:
    """Handle the timer: give up a stage that was set apart and makes no progress."""
    kept, instance = view.kept.get(instance_id), view.instances.get(instance_id)
    if kept is None or instance is None:
        return []
    if now_s < kept.since_s + view.settings.start_deadline_s:
        return [_look_again(view, instance.record, kept)]
    error = ErrorInfo("WorkerLost", f"no progress for {view.settings.start_deadline_s:g} s")
    return failed(view, instance_id, error, now_s)


def _forget_fetch(view: ClusterView, record: InstanceRecord, kept: KeptStage, now_s: float) -> None:
    if (host := view.hosts.get(record.host_id)) is not None:
        host.ledger.remove(later_key(kept.pipeline, kept.stage), now_s)
