"""From waiting requests to starts: how many more workers an action needs, and the decisions that get them."""

from __future__ import annotations

from typing import Final

from gateway.scheduler.decisions import (
    Decision,
    ReleaseInstance,
    StageStart,
    StartGroup,
    TimerKind,
    Wake,
)
from gateway.scheduler.events import ActionFacts
from gateway.scheduler.placement.plans import Choice, Names, fetch_key, group_plan, low_reserve, slots, starting_record
from gateway.scheduler.placement.stage_bytes import Stages
from gateway.scheduler.placement.window import Lacking, new_workers
from gateway.scheduler.policy import pools
from gateway.scheduler.policy.evictions import evictions
from gateway.scheduler.policy.failing import fail, fail_all, too_many_starts
from gateway.scheduler.policy.groups import RELEASE_DEADLINE_S
from gateway.scheduler.policy.looks import due_s, ensure_model
from gateway.scheduler.policy.place import Awaited, in_time_without_idle, most_stages, place
from gateway.scheduler.policy.transports import transport_of
from gateway.scheduler.view.cluster import ClusterView
from gateway.scheduler.view.entries import ActionView, GroupView, InstanceView
from thaw import partition
from thaw.errors import MemoryTooSmall, NotFound, ThawError, from_info
from thaw.ids import ActionName, ActivationId, CommandId, GroupId, InstanceId
from thaw.instance import InstanceState
from thaw.model import ModelFacts
from thaw.plan import Plan, PlanTransport, StageRole

SLOT_TRUST_S = 1.0
"""A gateway queues a request only when it sees no free slot.  So a free slot in a record counts for this long after the
record changed (the gateway is about to use it); if the request still waits then, the slot is not really free."""

CROSSING_S = 0.2
"""A request and an instance's record whose times are this close may have crossed on their way."""

RETRY_BASE_S, RETRY_CAP_S = 0.25, 30.0
GATHER_S = 0.05
"""After a start of a model its further requests are gathered for this long, and then met together.  The requests of a
burst reach the scheduler a millisecond or so apart, thirty of them within 50 ms.  If they were decided one by one, they
would start single workers and no groups.  The first start never waits for this (docs/lab-log.md has the
measurement)."""

LATE_REST_S: Final = 0.1
"""An action that waits for a release, because its start would be late before, is examined once in this time if memory
comes free elsewhere: that may happen a hundred times a second, and an examination weighs all hosts twice."""

RECHECK_S, RECHECKS_PER_S = 1.0, 50
"""A request that waits for memory or for the link is examined again after RECHECK_S at the latest, or later where so
many actions wait that more than RECHECKS_PER_S would be examined in a second."""


def rescale(view: ClusterView, name: ActionName, now_s: float) -> list[Decision]:
    """Bring the number of an action's workers up to the need of its queue and its minimum."""
    was_blocked = view.blocked.lift(name)  # blocked again below if there is no room
    waited_for_an_end = view.shares.lift(name)
    try:
        return _rescale(view, name, was_blocked, waited_for_an_end, now_s)
    finally:
        if waited_for_an_end:
            view.shares.settle()
        if was_blocked:
            view.blocked.settle(name)


def _rescale(
    view: ClusterView, name: ActionName, was_blocked: bool, waited_for_an_end: bool, now_s: float
) -> list[Decision]:
    action = view.action(name)
    facts = action.facts
    if facts is None:
        failed = fail_all(view, name, NotFound("The requested resource does not exist."))
        view.forget_deleted(name)
        return failed
    if view.keeper is not None and view.keeper[0] == name:
        view.keep_nothing()
    if not action.waiting and action.minimum == 0 and not facts.is_llm:
        return []
    if facts.refused is not None and action.n_serving:  # running instances go on, and serve the queue
        return wake(action, name, now_s + _recheck_s(view), now_s) if action.waiting else []
    if (refused := _refusal(view, facts)) is not None:
        return fail_all(view, name, refused)
    lacks = lacking(view, action, facts, now_s)
    if lacks.is_nothing:
        return wake(action, name, now_s + SLOT_TRUST_S, now_s) if action.waiting else []
    if now_s < action.retry_at_s:
        return wake(action, name, action.retry_at_s, now_s)
    if now_s < action.gathers_until_s and not was_blocked:
        return wake(action, name, action.gathers_until_s, now_s)
    stages: Stages | None = None
    if facts.is_llm:
        model = view.model(facts.model_uri)
        stages = model.stages
        if stages is None or not model.is_current(now_s):
            if was_blocked and model.fresh:
                _stay_in_line(view, name)
            if waited_for_an_end:
                view.shares.wait(name)
            return ensure_model(view, facts.model_uri, now_s)
        error = _indivisible(view, facts, stages) or pools.refusal(
            view, facts, stages, most_stages(view, facts, stages)
        )
        if error is not None:
            return fail_all(view, name, error)
    decided = _start_many(view, action, facts, stages, lacks, now_s)
    if facts.is_llm and any(isinstance(d, StartGroup) for d in decided):
        action.gathers_until_s = now_s + GATHER_S
    return decided


