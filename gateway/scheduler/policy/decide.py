"""decide_all(view, events, now_s) -> decisions.  The whole policy behind one function, without I/O or a clock."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import takewhile
from typing import Final

from gateway.scheduler.decisions import Decision, DropDemand, Flag, Forget, RewritePlan, TimerKind
from gateway.scheduler.events import (
    ActionDeleted,
    ActionSeen,
    Event,
    GatewaysLost,
    HostSeen,
    HostsSeen,
    OtherEvent,
    QuotasSeen,
    Rebuilt,
    StartRefused,
    Timer,
)
from gateway.scheduler.policy import (
    consolidation,
    draining,
    groups,
    instances,
    models,
    pools,
    scale_up,
    start_failures,
    stem_cells,
)
from gateway.scheduler.policy.looks import LOOKS_AT_ONCE, begins_a_look, ensure_model
from gateway.scheduler.policy.starts import release, rescale
from gateway.scheduler.view.cluster import ClusterView
from gateway.scheduler.view.entries import DemandView
from relay.protocol.messages import (
    CommandRefused,
    ConsolidationFailed,
    DemandAdded,
    DemandRemoved,
    InstanceChanged,
    ModelInspected,
)
from thaw.errors import StaleEpoch
from thaw.host import HostReport
from thaw.ids import ActionName, ActivationId, GroupId, HostId, InstanceId
from thaw.instance import InstanceState

_LONGEST_WAIT_S: Final = 3_600.0
"""The longest age of a request or of an idle instance that is believed, because other machines' clocks tell it."""


GRACE_S: Final = 6.0
"""For this long after the view was rebuilt, silent hosts and gateways do not count as lost.  While the state server was
away every lease may have run out; healthy hosts and gateways report again within two heartbeats."""


HELD_BEYOND_LIMIT_S: Final = 90.0
"""After a gateway has announced a request, it holds the request for at most its action's time limit and a minute for
its container; the rest is for slow messages."""


def decide(view: ClusterView, event: Event, now_s: float) -> list[Decision]:
    """Take one event in and return the decisions.  ``view`` then already assumes that they will be carried out."""
    return decide_all(view, (event,), now_s)


def decide_all(view: ClusterView, events: Sequence[Event], now_s: float) -> list[Decision]:
    """Take in events that have arrived together, in their order, and return the decisions.  All requests are counted
    before any start is decided for them, so a burst is met as a whole, by groups of workers (ParaServe 6.1)."""
    decided: list[Decision] = []
    newcomers: dict[ActionName, list[ActivationId]] = {}  # the new requests of every action whose demand has changed
    for event in events:
        match event:
            case DemandAdded():
                queued_s = now_s - min(event.waited_ms / 1000, _LONGEST_WAIT_S)
                if _take_demand(view, event, queued_s, now_s):
                    newcomers.setdefault(event.action, []).append(event.activation_id)
            case DemandRemoved():
                view.serve_demand(event.activation_id)
                if event.action in view.actions and not view.actions[event.action].waiting:
                    newcomers.setdefault(event.action, [])  # its window may still ask for more workers
            case _:
                found = _decide(view, event, now_s)
                decided += [*found, *stem_cells.follow(view, event, found, now_s)]
    for name, activation_ids in newcomers.items():
        found = _meet_demand(view, name, activation_ids, now_s)
        stem_cells.note_starts(view, found, now_s)
        decided += found
    if any(_ends_a_look(event) for event in events):
        view.shares.resume()
        view.shares.is_eased |= view.line_is_cut
    return [*decided, *_serve_lines(view, now_s)]


def _ends_a_look(event: Event) -> bool:
    """True for an answer to a look at a model, and for the end of the time that it may take."""
    is_timer = isinstance(event, Timer) and event.kind is TimerKind.INSPECT
    return is_timer or isinstance(event, (ModelInspected, CommandRefused))


def _serve_lines(view: ClusterView, now_s: float) -> list[Decision]:
    """Serve the actions that wait for an end of one of their namespace's starts.  Then, if a namespace may start again,
    serve those that wait for room."""
    decided: list[Decision] = []
    n_looks = 0
    for name in view.shares.woken():
        found = rescale(view, name, now_s)
        stem_cells.note_starts(view, found, now_s)
        decided += found
        n_looks += begins_a_look(found)
        if n_looks == LOOKS_AT_ONCE:
            view.shares.put_off(name)
            break
    if view.shares.is_eased:
        found = instances.retry_blocked(view, now_s)
        stem_cells.note_starts(view, found, now_s)
        decided += found
    return decided


