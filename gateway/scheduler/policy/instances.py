"""The consequences of an instance's report (ready, idle, busy, gone), of a failed start, and of a lost host."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Final

from gateway.scheduler.decisions import (
    Decision,
    DropPlan,
    Flag,
    ForgetInstance,
    LearnFrom,
    ReleaseInstance,
    TimerKind,
    Wake,
)
from gateway.scheduler.placement.plans import fetch_key, later_key
from gateway.scheduler.placement.predict import f_general, low_share
from gateway.scheduler.policy import consolidation, groups, scale_up, successors
from gateway.scheduler.policy.looks import LOOKS_AT_ONCE, begins_a_look, ensure_model
from gateway.scheduler.policy.start_failures import start_failed
from gateway.scheduler.policy.starts import LATE_REST_S, release, rescale, wake
from gateway.scheduler.view.cluster import ClusterView
from gateway.scheduler.view.entries import GroupView, InstanceView
from gateway.scheduler.view.hosts import HostView
from gateway.scheduler.view.waiting_line import Turn
from thaw import partition
from thaw.errors import (
    PoolFull,
    WorkerLost,
)
from thaw.ids import ActionName, CommandId, HostId, InstanceId
from thaw.instance import InstanceRecord, InstanceState
from thaw.plan import Plan, PlanStage, StageRole

MIN_IDLE_S: Final = 1.0
"""An instance with keep_alive_s = 0, too, stays for this long, so that the request that caused its start can arrive."""

STRANGER_S: Final = 15.0
"""A host's reports and its events may cross on their way.  An instance that a host still names after this time is
really unknown."""

POOL_LOOKS: Final = 16
"""The most actions that one pass over the waiting actions tries in vain because a pool lacks room: thousands may
wait."""


def changed(view: ClusterView, record: InstanceRecord, now_s: float) -> list[Decision]:
    """Take in an invoker's report on one instance."""
    before = view.put_instance(record, now_s)
    if record.state is InstanceState.GONE:
        return [*scale_up.gone(view, record, before, now_s), *_gone(view, record, before, now_s)]
    decided = scale_up.joined(view, record, before, now_s)
    instance, group = view.instances[record.instance_id], view.groups.get(record.group_id)
    if record.instance_id in view.kept:
        return []  # it loads, or builds its engine; requests do not reach it yet
    if group is None and before is not None and before.record.n_stages > record.n_stages:
        # it had switched when its group was given up, so its host has not ended it: it serves by itself
        view.set_releasing(instance, None)
    if group is not None and record.instance_id not in group.instance_ids:  # it is left behind
        return groups.dismiss(view, [instance], now_s) if instance.releasing is None else []
    if group is None and record.n_stages > 1:  # its group has ended: this report crossed the cancel
        return groups.orphans(view, [instance], now_s) if instance.releasing is None else []
    if group is not None:
        group.progress_s = now_s
    if group is not None and consolidation.has_switched(view, group.plan):
        decided += consolidation.fold(view, group, now_s)
    if record.state is InstanceState.READY:
        if record.idle_since_wall_ms is not None and (host := view.hosts.get(record.host_id)) is not None:
            host.pool.ready(record.instance_id, record.idle_since_wall_ms)
        if before is None or before.state is InstanceState.STARTING:
            decided += _ready(view, record, group, now_s)
        decided += idle_check(view, instance, now_s)
    return decided


def _ready(view: ClusterView, record: InstanceRecord, group: GroupView | None, now_s: float) -> list[Decision]:
    """A stage has its first part.  With the last stage the group is whole."""
    if (host := view.hosts.get(record.host_id)) is not None:
        host.ledger.remove(fetch_key(record.group_id, record.stage), now_s)
        _book_later(group, host, record, now_s)
    if group is not None and not all(_is_ready(view, i) for i in group.instance_ids):
        return retry_blocked(view, now_s, record.host_id)  # the stage's link is free
    action = view.action(record.action)
    action.failures, action.retry_at_s, action.broken_version = 0, 0.0, ""
    if group is None or not group.is_starting:
        return []
    view.group_started(group)
    decided: list[Decision] = [*_learn(view, group)]
    if record.stage != 0:  # stage 0 may be idle already; it was not checked while others started
        decided += idle_check(view, view.instances[group.instance_ids[0]], now_s)
    decided += consolidation.pursue(view, group, now_s)
    # requests that still wait after MIN_IDLE_S were not served by this group
    return [
        *decided,
        *wake(action, record.action, now_s + MIN_IDLE_S, now_s),
        *retry_blocked(view, now_s, record.host_id),
    ]