def _stay_in_line(view: ClusterView, name: ActionName) -> None:
    """While a host looks whether known facts still hold, no other action takes the room that this one has waited for.
    That takes five seconds at most; facts that are wanting may take minutes, and room is not kept for them."""
    view.block(name)
    if view.blocked.first == name:
        view.keep_nearest(name)


def wake(action: ActionView, name: ActionName, at_s: float, now_s: float) -> list[Decision]:
    """Examine the action again at ``at_s``, unless a timer no later is already set: an action has one timer, not one
    for each request."""
    if action.wake_s is not None and now_s < action.wake_s <= at_s:
        return []
    action.wake_s = at_s
    return [Wake(at_s, TimerKind.RESCALE, name)]


def _refusal(view: ClusterView, facts: ActionFacts) -> ThawError | None:
    """Return why no start of this action can succeed here, or None."""
    if facts.refused is not None:
        return from_info(facts.refused)
    largest = view.largest.device(for_model=facts.is_llm)
    least = low_reserve(facts.need_bytes, facts.forced_stages or 1)
    if largest is not None and least > largest:
        return MemoryTooSmall(
            f"{facts.name} needs {pools.mebibytes(least)} of device memory{_a_stage(facts)}; the largest device of "
            f"{len(view.hosts)} host(s) has {pools.mebibytes(largest)}",
            hint="lower resources.gpu_memory_mb" if facts.is_llm else "lower limits.memory",
        )
    return None


def _a_stage(facts: ActionFacts) -> str:
    return f" for each of {facts.forced_stages} stages" if (facts.forced_stages or 1) > 1 else ""


def _indivisible(view: ClusterView, facts: ActionFacts, stages: Stages) -> ThawError | None:
    """Return why a size or a transport that was forced is impossible here, or None."""
    several = facts.forced_stages or (1 if facts.transport == "auto" else facts.max_stages)
    try:
        stages.of(facts.forced_stages or 1)
        if several > 1:
            transport_of(view.settings, facts, GroupId(""))
    except ThawError as e:
        return e
    return None


def lacking(view: ClusterView, action: ActionView, facts: ActionFacts, now_s: float) -> Lacking:
    """Return how many workers and instances the action lacks.  The window formula (window.py) gives the workers that a
    model needs, the queue alone those of an ordinary function.  The minimum and the maximum count instances that serve:
    a group of stages is one."""
    is_broken = action.broken_version == facts.version
    n_waiting, arrivals = len(action.waiting), 0
    if facts.is_llm and (n_waiting or not (is_broken or action.failures)):
        # while no request waits, the window only forecasts, and a forecast must not repeat a start that has just failed
        arrivals = action.window.count(now_s)
    workers = 0
    if n_waiting or arrivals:
        workers = new_workers(n_waiting, arrivals, free_slots(view, action, facts, now_s), facts.slots)
    n_serving = action.n_serving + n_kept(view, action)
    missing = 0 if is_broken else facts.min_instances - n_serving
    return Lacking(workers, missing, facts.max_instances - n_serving)


def n_kept(view: ClusterView, action: ActionView) -> int:
    """Return how many stages of folded pipelines are about to be workers of the action (scale_up.py)."""
    return sum(i in view.kept for i in action.instances) if view.kept else 0


def free_slots(
    view: ClusterView, action: ActionView, facts: ActionFacts, now_s: float, without: InstanceId | None = None
) -> int:
    """Return the slots that are free, or will be when starting groups are ready; ``without``: leave out this
    instance."""
    newest_s = action.window.newest_s
    if action.waiting:
        newest_s = view.demand[next(reversed(action.waiting))].queued_s
    heads = (
        v
        for v in (view.instances[i] for i in action.instances if i != without)
        if v.record.takes_requests and v.releasing is None and v.record.action_version == facts.version
    )
    found = sum(_free_slots(view, v, facts, newest_s, now_s) for v in heads)
    return found + facts.slots * n_kept(view, action)


