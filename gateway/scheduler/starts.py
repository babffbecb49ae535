"""From waiting requests to starts: how many more workers an action needs, and the decisions that get them."""

from __future__ import annotations

from gateway.scheduler.decisions import (
    Decision,
    FailDemand,
    InspectModelOn,
    ReleaseInstance,
    StageStart,
    StartGroup,
    TimerKind,
    Wake,
)
from gateway.scheduler.events import ActionFacts
from gateway.scheduler.placement import (
    PLATFORM_MAX_STAGES,
    evictions,
    minimum,
    n_serving,
    place,
)
from gateway.scheduler.plans import Choice, one_stage_plan, starting_record
from gateway.scheduler.scaling import groups, new_workers
from gateway.scheduler.view import ActionView, ClusterView, GroupView, InstanceView
from thaw.errors import ErrorInfo, MemoryTooSmall, ModelUnsupported, NotFound, ThawError
from thaw.ids import ActionName, ActivationId, CommandId, GroupId, HostId, InstanceId
from thaw.instance import InstanceState
from thaw.model import ModelFacts

SLOT_TRUST_S = 1.0
"""A gateway queues a request only when it sees no free slot.  So a free slot in a record counts for this long after the
record changed (the gateway is about to use it); if the request still waits then, the slot is not really free."""

CROSSING_S = 0.2
"""A request and a record that are this close may have crossed on their way."""

INSPECT_DEADLINE_S = 30.0
"""Reading a model's index is a few small requests; a host that has not answered by then is not going to."""

RETRY_BASE_S, RETRY_CAP_S = 0.25, 30.0
RECHECK_S = 1.0
"""How long a request that waits for memory or for the link waits at most before it is looked at again."""


def rescale(view: ClusterView, name: ActionName, now_s: float) -> list[Decision]:
    """Bring an action's workers up to what its queue and its minimum ask for."""
    action = view.action(name)
    facts = action.facts
    if action.deleted:
        return fail_all(view, name, NotFound("The requested resource does not exist."))
    if facts is None or (not action.waiting and minimum(view, name) == 0):
        view.blocked.pop(name, None)
        return []
    if (refused := _refusal(view, facts)) is not None:
        return fail_all(view, name, refused)
    n_new = wanted(view, action, facts, now_s)
    if n_new == 0:
        view.blocked.pop(name, None)
        return wake(action, name, now_s + SLOT_TRUST_S, now_s) if action.waiting else []
    if now_s < action.retry_at_s:
        return wake(action, name, action.retry_at_s, now_s)
    model: ModelFacts | None = None
    if facts.is_llm:
        asked = ensure_model(view, facts.model_uri, now_s)
        model = view.model(facts.model_uri).facts
        if model is None or not view.model(facts.model_uri).fresh:
            return asked
    return _start_many(view, action, facts, model, n_new, now_s)


def wake(action: ActionView, name: ActionName, at_s: float, now_s: float) -> list[Decision]:
    """Look at the action again at ``at_s``, unless a look no later is already due: one timer an action, not one a
    request."""
    if action.wake_s is not None and now_s < action.wake_s <= at_s:
        return []
    action.wake_s = at_s
    return [Wake(at_s, TimerKind.RESCALE, name)]


def _refusal(view: ClusterView, facts: ActionFacts) -> ThawError | None:
    """Why no start of this action can ever go well here."""
    if (facts.forced_stages or 1) > PLATFORM_MAX_STAGES:
        return ModelUnsupported(
            f"scaling.stages is {facts.forced_stages}, and this version runs one stage",
            hint="remove scaling.stages from the function's config",
        )
    largest = view.largest_device(for_model=facts.is_llm)
    if largest is not None and facts.need_bytes > largest:
        return MemoryTooSmall(
            f"{facts.name} needs {_mb(facts.need_bytes)} of device memory; the largest device of "
            f"{len(view.hosts)} host(s) has {_mb(largest)}",
            hint="lower resources.gpu_memory_mb" if facts.is_llm else "lower limits.memory",
        )
    return None


def _mb(n_bytes: int) -> str:
    return f"{n_bytes // (1024 * 1024)} MiB"


def wanted(view: ClusterView, action: ActionView, facts: ActionFacts, now_s: float) -> int:
    """Workers to add: the window formula for models, the queue alone for ordinary functions, the minimum for both."""
    instances = [view.instances[i] for i in action.instances]
    current = [v for v in instances if v.releasing is None and v.record.action_version == facts.version]
    by_demand = 0
    if action.waiting:
        arrivals = action.window.count(now_s) if facts.is_llm else 0
        newest_s = view.demand[next(reversed(action.waiting))].queued_s
        supply = sum(_free_slots(v, newest_s, now_s) for v in current)
        by_demand = new_workers(len(action.waiting), arrivals, supply, facts.slots)
    serving = n_serving(view, facts.name)
    missing = facts.min_instances - serving if action.broken_version != facts.version else 0
    return max(0, min(max(by_demand, missing), facts.max_instances - serving))