def _is_ready(view: ClusterView, instance_id: InstanceId) -> bool:
    instance = view.instances.get(instance_id)
    return instance is not None and instance.state is InstanceState.READY


def _book_later(group: GroupView | None, host: HostView, record: InstanceRecord, now_s: float) -> None:
    """Book the bytes that a full stage fetches behind the traffic.  They have no deadline and get the bandwidth that is
    left over."""
    if group is None:
        return
    n_bytes = partition.size(group.plan.stages[record.stage].later_ranges)
    if n_bytes:
        host.ledger.add(later_key(record.group_id, record.stage), n_bytes, math.inf, now_s)


def _learn(view: ClusterView, group: GroupView) -> list[Decision]:
    """Learn from stage 0's trace how long a start on its device takes."""
    record = view.instances[group.instance_ids[0]].record
    host = view.hosts.get(record.host_id)
    device = host.devices.get(record.device) if host else None
    if device is None:
        return []
    n_full = sum(stage.role is StageRole.FULL for stage in group.plan.stages)
    return [
        LearnFrom(
            record.group_id,
            record.action,
            device.device.kind,
            record.start_mode,
            len(group.plan.stages),
            n_full,
            _factor(view, group.plan),
            group.served,
            device_kinds=tuple(_kind(view, stage) for stage in group.plan.stages),
        )
    ]


def _kind(view: ClusterView, stage: PlanStage) -> str:
    """The kind of a stage's device; empty when its host or the device has left."""
    host = view.hosts.get(stage.host)
    device = host.devices.get(stage.device) if host else None
    return "" if device is None else device.device.kind


def _factor(view: ClusterView, plan: Plan) -> float | None:
    """Return F of the group that has just become whole, from the share of its device that each worker gets.  None when
    a host or a device has left, or when the devices are of several kinds: then the pass teaches nothing about any one
    of them."""
    shares, kinds, s = list[float](), set[str](), len(plan.stages)
    for stage in plan.stages:
        host = view.hosts.get(stage.host)
        device = host.devices.get(stage.device) if host else None
        if host is None or device is None:
            return None
        low = low_share(s, is_enforced=host.enforces_shares, is_alone=device.n_workers <= 1)
        shares.append(1.0 if stage.role is StageRole.FULL else low)
        kinds.add(device.device.kind)
    return f_general(shares) if len(kinds) == 1 else None


def idle_check(view: ClusterView, instance: InstanceView, now_s: float) -> list[Decision]:
    """Release an idle instance if its time has come, else set a timer for the next check.  A busy instance needs no
    timer: it is reported when it becomes idle."""
    if not instance.record.takes_requests or not view.may_go(instance) or instance.idle_since_s is None:
        return []
    record, action = instance.record, view.action(instance.record.action)
    facts = action.facts
    outdated = facts is None or facts.version != record.action_version
    if outdated:
        return release(view, instance, now_s, only_idle=True, reason="outdated")
    due_s = instance.idle_since_s + max(record.keep_alive_s, MIN_IDLE_S)
    if record.n_stages > 1 and now_s < due_s:
        return _give_way(view, instance, due_s, now_s)
    if now_s < due_s:
        return _look_again(instance, due_s, now_s)
    if action.waiting:
        return _look_again(instance, now_s + MIN_IDLE_S, now_s)
    if action.n_serving <= action.minimum:
        return []
    return release(view, instance, now_s, only_idle=True, reason="keep_alive")


def _give_way(view: ClusterView, instance: InstanceView, due_s: float, now_s: float) -> list[Decision]:
    idle_s = now_s - (instance.idle_since_s or now_s)
    if idle_s < MIN_IDLE_S or not successors.is_due(view, instance):
        return _look_again(instance, min(due_s, now_s + MIN_IDLE_S), now_s)
    if (looks := successors.look(view, instance, now_s)) is not None:
        return [*looks, *_look_again(instance, min(due_s, now_s + successors.LOOKED_S), now_s)]
    view.groups[instance.record.group_id].gives_way = True
    return release(view, instance, now_s, only_idle=True, reason="successor")