def _decide(view: ClusterView, event: OtherEvent, now_s: float) -> list[Decision]:
    match event:
        case InstanceChanged():
            return instances.changed(view, event.instance, now_s)
        case ModelInspected():
            return models.inspected(view, event, now_s)
        case CommandRefused():
            return _refused(view, event, now_s)
        case ConsolidationFailed():
            return _not_consolidated(view, event, now_s)
        case StartRefused():
            return _start_refused(view, event, now_s)
        case ActionSeen():
            return _action_seen(view, event, now_s)
        case ActionDeleted():
            return _action_deleted(view, event.action, now_s)
        case QuotasSeen():
            view.shares.take(event.namespace, event.own)
            return []
        case HostsSeen():
            return _hosts_seen(view, event.reports, now_s)
        case HostSeen():
            return _host_seen(view, event.report, now_s)
        case GatewaysLost():
            return _gateways_lost(view, event) if now_s >= view.grace_until_s else []
        case Timer():
            return _timer(view, event, now_s)
        case Rebuilt():
            return _rebuild(view, event, now_s)


def _meet_demand(
    view: ClusterView, name: ActionName, newcomers: Iterable[ActivationId], now_s: float
) -> list[Decision]:
    """Decide starts for an action's whole queue.  A new request that got no start of its own shares one that is in
    progress."""
    decided = rescale(view, name, now_s)
    for activation_id in newcomers:
        known = view.demand.get(activation_id)
        if known is not None and not view.awaits_start(known):
            _join_a_start(view, known)
    return decided


def _take_demand(view: ClusterView, demand: DemandAdded, queued_s: float, now_s: float) -> bool:
    """Return False for a request that was already known and is still held."""
    is_new, facts = view.add_demand(demand, queued_s), view.action(demand.action).facts
    if facts is not None:
        view.demand[demand.activation_id].held_until_s = now_s + facts.timeout_s + HELD_BEYOND_LIMIT_S
    return is_new


def _join_a_start(view: ClusterView, demand: DemandView) -> None:
    """Let a request wait for the first start in progress that has a slot left."""
    for instance in view.of_action(demand.demand.action):
        group = view.groups.get(instance.record.group_id)
        if group is not None and group.is_starting and len(group.activation_ids) < group.slots:
            demand.group_id = group.plan.group_id
            group.activation_ids.add(demand.demand.activation_id)
            return


def _refused(view: ClusterView, event: CommandRefused, now_s: float) -> list[Decision]:
    if event.error.code == StaleEpoch.__name__:
        return [Flag("command_stale", {"host_id": event.host_id, "command_id": event.command_id})]
    group = view.groups.get(event.group_id)
    if group is not None and event.command_id in group.command_ids:
        instances.never_began(view, event.host_id, event.command_id, now_s)
        return start_failures.start_refused(view, group, event.error, now_s)
    if group is not None:
        not_consolidated = consolidation.refused(view, group, event.command_id, event.error, now_s)
        if not_consolidated is not None:
            return not_consolidated
    for instance_id in sorted(view.on_host.get(event.host_id, ())):
        instance = view.instances[instance_id]
        if instance.releasing == event.command_id:
            return instances.release_refused(view, instance, now_s)
    if instances.never_began(view, event.host_id, event.command_id, now_s):
        return instances.retry_blocked(view, now_s)
    return models.refused(view, event, now_s)


def _not_consolidated(view: ClusterView, event: ConsolidationFailed, now_s: float) -> list[Decision]:
    group = view.groups.get(event.group_id)
    if group is not None and event.instance_id == group.instance_ids[0]:
        return consolidation.failed(view, event.group_id, event.error, now_s)
    return scale_up.failed(view, event.instance_id, event.error, now_s)


def _start_refused(view: ClusterView, event: StartRefused, now_s: float) -> list[Decision]:
    """No command of this start was sent, so none of its instances began."""
    if (group := view.groups.get(event.group_id)) is None:
        return []
    for stage, command_id in zip(group.plan.stages, group.command_ids, strict=True):
        instances.never_began(view, stage.host, command_id, now_s)
    return start_failures.start_refused(view, group, event.error, now_s)