def _free_slots(view: ClusterView, head: InstanceView, facts: ActionFacts, newest_s: float, now_s: float) -> int:
    """``newest_s``: when the last request was queued.  A gateway queues a request only when it sees no free slot."""
    if head.state is InstanceState.STARTING:
        return slots(facts, head.record.n_stages)  # the host does not know its slots before it has read the function
    if head.is_idle and not view.action(facts.name).waiting:
        return head.record.slots
    if head.state is not InstanceState.READY or now_s - head.changed_s >= SLOT_TRUST_S:
        return 0
    if newest_s > head.changed_s + CROSSING_S:
        return 0  # the gateway knew of the change when it queued, so there was no free slot
    return max(0, head.record.slots - head.record.inflight)


def _start_many(
    view: ClusterView, action: ActionView, facts: ActionFacts, stages: Stages | None, lacks: Lacking, now_s: float
) -> list[Decision]:
    """Start groups of as many workers as a group may have (ParaServe 6.1).  Where a group is smaller, further groups
    bring the workers that it lacks."""
    decided: list[Decision] = []
    sizes = lacks.sizes(1 if stages is None else most_stages(view, facts, stages))[::-1]
    n_started = 0
    while sizes and n_started < lacks.room:
        if not view.shares.may_start(facts.name):
            return [*decided, *_wait_for_an_end(view, action, facts.name, now_s)]
        n_workers = sizes.pop()
        choice = place(view, facts, stages, _waited_s(view, facts.name, now_s), now_s, n_workers)
        if choice is None:
            return [*decided, *_wait_for_room(view, action, facts, lacks, now_s)]
        if choice.fallback and (awaited := _awaited(view, facts, stages, now_s, n_workers)) is not None:
            view.block(facts.name)
            action.late_s, action.late_on = now_s, awaited.hosts
            heads = (view.instances[head] for head in awaited.heads)
            releases = [d for head in heads for d in release(view, head, now_s, only_idle=True, reason="memory")]
            return [*decided, *releases, *wake(action, facts.name, now_s + _recheck_s(view), now_s)]
        started = start_group(view, facts, stages, choice, now_s)
        decided += started
        held = sum(stage.reserve_bytes for d in started if isinstance(d, StartGroup) for stage in d.plan.stages)
        view.blocked.started(facts.name, held)
        n_started += 1
        if choice.n_stages < n_workers:
            sizes.append(n_workers - choice.n_stages)
    return decided


def _wait_for_an_end(view: ClusterView, action: ActionView, name: ActionName, now_s: float) -> list[Decision]:
    """The namespace has as many starts in progress as it may have: the end of one of them wakes the action.  Requests
    whose time is over are told so."""
    view.shares.wait(name)
    late = tuple(d.demand.activation_id for d in view.waiting(name) if due_s(view, d) <= now_s and d.group_id is None)
    told = fail(view, name, late, too_many_starts(view, name).info(), GroupId(""))
    at_s = now_s + view.settings.start_deadline_s
    if (first := next((d for d in view.waiting(name) if d.group_id is None), None)) is not None:
        at_s = min(at_s, due_s(view, first))
    return [*told, *wake(action, name, at_s, now_s)]


def _wait_for_room(
    view: ClusterView, action: ActionView, facts: ActionFacts, lacks: Lacking, now_s: float
) -> list[Decision]:
    """The action waits in line, and idle instances of others are evicted to make room.  Requests that are only forecast
    evict no instance: their window has passed before there is room, and the evicted instances would be started
    again."""
    if not action.waiting and lacks.instances <= 0:
        return []
    view.block(facts.name)
    room = _make_room(view, facts, now_s)
    if action.waiting and view.blocked.first == facts.name:
        view.keep_nearest(facts.name)
    return [*room, *wake(action, facts.name, now_s + _recheck_s(view), now_s)]


def _awaited(
    view: ClusterView, facts: ActionFacts, stages: Stages | None, now_s: float, n_workers: int
) -> Awaited | None:
    """A start is possible, but not in time.  If the release of idle groups allows one that is in time, the start waits
    for that; else return None."""
    if stages is None or facts.forced_stages is not None or not view.action(facts.name).waiting:
        return None
    return in_time_without_idle(view, facts, stages, _waited_s(view, facts.name, now_s), now_s, n_workers)


def _recheck_s(view: ClusterView) -> float:
    """Return the pause before the action is examined again.  Freed memory is an event and is answered at once, so this
    may take longer when thousands of actions wait."""
    return max(RECHECK_S, len(view.blocked) / RECHECKS_PER_S)


