"""ClusterView: the policy's knowledge, indexed so that the cost of an event depends only on the entries that it
changes.

Only the methods of ClusterView change fields on which an index depends.  The policy itself sets fields that no index
reads: when something is examined again, which attempts have failed, which start a request waits for.  Times are the
scheduler's own monotonic seconds; wall times of other machines are used once, when a view is rebuilt, as differences.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Final

from gateway.scheduler.ablations import EVERY_PART, Parts
from gateway.scheduler.events import ActionFacts
from gateway.scheduler.placement.link_ledger import Discipline
from gateway.scheduler.placement.window import Window
from gateway.scheduler.settings import SchedulerSettings
from gateway.scheduler.view.entries import ActionView, DemandView, GroupView, InstanceView, KeptStage
from gateway.scheduler.view.evictable_memory import IdleMemory, Where
from gateway.scheduler.view.history import History
from gateway.scheduler.view.host_index import HostIndex
from gateway.scheduler.view.hosts import HostView, new_host
from gateway.scheduler.view.largest_device import Largest, same_sizes
from gateway.scheduler.view.look_order import LookOrder
from gateway.scheduler.view.model import ModelView
from gateway.scheduler.view.shares import Shares
from gateway.scheduler.view.stem_cells import StemCells
from gateway.scheduler.view.waiting_line import Turn, Turns
from relay.protocol.messages import DemandAdded
from thaw.action import KIND_LLM
from thaw.host import HostReport
from thaw.ids import ActionName, ActivationId, CommandId, GroupId, HostId, InstanceId
from thaw.instance import InstanceRecord, InstanceState

SERVED_KEPT: Final = 10_000
"""How many requests are remembered after an instance took them.  A request that comes back after more others than this
counts as new."""

SERVING: Final = (InstanceState.STARTING, InstanceState.READY)


class ClusterView:
    def __init__(
        self,
        epoch: int,
        settings: SchedulerSettings,
        new_id: Callable[[], str],
        history: History,
        parts: Parts = EVERY_PART,
    ) -> None:
        self.epoch, self.settings, self.new_id, self.history, self.parts = epoch, settings, new_id, history, parts
        self.discipline: Discipline = "equal" if settings.discipline == "equal" else "edf"
        self.hosts: dict[HostId, HostView] = {}
        self.index = HostIndex(KIND_LLM)
        self.look_order = LookOrder()
        self.idle = IdleMemory()
        self.instances: dict[InstanceId, InstanceView] = {}
        self.on_host: dict[HostId, set[InstanceId]] = {}
        self.demand: dict[ActivationId, DemandView] = {}
        self._served: dict[ActivationId, DemandView] = {}
        self.actions: dict[ActionName, ActionView] = {}
        self.groups: dict[GroupId, GroupView] = {}
        self.in_group: dict[GroupId, set[InstanceId]] = {}
        self.kept: dict[InstanceId, KeptStage] = {}
        self.models: dict[str, ModelView] = {}
        self.shares = Shares(settings.quota_starts)
        self.blocked = Turns(self.shares.weight_of, self.shares.may_start)  # the actions that wait for memory
        self.line_is_cut = False  # the rest of them is to be tried when a model has been looked at
        self.keeper: tuple[ActionName, Where] | None = None  # the first action in turn, and the device that it keeps
        self.largest = Largest(self.hosts)
        self.cells = StemCells()
        self.grace_until_s = 0.0  # until then a silent host or gateway is not yet lost

    # actions and models --------------------------------------------------------------------------------------------

    def action(self, name: ActionName) -> ActionView:
        if name not in self.actions:
            self.actions[name] = ActionView(Window(self.settings.window_s))
        return self.actions[name]

    def set_facts(self, facts: ActionFacts) -> ActionView:
        action = self.action(facts.name)
        if action.facts is not None and action.facts.model_uri in self.models:
            self.models[action.facts.model_uri].actions.discard(facts.name)
        action.facts = facts
        if facts.is_llm:
            self.model(facts.model_uri).actions.add(facts.name)
        self._note_action(facts.name)
        return action

    def delete_action(self, name: ActionName) -> None:
        """Forget the action's facts too: a later action of this name is read anew."""
        action = self.action(name)
        if action.facts is not None and action.facts.is_llm:
            self.model(action.facts.model_uri).actions.discard(name)
        action.facts = None
        self.blocked.drop(name)
        self._note_action(name)

    def forget_deleted(self, name: ActionName) -> None:
        """Forget a deleted action unless it still has waiting requests or instances."""
        action = self.action(name)
        if action.facts is None and not action.waiting and not action.instances:
            del self.actions[name]

    def model(self, uri: str) -> ModelView:
        return self.models.setdefault(uri, ModelView())

    def drop_unused_models(self) -> tuple[str, ...]:
        """Drop the models that no action has (any more) and no host is inspecting; return their URIs."""
        unused = tuple(uri for uri, model in self.models.items() if not model.actions and model.asked is None)
        for uri in unused:
            del self.models[uri]
        return unused

    # demand --------------------------------------------------------------------------------------------------------

    def add_demand(self, demand: DemandAdded, queued_s: float) -> bool:
        """Return False for a request that was already known.  A request that had an instance and lost it keeps its age,
        and stands before requests that came later."""
        if (waits := self.demand.get(demand.activation_id)) is not None:
            if waits.demand.action == demand.action:
                waits.demand = demand  # another gateway may hold it now
                return False
            self.serve_demand(demand.activation_id)  # its function has moved to another pool
        action, known = self.action(demand.action), self._served.pop(demand.activation_id, None)
        if known is None:
            known = DemandView(demand, queued_s)
            action.window.add(queued_s)
        newest = self.demand[next(reversed(action.waiting))] if action.waiting else None
        known.demand, known.group_id = demand, None
        self.demand[demand.activation_id] = known
        action.waiting[demand.activation_id] = None
        if newest is not None and known.queued_s < newest.queued_s:
            action.waiting = dict.fromkeys(sorted(action.waiting, key=lambda a: self.demand[a].queued_s))
        self._note_demand(demand.action)
        return True

    def serve_demand(self, activation_id: ActivationId) -> None:
        """An instance has the request.  It is remembered for a while, in case that instance is lost."""
        if (known := self.demand.get(activation_id)) is None:
            return
        self.drop_demand(activation_id)
        self._served[activation_id] = known
        if len(self._served) > SERVED_KEPT:
            del self._served[next(iter(self._served))]

    def drop_demand(self, activation_id: ActivationId) -> None:
        if (known := self.demand.pop(activation_id, None)) is None:
            return
        self.actions[known.demand.action].waiting.pop(activation_id, None)
        self._note_demand(known.demand.action)
        if known.group_id is not None and (group := self.groups.get(known.group_id)) is not None:
            group.activation_ids.discard(activation_id)

    def _note_demand(self, name: ActionName) -> None:
        """Update the indexes that depend on the action's oldest request, and on whether any request waits."""
        if name in self.blocked:
            self.block(name)
        if not self.actions[name].waiting and self.keeper is not None and self.keeper[0] == name:
            self.keep_nothing()
        if len(self.actions[name].waiting) <= 1:
            self._note_action(name)

    def block(self, name: ActionName) -> None:
        """The action waits for memory, in its turn."""
        if (facts := self.action(name).facts) is not None:
            oldest = next(self.waiting(name), None)
            due_s = math.inf if oldest is None else oldest.queued_s + facts.slo_ttft_s
            self.blocked.put(Turn(due_s, name, facts.need_bytes))

    def keep_nearest(self, name: ActionName) -> None:
        """The action is first in turn and has no room: keep for it the device that lacks least.  No other action starts
        there."""
        self.keep_nothing()
        facts = self.action(name).facts
        where = None if facts is None else self.idle.nearest(facts.need_bytes, for_model=facts.is_llm)
        if where is not None:
            self.keeper = name, where
            self.hosts[where[0]].keep(where[1], for_the_first=True)

    def keep_nothing(self) -> None:
        if self.keeper is not None:
            (host_id, device), self.keeper = self.keeper[1], None
            if (host := self.hosts.get(host_id)) is not None:
                host.keep(device, for_the_first=False)

    def waiting(self, name: ActionName) -> Iterator[DemandView]:
        return (self.demand[a] for a in self.action(name).waiting)

    # instances -----------------------------------------------------------------------------------------------------

    def put_instance(
        self, record: InstanceRecord, now_s: float, *, started_by: CommandId | None = None
    ) -> InstanceView | None:
        """Take over an instance's record; return the entry from before.  Its memory is held from the first record to
        GONE."""
        before = self.instances.get(record.instance_id)
        if record.state is InstanceState.GONE:
            self._forget_instance(before)
            if (host := self.hosts.get(record.host_id)) is not None:
                host.pool.end(record.instance_id, record.created_wall_ms)
            return before
        # a release is refused by an instance that is busy after all, so a doubtful record counts as idle
        idle = record.idle_since_wall_ms is not None or (record.state is InstanceState.READY and record.inflight == 0)
        idle_s = now_s if idle else None
        view = InstanceView(record, now_s, idle_s, None, started_by)
        if before is None:
            self._hold(record)
        else:
            if _place(before.record) != _place(record):  # the host's report wins
                self._forget_instance(before)
                self._hold(record)
            else:
                self._count(before, -1)
                self._move(before.record, record)
            view.releasing, view.wake_s = before.releasing, before.wake_s
            if idle and before.idle_since_s is not None and _same_idleness(before.record, record):
                view.idle_since_s = before.idle_since_s
        self.instances[record.instance_id] = view
        self._count(view, 1)
        self._note_group(record)
        return before

    def _hold(self, record: InstanceRecord) -> None:
        self.action(record.action).instances.add(record.instance_id)
        self.on_host.setdefault(record.host_id, set()).add(record.instance_id)
        self.in_group.setdefault(record.group_id, set()).add(record.instance_id)
        if (host := self.hosts.get(record.host_id)) is not None:
            host.hold(record.device, record.reserve_bytes)

    def _move(self, before: InstanceRecord, record: InstanceRecord) -> None:
        """A stage that has left its pipeline is a group of its own."""
        if before.group_id != record.group_id:
            self._leave_group(before)
            self.in_group.setdefault(record.group_id, set()).add(record.instance_id)

    def _leave_group(self, record: InstanceRecord) -> None:
        self.in_group[record.group_id].discard(record.instance_id)
        if not self.in_group[record.group_id]:
            del self.in_group[record.group_id]

    def _forget_instance(self, view: InstanceView | None) -> None:
        if view is None:
            return
        record = view.record
        self.set_releasing(view, None)
        self._count(view, -1)
        self.idle.drop_group(record.instance_id)
        del self.instances[record.instance_id]
        self.action(record.action).instances.discard(record.instance_id)
        self.on_host[record.host_id].discard(record.instance_id)
        self._leave_group(record)
        if (host := self.hosts.get(record.host_id)) is not None:
            host.let_go(record.instance_id, record.device, record.reserve_bytes)
        self._note_group(record)

    def set_releasing(self, view: InstanceView, command_id: CommandId | None) -> None:
        """Note that a release is on its way, so that the instance's memory is free soon, or take that note back."""
        if (view.releasing is None) == (command_id is None):
            view.releasing = command_id
            return
        self._count(view, -1)
        view.releasing = command_id
        self._count(view, 1)
        if (host := self.hosts.get(view.record.host_id)) is not None:
            host.set_leaving(view.record, leaving=command_id is not None)
            self.idle.put_host(host)
        self._note_group(view.record)

    def set_idle_since(self, view: InstanceView, idle_since_s: float) -> None:
        view.idle_since_s = idle_since_s
        self._note_group(view.record)

    # evictions -----------------------------------------------------------------------------------------------------

    def _count(self, view: InstanceView, by: int) -> None:
        record = view.record
        if record.takes_requests and view.releasing is None and view.state in SERVING:
            action = self.action(record.action)
            was_spare = action.is_spare
            action.serving[record.action_version] = action.serving.get(record.action_version, 0) + by
            if was_spare != action.is_spare:
                self._note_action(record.action)

    def _note_action(self, name: ActionName) -> None:
        for instance_id in self.actions[name].instances:
            if (instance := self.instances.get(instance_id)) is not None and instance.record.takes_requests:
                self._note_group(instance.record)

    def _note_group(self, record: InstanceRecord) -> None:
        """Called after every change of a group, so that ``idle`` knows the groups that are idle and spare."""
        if (head := self.head(record)) is None:
            return
        if self.actions[record.action].is_spare and self.may_go(head):
            held = (((m.record.host_id, m.record.device), m.record.reserve_bytes) for m in self.stages_of(head))
            self.idle.put_group(head.record.instance_id, head.idle_since_s or 0.0, held)
        else:
            self.idle.drop_group(head.record.instance_id)

    def of_action(self, name: ActionName) -> list[InstanceView]:
        return [self.instances[i] for i in sorted(self.action(name).instances)]

    def awaits_start(self, demand: DemandView) -> bool:
        """True when a start in progress is meant for the request."""
        group = None if demand.group_id is None else self.groups.get(demand.group_id)
        return group is not None and group.is_starting

    # groups --------------------------------------------------------------------------------------------------------

    def put_group(self, group: GroupView) -> None:
        """Add a group whose instances are known already."""
        self.groups[group.plan.group_id] = group
        self.shares.count(group, 1)
        self._note_group(self.instances[group.instance_ids[0]].record)

    def group_started(self, group: GroupView) -> None:
        """Every stage is READY: no request waits for the group's start any more."""
        self.shares.count(group, -1)
        group.is_starting = False
        group.activation_ids.clear()
        self._note_group(self.instances[group.instance_ids[0]].record)

    def drop_group(self, group: GroupView) -> None:
        self.shares.count(group, -1)
        del self.groups[group.plan.group_id]

    def members(self, group_id: GroupId) -> list[InstanceView]:
        """Return the stages of the group that are known, in order of stage."""
        found = [self.instances[i] for i in self.in_group.get(group_id, ())]
        return sorted(found, key=lambda v: (v.record.stage, v.record.instance_id))

    def head(self, record: InstanceRecord) -> InstanceView | None:
        """Return stage 0 of the group that ``record`` belongs to, which speaks for all of its stages; None when it has
        gone, or has become one worker and left this stage behind."""
        if record.takes_requests:
            return self.instances.get(record.instance_id)
        heads = (v for v in self.members(record.group_id) if v.record.takes_requests and v.record.n_stages > 1)
        return next(heads, None)

    def stages_of(self, head: InstanceView) -> list[InstanceView]:
        """Return the stages that answer with ``head``, itself among them."""
        return [head] if head.record.n_stages == 1 else self.members(head.record.group_id)

    def left_behind(self, group: GroupView) -> list[InstanceView]:
        """Return the stages that are there although the group's plan has them no more, those that are kept included."""
        return [m for m in self.members(group.plan.group_id) if m.record.instance_id not in group.instance_ids]

    def may_go(self, head: InstanceView) -> bool:
        """True for a group that is whole and idle."""
        group = self.groups.get(head.record.group_id)
        return head.is_idle and (group is None or not group.is_starting)

    # hosts ---------------------------------------------------------------------------------------------------------

    def put_host(self, report: HostReport, now_s: float) -> list[str]:
        """Take over a heartbeat; return a sentence for each value that made no sense and was clamped."""
        host = self.hosts.get(report.host_id)
        if host is None or not same_sizes(host.report, report):
            self.largest.changed()
        if host is None:
            host = self.hosts[report.host_id] = new_host(report, self.discipline, now_s)
            host.on_change = self._host_changed
        if host.is_confirmed_by(report):
            host.confirm(report, now_s)
            return []
        ours = {
            i: (self.instances[i].record.device, self.instances[i].record.reserve_bytes)
            for i in self.on_host.get(report.host_id, ())
        }
        odd = host.take_report(report, ours, now_s)
        self._count_releasing(host)
        self._note_progress(report, now_s)
        return odd

    def _host_changed(self, host: HostView) -> None:
        self.index.put(host)
        self.look_order.put(host)
        self.idle.put_host(host)

    def _count_releasing(self, host: HostView) -> None:
        """Count anew the memory that is being released: an instance may have been told to go while its host was
        lost."""
        for device in host.devices.values():
            device.releasing = 0
        for instance_id in self.on_host.get(host.host_id, ()):
            instance = self.instances[instance_id]
            device_of_it = host.devices.get(instance.record.device)
            if instance.releasing is not None and device_of_it is not None:
                device_of_it.releasing += instance.record.reserve_bytes
        self.idle.put_host(host)

    def _note_progress(self, report: HostReport, now_s: float) -> None:
        for fetch in report.fetches:
            group = self.groups.get(GroupId(fetch.group_id))
            at = report.host_id, fetch.stage
            if group is not None and fetch.done_bytes > group.done_bytes.get(at, 0):
                group.done_bytes[at], group.progress_s = fetch.done_bytes, now_s
            for kept in self.kept.values():
                is_its = (kept.pipeline, kept.stage) == (fetch.group_id, fetch.stage)
                if is_its and kept.later_bytes != fetch.later_bytes:
                    kept.later_bytes, kept.since_s = fetch.later_bytes, now_s

    def drop_host(self, host_id: HostId) -> list[InstanceView]:
        """Drop a host; return its instances, which the caller declares lost."""
        self.hosts.pop(host_id, None)
        self.index.drop(host_id)
        self.look_order.drop(host_id)
        self.idle.drop_host(host_id)
        self.largest.changed()
        return [self.instances[i] for i in sorted(self.on_host.get(host_id, ()))]

    def live_hosts(self) -> Iterable[HostView]:
        """Hosts that take new work."""
        return (h for h in self.hosts.values() if not h.draining)


def _same_idleness(before: InstanceRecord, after: InstanceRecord) -> bool:
    return before.state is after.state and before.idle_since_wall_ms == after.idle_since_wall_ms


def _place(record: InstanceRecord) -> tuple[HostId, str, int]:
    return record.host_id, record.device, record.reserve_bytes