def _look_again(instance: InstanceView, at_s: float, now_s: float) -> list[Decision]:
    """Set a timer for the next check.  An instance has one timer, however often it becomes idle."""
    if instance.wake_s is not None and now_s < instance.wake_s <= at_s:
        return []
    instance.wake_s = at_s
    return [Wake(at_s, TimerKind.KEEP_ALIVE, instance.record.instance_id)]


def release_refused(view: ClusterView, instance: InstanceView, now_s: float) -> list[Decision]:
    """The instance was busy after all, or never answered: it stays, and its idle time begins anew."""
    if groups.is_orphan(view, instance):
        return []  # no request needs it; its timer sends the cancel again
    head = view.head(instance.record)
    for member in [] if head is None else view.stages_of(head):
        view.set_releasing(member, None)
    if (group := view.groups.get(instance.record.group_id)) is not None:
        group.gives_way = False
    if head is not None and head.idle_since_s is not None:
        view.set_idle_since(head, now_s)
    checked = [] if head is None else idle_check(view, head, now_s)
    return checked + rescale(view, instance.record.action, now_s)


def release_overdue(view: ClusterView, instance: InstanceView, now_s: float) -> list[Decision]:
    """Handle a release or a cancel without an answer."""
    if not groups.is_orphan(view, instance):
        return release_refused(view, instance, now_s)
    host, group = view.hosts.get(instance.record.host_id), view.groups.get(instance.record.group_id)
    if host is None or instance.record.instance_id in host.report.instances:
        tell_again = groups.orphans if group is None else groups.dismiss
        return tell_again(view, [instance], now_s)
    record = replace(instance.record, state=InstanceState.GONE)  # its host no longer has it
    view.put_instance(record, now_s)
    left = [] if group is None else groups.last_left(view, group)
    return [
        ForgetInstance(record),
        *left,
        *rescale(view, record.action, now_s),
        *retry_blocked(view, now_s, record.host_id),
    ]


def _gone(view: ClusterView, record: InstanceRecord, before: InstanceView | None, now_s: float) -> list[Decision]:
    group = view.groups.get(record.group_id)
    decided: list[Decision] = []
    if group is not None and group.is_starting:
        error = record.error or WorkerLost("the instance left before it was ready").info()
        if error.code == PoolFull.__name__ and (host := view.hosts.get(record.host_id)) is not None:
            host.pool.refused(record.created_wall_ms)
        decided += start_failed(view, group, error, now_s)
    elif group is not None and record.instance_id not in group.instance_ids:
        decided += groups.last_left(view, group)
    elif group is not None:
        decided += groups.end(view, group, now_s)
        decided += successors.succeed(view, group, now_s)
    elif before is not None:
        decided.append(DropPlan(record.group_id))
    return [*decided, *rescale(view, record.action, now_s), *retry_blocked(view, now_s, record.host_id)]


def never_began(view: ClusterView, host_id: HostId, command_id: CommandId, now_s: float) -> bool:
    """The command of a start was refused or not sent, so no report of its instance will come.  Return False when there
    is no such start."""
    for instance_id in sorted(view.on_host.get(host_id, ())):
        instance = view.instances[instance_id]
        if instance.started_by == command_id:
            view.put_instance(replace(instance.record, state=InstanceState.GONE), now_s)
            return True
    return False