def _action_seen(view: ClusterView, event: ActionSeen, now_s: float) -> list[Decision]:
    facts, before = event.facts, view.action(event.facts.name).facts
    action = view.set_facts(facts)
    decided: list[Decision] = []
    if before is not None and before.model_uri != facts.model_uri:
        decided += _forget(view, ())  # else updates to ever other models would leave the facts of each
    if event.changed:
        action.failures, action.retry_at_s, action.broken_version = 0, 0.0, ""
        if facts.is_llm:
            view.model(facts.model_uri).look_anew()  # the bytes at the URI may have changed
            decided += ensure_model(view, facts.model_uri, now_s)
    return [*decided, *_idle_check_all(view, facts.name, now_s), *rescale(view, facts.name, now_s)]


def _action_deleted(view: ClusterView, name: ActionName, now_s: float) -> list[Decision]:
    view.delete_action(name)
    decided = _forget(view, (name,))
    for instance in view.of_action(name):
        # an instance that is starting becomes ready first: a half-loaded model is of no use, and its release follows
        group = view.groups.get(instance.record.group_id)
        if (
            instance.record.takes_requests
            and instance.state is InstanceState.READY
            and instance.releasing is None
            and (group is None or not group.is_starting)
        ):
            decided += release(view, instance, now_s, only_idle=False, reason="deleted")
    return [*decided, *rescale(view, name, now_s)]


def _forget(view: ClusterView, names: Iterable[str]) -> list[Decision]:
    names = tuple(names)
    learned = tuple(key for name in names for key in view.history.forget(name))
    best = tuple(str(key) for name in names for key in view.history.best.forget(name))
    model_uris = view.drop_unused_models()
    return [Forget(learned, model_uris, best)] if learned or model_uris or best else []


def _idle_check_all(view: ClusterView, name: ActionName, now_s: float) -> list[Decision]:
    return [d for i in view.of_action(name) for d in instances.idle_check(view, i, now_s)]


def _hosts_seen(view: ClusterView, reports: tuple[HostReport, ...], now_s: float) -> list[Decision]:
    decided: list[Decision] = []
    new = {r.host_id for r in reports} - view.hosts.keys()
    for report in reports:
        decided += _take_report(view, report, now_s)
    for host_id in _silent(view, reports) if now_s >= view.grace_until_s else ():
        decided += instances.host_lost(view, host_id, now_s)
    decided += instances.retry_blocked(view, now_s)
    return decided + (_retry_everyone(view, now_s) if new else [])


def _host_seen(view: ClusterView, report: HostReport, now_s: float) -> list[Decision]:
    is_new = report.host_id not in view.hosts
    decided = _take_report(view, report, now_s)
    decided += instances.retry_blocked(view, now_s)
    return decided + (_retry_everyone(view, now_s) if is_new else [])


def _take_report(view: ClusterView, report: HostReport, now_s: float) -> list[Decision]:
    is_new = report.host_id not in view.hosts
    odd = view.put_host(report, now_s)
    if is_new:
        pools.claim_again(view, view.hosts[report.host_id])
    decided: list[Decision] = [Flag("host_report_clamped", {"host_id": report.host_id, "what": text}) for text in odd]
    host = view.hosts[report.host_id]
    decided += instances.release_strangers(view, host, now_s)
    if report.draining:
        return [*decided, *draining.leave(view, host, now_s)]
    return decided if report.handing_over else [*decided, *draining.stay(view, host)]


def _silent(view: ClusterView, reports: tuple[HostReport, ...]) -> list[HostId]:
    known = view.hosts.keys() | {h for h, ids in view.on_host.items() if ids}
    return sorted(known - {r.host_id for r in reports})


def _retry_everyone(view: ClusterView, now_s: float) -> list[Decision]:
    """A new host has come: rescale every action that has waiting requests or a minimum of instances."""
    return [d for name in list(view.actions) if _wants(view, name) for d in rescale(view, name, now_s)]


def _wants(view: ClusterView, name: ActionName) -> bool:
    action = view.actions[name]
    return bool(action.waiting) or (action.facts is not None and action.facts.min_instances > 0)


def _gateways_lost(view: ClusterView, event: GatewaysLost) -> list[Decision]:
    return _drop(view, [d.demand for d in view.demand.values() if d.demand.gateway in event.gateways])


def _drop_unheld(view: ClusterView, name: ActionName, now_s: float) -> list[Decision]:
    """Drop requests that their gateway no longer holds.  The message that withdrew them was lost, and they would keep
    instances for ever."""
    return _drop(view, [d.demand for d in takewhile(lambda d: d.held_until_s <= now_s, view.waiting(name))])


def _drop(view: ClusterView, demands: Sequence[DemandAdded]) -> list[Decision]:
    for demand in demands:
        view.drop_demand(demand.activation_id)
    return [DropDemand(d.action, d.activation_id, d.gateway) for d in demands]