def _free_slots(view: InstanceView, newest_s: float, now_s: float) -> int:
    if view.state is InstanceState.STARTING:
        return view.record.slots
    if view.state is not InstanceState.READY or now_s - view.changed_s >= SLOT_TRUST_S:
        return 0
    if newest_s > view.changed_s + CROSSING_S:
        return 0  # queued by a gateway that knew of the change, so there was no free slot
    return max(0, view.record.slots - view.record.inflight)


def ensure_model(view: ClusterView, uri: str, now_s: float) -> list[Decision]:
    """Ask a host for the model's facts unless they are known or already asked for."""
    model = view.model(uri)
    if (model.fresh and model.facts is not None) or model.asked is not None:
        return []
    host_id = min(((h.n_workers, h.host_id) for h in view.live_hosts()), default=(0, None))[1]
    if host_id is None:
        return []  # no host yet: its arrival is an event
    command_id = CommandId(view.new_id())
    model.asked, model.asked_s = (HostId(host_id), command_id), now_s
    model.attempts += 1
    return [InspectModelOn(HostId(host_id), uri, command_id),
            Wake(now_s + INSPECT_DEADLINE_S, TimerKind.INSPECT, uri)]  # fmt: skip


def _start_many(
    view: ClusterView, action: ActionView, facts: ActionFacts, model: ModelFacts | None, n_new: int, now_s: float
) -> list[Decision]:
    decided: list[Decision] = []
    for _ in groups(n_new, PLATFORM_MAX_STAGES):
        started = _start_one(view, facts, model, now_s)
        if not started:
            view.blocked[facts.name] = None
            return [*decided, *_make_room(view, facts), *wake(action, facts.name, now_s + RECHECK_S, now_s)]
        decided += started
    view.blocked.pop(facts.name, None)
    return decided


def _start_one(view: ClusterView, facts: ActionFacts, model: ModelFacts | None, now_s: float) -> list[Decision]:
    choice = place(view, facts, model, _waited_s(view, facts.name, now_s), now_s)
    if choice is None:
        return []
    group_id = GroupId(view.new_id())
    plan = one_stage_plan(facts, model, choice, epoch=view.epoch, plan_id=view.new_id(), group_id=group_id)
    stage = StageStart(0, choice.host_id, InstanceId(view.new_id()), CommandId(view.new_id()))
    view.put_instance(starting_record(plan, 0, stage.instance_id, facts), now_s, confirmed=False)
    served = _assign(view, facts, group_id)
    view.groups[group_id] = GroupView(plan, (stage.instance_id,), (stage.command_id,), set(served), now_s, now_s)
    if model is not None:
        ledger = view.hosts[choice.host_id].ledger
        ledger.add(group_id, model.n_bytes, now_s + choice.fetch_within_s, now_s)
    deadline = Wake(now_s + view.settings.start_deadline_s, TimerKind.START, group_id)
    return [StartGroup(plan, (stage,), served, _attrs(facts, choice)), deadline]


def _attrs(facts: ActionFacts, choice: Choice) -> dict[str, object]:
    return {
        "action": facts.name, "stages": 1, "host": choice.host_id, "device": choice.device,
        "predicted_ttft_s": choice.predicted_ttft_s, "bound_ttft_s": choice.bound_ttft_s, "fallback": choice.fallback,
    }  # fmt: skip


def _waited_s(view: ClusterView, name: ActionName, now_s: float) -> float:
    first = next(view.waiting(name), None)
    return 0.0 if first is None else now_s - first.queued_s


def _assign(view: ClusterView, facts: ActionFacts, group_id: GroupId) -> tuple[ActivationId, ...]:
    """The longest waiting requests that no start in progress serves yet."""
    served: list[ActivationId] = []
    for demand in view.waiting(facts.name):
        if len(served) == facts.slots:
            break
        if demand.group_id is None:
            demand.group_id = group_id
            served.append(demand.demand.activation_id)
    return tuple(served)


def _make_room(view: ClusterView, facts: ActionFacts) -> list[Decision]:
    return [release(view, v, only_idle=True, reason="memory") for v in evictions(view, facts)]


def release(view: ClusterView, instance: InstanceView, *, only_idle: bool, reason: str) -> ReleaseInstance:
    command_id = CommandId(view.new_id())
    view.set_releasing(instance, command_id)
    return ReleaseInstance(instance.record.host_id, instance.record.instance_id, command_id, only_idle, reason)


def fail_all(view: ClusterView, name: ActionName, error: ThawError) -> list[Decision]:
    return fail(view, name, tuple(view.action(name).waiting), error.info(), GroupId(""))


def fail(
    view: ClusterView, name: ActionName, activation_ids: tuple[ActivationId, ...], error: ErrorInfo, group_id: GroupId
) -> list[Decision]:
    """These requests end with ``error``; the view forgets them at once, so that it is said only once."""
    for activation_id in activation_ids:
        view.drop_demand(activation_id)
    return [FailDemand(name, activation_ids, error, group_id)] if activation_ids else []