def host_lost(view: ClusterView, host_id: HostId, now_s: float) -> list[Decision]:
    """Handle a host whose lease ran out: its instances are gone, and requests that waited for them are served
    elsewhere."""
    error = WorkerLost(f"host {host_id} was lost", hint="look at the host's invoker and its network").info()
    decided: list[Decision] = [Flag("host_lost", {"host_id": host_id})]
    actions: dict[ActionName, None] = {}
    for instance in view.drop_host(host_id):
        record = replace(instance.record, state=InstanceState.GONE, error=error)
        actions[record.action] = None
        group = view.groups.get(record.group_id)
        if group is not None and group.is_starting:
            # the lost host is told to cancel too: if it comes back, it must not continue the start
            decided += start_failed(view, group, error, now_s)
            view.action(record.action).retry_at_s = now_s  # the retry is on another host, so at once
        elif group is not None and record.instance_id in group.instance_ids:
            decided += groups.end(view, group, now_s)
            group = None
        view.put_instance(record, now_s)
        decided += [*scale_up.lost(view, record, now_s), ForgetInstance(record)]
        if group is not None and record.group_id in view.groups:
            decided += groups.last_left(view, group)
    decided += _ask_models_elsewhere(view, host_id, now_s)
    for action in actions:
        decided += rescale(view, action, now_s)
    return decided


def release_strangers(view: ClusterView, host: HostView, now_s: float) -> list[Decision]:
    """Release instances that a host reports and the scheduler does not know.  A host that was lost and came back may
    have some.  No gateway routes to them, so they would stay for ever."""
    unknown = [i for i in host.report.instances if i not in view.instances]
    host.strangers = {i: host.strangers.get(i, now_s) for i in unknown}
    due = [i for i, since_s in host.strangers.items() if now_s - since_s >= STRANGER_S]
    for instance_id in due:
        host.strangers[instance_id] = now_s  # asked again if the instance stays
    return [ReleaseInstance(host.host_id, i, CommandId(view.new_id()), True, "unknown") for i in due]


def _ask_models_elsewhere(view: ClusterView, host_id: HostId, now_s: float) -> list[Decision]:
    asked: list[Decision] = []
    for uri, model in view.models.items():
        if model.asked is not None and model.asked[0] == host_id:
            model.asked = None
            asked += ensure_model(view, uri, now_s)
    return asked


def _is_looked_at(view: ClusterView, name: ActionName) -> bool:
    """True for an action that waits for a look at its model: it was not refused any room."""
    facts = view.action(name).facts
    return facts is not None and facts.is_llm and view.model(facts.model_uri).asked is not None


def retry_blocked(view: ClusterView, now_s: float, freed_on: HostId | None = None) -> list[Decision]:
    """Memory or a link was freed: serve the actions that wait for it, the one that is due first before the others.  An
    action that needs as much as a refused one, or more, is not tried, because it would be refused too.  If some device
    has enough memory, the action was refused for lack of room in a pool, which may have room for another model: a few
    more actions are tried then.  After LOOKS_AT_ONCE looks at models the rest of the line waits for an answer.
    An action that waits for a release rests, unless memory or a link was ``freed_on`` a host that it waits for."""
    view.shares.is_eased = view.line_is_cut = False
    if view.keeper is not None and not view.shares.may_start(view.keeper[0]):
        view.keep_nothing()
    decided: list[Decision] = []
    refused, n_without_pool, n_looks = math.inf, 0, 0
    for turn in view.blocked:
        if turn.need_bytes >= refused or not view.shares.may_start(turn.name):
            continue
        if _is_looked_at(view, turn.name) and not _would_keep(view, turn.name):
            continue  # the answer examines it
        action = view.action(turn.name)
        if now_s < action.late_s + LATE_REST_S and freed_on not in action.late_on:
            decided += wake(action, turn.name, action.late_s + LATE_REST_S, now_s)
            continue
        if n_looks == LOOKS_AT_ONCE:
            view.line_is_cut = True
            break
        found = rescale(view, turn.name, now_s)
        n_looks += begins_a_look(found)
        decided += found
        if turn.name not in view.blocked or _is_looked_at(view, turn.name):
            continue
        if _lacks_a_pool(view, turn) and n_without_pool < POOL_LOOKS:
            n_without_pool += 1
            continue
        refused = turn.need_bytes
        if refused <= view.blocked.least_need:
            break
    return decided


def _would_keep(view: ClusterView, name: ActionName) -> bool:
    """True for the first action of the line until it keeps a device."""
    return view.blocked.first == name and (view.keeper is None or view.keeper[0] != name)


def _lacks_a_pool(view: ClusterView, turn: Turn) -> bool:
    facts = view.action(turn.name).facts
    return facts is not None and facts.is_llm and view.index.most_free >= turn.need_bytes