def start_group(
    view: ClusterView, facts: ActionFacts, stages: Stages | None, choice: Choice, now_s: float
) -> list[Decision]:
    """Return the decisions that begin a start: none for a model that may not be run any more.  The view counts the
    start's memory and its fetches from now on."""
    if facts.refused is not None:
        return []
    group_id = GroupId(view.new_id())
    names = Names(view.epoch, view.new_id(), group_id)
    several = choice.n_stages > 1
    transport = transport_of(view.settings, facts, group_id) if several else PlanTransport()
    wished = group_plan(facts, stages, choice, names, transport)
    starts = tuple(
        StageStart(s.stage, s.host, InstanceId(view.new_id()), CommandId(view.new_id())) for s in wished.stages
    )
    plan = pools.reserve(view, wished, starts)
    for start in starts:
        view.put_instance(
            starting_record(plan, start.stage, start.instance_id, facts), now_s, started_by=start.command_id
        )
    served = _assign(view, facts, group_id, slots(facts, choice.n_stages))
    instance_ids, command_ids = tuple(s.instance_id for s in starts), tuple(s.command_id for s in starts)
    n_slots = slots(facts, choice.n_stages)
    view.put_group(GroupView(plan, instance_ids, command_ids, n_slots, set(served), now_s, served=served))
    if stages is not None:
        _book(view, plan, stages.facts, now_s + choice.fetch_within_s, now_s)
    deadline = Wake(now_s + view.settings.start_deadline_s, TimerKind.START, group_id)
    return [StartGroup(plan, starts, served, _attrs(facts, wished, plan, choice)), deadline]


def _book(view: ClusterView, plan: Plan, model: ModelFacts, deadline_s: float, now_s: float) -> None:
    """Book each stage's own bytes on its own host's link."""
    for stage in plan.stages:
        host, n_bytes = view.hosts[stage.host], partition.size(stage.first_ranges)
        if host.has_model(model.uri, model.weight_bytes, model.version):
            continue  # nothing to fetch: the host copies the part
        host.ledger.add(fetch_key(plan.group_id, stage.stage), n_bytes, deadline_s, now_s)


def _attrs(facts: ActionFacts, wished: Plan, plan: Plan, choice: Choice) -> dict[str, object]:
    first = choice.seats[0]
    found: dict[str, object] = {
        "action": facts.name,
        "stages": choice.n_stages,
        "host": first.host_id,
        "device": first.device,
        "predicted_ttft_s": choice.predicted_ttft_s,
        "bound_ttft_s": choice.bound_ttft_s,
        "fallback": choice.fallback,
    }
    if choice.n_stages > 1:
        found["hosts"] = [seat.host_id for seat in choice.seats]
        found["full"] = sum(seat.role is StageRole.FULL for seat in choice.seats)
        found["transport"] = str(plan.transport.kind)
    if left_out := sum(partition.size(w.later_ranges) for w in wished.stages) - sum(
        partition.size(s.later_ranges) for s in plan.stages
    ):
        found["left_out_bytes"] = left_out  # the pool of a full stage's host has no room for it
    return {**found, **choice.why}


def _waited_s(view: ClusterView, name: ActionName, now_s: float) -> float:
    first = next(view.waiting(name), None)
    return 0.0 if first is None else now_s - first.queued_s


def _assign(view: ClusterView, facts: ActionFacts, group_id: GroupId, n_slots: int) -> tuple[ActivationId, ...]:
    """Assign to the start the longest waiting requests that no start in progress serves yet; return them."""
    served: list[ActivationId] = []
    for demand in view.waiting(facts.name):
        if len(served) == n_slots:
            break
        if not view.awaits_start(demand):
            demand.group_id = group_id
            served.append(demand.demand.activation_id)
    return tuple(served)


def _make_room(view: ClusterView, facts: ActionFacts, now_s: float) -> list[Decision]:
    n = facts.forced_stages or 1
    needs = (facts.need_bytes, *[low_reserve(facts.need_bytes, n)] * (n - 1))
    victims = evictions(view, facts, needs) or pools.evictions(view, facts)
    return [d for victim in victims for d in release(view, victim, now_s, only_idle=True, reason="memory")]


def release(
    view: ClusterView,
    instance: InstanceView,
    now_s: float,
    *,
    only_idle: bool,
    reason: str,
    drained: bool = False,
) -> list[Decision]:
    """Release stage 0.  The other stages of its group follow when it has gone, so their memory counts as being freed
    too.  The answer may be lost, so a timer follows."""
    command_id, record = CommandId(view.new_id()), instance.record
    for member in view.stages_of(instance):
        view.set_releasing(member, command_id)
    return [
        ReleaseInstance(record.host_id, record.instance_id, command_id, only_idle, reason, drained),
        Wake(now_s + RELEASE_DEADLINE_S, TimerKind.RELEASE, record.instance_id),
    ]