def _timer(view: ClusterView, event: Timer, now_s: float) -> list[Decision]:
    match event.kind:
        case TimerKind.RESCALE:
            name = ActionName(event.key)
            action = view.action(name)
            if action.wake_s is not None and now_s < action.wake_s:
                return []  # an earlier timer was set after this one, and its successor is still to come
            action.wake_s = None
            return [*_drop_unheld(view, name, now_s), *rescale(view, name, now_s)]
        case TimerKind.START:
            return start_failures.start_overdue(view, GroupId(event.key), now_s)
        case TimerKind.CONSOLIDATE:
            return consolidation.due(view, GroupId(event.key), now_s)
        case TimerKind.KEPT:
            return scale_up.due(view, InstanceId(event.key), now_s)
        case TimerKind.INSPECT:
            return models.overdue(view, event.key, now_s)
        case TimerKind.KEEP_ALIVE | TimerKind.RELEASE:
            instance = view.instances.get(InstanceId(event.key))
            if instance is None:
                return []
            if event.kind is TimerKind.RELEASE and instance.releasing is not None:
                return instances.release_overdue(view, instance, now_s)
            instance.wake_s = None
            return instances.idle_check(view, instance, now_s)


def _rebuild(view: ClusterView, event: Rebuilt, now_s: float) -> list[Decision]:
    """Build the view from the registry's content.  Starts that were planned and never confirmed are taken back: the
    scheduler cannot know whether their commands were sent, and a new start costs less than waiting."""
    for quotas in event.quotas:
        view.shares.take(quotas.namespace, quotas.own)
    for facts in event.actions:
        view.set_facts(facts)
    for model in event.models:
        view.model(model.asked_for).take(model, -math.inf)  # the next start looks whether it still is the newest
    for report in event.hosts:
        view.put_host(report, now_s)
    view.grace_until_s = now_s + GRACE_S
    _rebuild_instances(view, event, now_s)
    decided = _forget(view, sorted(view.history.actions() - {facts.name for facts in event.actions}))
    decided += _rebuild_plans(view, event, now_s)
    for demand in sorted(event.demand, key=lambda d: (d.queued_wall_ms, d.activation_id)):
        _take_demand(view, demand, now_s - _age_s(event.wall_ms, demand.queued_wall_ms), now_s)
    for name, action in list(view.actions.items()):
        if action.facts is None:
            decided += _action_deleted(view, name, now_s)
        elif _wants(view, name):
            decided += rescale(view, name, now_s)
        decided += _idle_check_all(view, name, now_s)
    return decided


def _rebuild_instances(view: ClusterView, event: Rebuilt, now_s: float) -> None:
    for record in event.instances:
        view.put_instance(record, now_s)
        if record.idle_since_wall_ms is not None:
            idle_s = now_s - _age_s(event.wall_ms, record.idle_since_wall_ms)
            view.set_idle_since(view.instances[record.instance_id], idle_s)


def _rebuild_plans(view: ClusterView, event: Rebuilt, now_s: float) -> list[Decision]:
    """Continue groups whose stages were all confirmed.  Give up the other groups, and revoke credentials without a
    plan."""
    decided: list[Decision] = scale_up.found_again(view, event.plans, now_s)
    apart = {kept.plan.group_id for kept in view.kept.values()}
    for plan in (p for p in event.plans if p.group_id not in apart):
        if consolidation.has_switched(view, plan):
            decided += scale_up.set_apart(view, plan, None, now_s)
            plan = consolidation.folded(plan)
            decided.append(RewritePlan(plan))
        if {m.record.stage for m in view.members(plan.group_id)} >= {s.stage for s in plan.stages}:
            decided += groups.adopt(view, plan, now_s)
            decided += consolidation.resume(view, view.groups[plan.group_id], now_s)
        else:
            decided += groups.abandon(view, plan, now_s)
    for group_id in sorted(view.in_group.keys() - view.groups.keys()):
        left = [m for m in view.members(group_id) if m.record.n_stages > 1 and m.releasing is None]
        left = [m for m in left if m.record.instance_id not in view.kept]
        decided += groups.orphans(view, left, now_s)
    return [*decided, *consolidation.stale_credentials(view, event.credentials, decided)]


def _age_s(wall_ms: int, then_ms: int) -> float:
    return min(max(0.0, (wall_ms - then_ms) / 1000), _LONGEST_WAIT_S)
