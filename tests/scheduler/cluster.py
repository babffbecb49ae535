"""Hosts, a registry and a relay's credentials in memory, driven by the policy's decisions and by random histories."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any, Final, TypeVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.scheduler.decisions import (
    CancelGroup,
    ConsolidateInstance,
    Decision,
    DropDemand,
    DropPlan,
    FailDemand,
    ForgetInstance,
    PlanWorker,
    ReleaseInstance,
    RevokeCredential,
    RewritePlan,
    StageStart,
    StartGroup,
)
from gateway.scheduler.events import ActionFacts, HostsSeen, Rebuilt, StartRefused
from relay.protocol.messages import CommandRefused, ConsolidationFailed, DemandAdded, DemandRemoved, InstanceChanged
from tests.scheduler.facts import BUSY, GONE, LOST, READY, STARTING, demand, report
from tests.scheduler.world import World, record_of
from thaw.errors import ErrorInfo
from thaw.host import HostReport
from thaw.ids import ActionName, ActivationId, GroupId, HostId, InstanceId, own_group
from thaw.instance import InstanceRecord
from thaw.model import ModelFacts
from thaw.plan import Plan

MEMORY_MB = 2500
NO_RELAY = ErrorInfo("Unavailable", "the relay does not answer")
UNKNOWN = ErrorInfo("InstanceGone", "no such instance")
DRAINING = ErrorInfo("Unavailable", "this host is draining")


T = TypeVar("T")


def one(of: list[T], n: int) -> list[T]:
    """The one that a step's number chooses, if there is any."""
    return [of[n % len(of)]] if of else []


@dataclass
class Host:
    name: str
    commands: deque[tuple[Decision, StageStart | None]] = field(default_factory=deque)
    instances: dict[InstanceId, InstanceRecord] = field(default_factory=dict)
    consolidating: set[InstanceId] = field(default_factory=set)
    is_up: bool = True
    refuses: bool = False

    def report(self) -> HostReport:
        used = sum(r.reserve_bytes for r in self.instances.values()) // (1024 * 1024)
        return report(self.name, MEMORY_MB, min(used, MEMORY_MB), instances=tuple(self.instances))


class Cluster:
    """After ``crash_after`` more effects the scheduler crashes, and another scheduler takes over (-1: never)."""

    def __init__(self, n_hosts: int, actions: Iterable[ActionFacts], model: ModelFacts) -> None:
        self.hosts = {HostId(f"h{i}"): Host(f"h{i}") for i in range(n_hosts)}
        self.actions, self.model = {a.name: a for a in actions}, model
        self.registry: dict[InstanceId, InstanceRecord] = {}
        self.plans: dict[GroupId, Plan] = {}
        self.credentials: set[GroupId] = set()
        self.unheard: deque[tuple[Host, InstanceId]] = deque()
        self.switched: set[GroupId] = set()  # pipelines that their stage 0 has left
        self.demand: dict[ActivationId, DemandAdded] = {}
        self.n_asked, self.crash_after, self.relay_is_up, self.n_leaders = 0, -1, True, 0
        self.lead()

    def lead(self) -> None:
        """Let a new scheduler begin, with the state that the registry has."""
        now = self.w.now if hasattr(self, "w") else 100.0
        self.crash_after = -1
        self.n_leaders += 1
        self.w = World(ids=f"{self.n_leaders}-", relay_url="redis://relay:1", start_deadline_s=30.0)
        self.w.now = now
        self.tell(
            Rebuilt(
                0,
                self.live(),
                tuple(self.registry.values()),
                tuple(self.demand.values()),
                tuple(self.plans.values()),
                (self.model,),
                tuple(self.actions.values()),
                tuple(self.credentials),
            )
        )

    def a_host(self, n: int) -> Host:
        return list(self.hosts.values())[n % len(self.hosts)]

    def an_action(self, n: int) -> ActionName:
        return list(self.actions)[n % len(self.actions)]

    def live(self) -> tuple[HostReport, ...]:
        return tuple(h.report() for h in self.hosts.values() if h.is_up)

    # the scheduler's side ------------------------------------------------------------------------------------------

    def tell(self, event: object) -> None:
        self.carry_out(self.w.do(event))

    def carry_out(self, decided: Iterable[Decision]) -> None:
        leader = self.n_leaders
        for decision in decided:
            if self.n_leaders != leader:
                return  # the scheduler that decided this has crashed
            if self.crash_after == 0:
                return self.lead()
            self.crash_after -= 1
            self._apply(decision)

    def _apply(self, decision: Decision) -> None:
        match decision:
            case StartGroup():
                self._start(decision)
            case ReleaseInstance() | CancelGroup() | ConsolidateInstance():
                self.hosts[decision.host_id].commands.append((decision, None))
            case RevokeCredential():
                self.credentials.discard(decision.group_id)
            case RewritePlan() | PlanWorker():
                self.plans[decision.plan.group_id] = decision.plan
            case DropPlan():
                self.plans.pop(decision.group_id, None)
            case ForgetInstance():
                self.registry.pop(decision.record.instance_id, None)
            case FailDemand():
                for activation_id in decision.activation_ids:
                    self.demand.pop(activation_id, None)
            case DropDemand():
                self.demand.pop(decision.activation_id, None)

    def _start(self, decision: StartGroup) -> None:
        """Carry out a start.  The scheduler may also crash between two of its commands."""
        plan = decision.plan
        self.plans[plan.group_id] = plan
        if len(plan.stages) > 1:
            if not self.relay_is_up:
                return self.tell(StartRefused(plan.group_id, NO_RELAY))
            self.credentials.add(plan.group_id)
        for stage in decision.stages:
            if self.crash_after == 0:
                return
            self.crash_after -= 1
            self.hosts[stage.host_id].commands.append((decision, stage))

    # the others' side ----------------------------------------------------------------------------------------------

    def ask(self, action: ActionName) -> None:
        asked = demand(f"a{self.n_asked}", action)
        self.n_asked += 1
        self.demand[asked.activation_id] = asked
        self.tell(asked)

    def serve(self, action: ActionName) -> None:
        """Let every waiting request of the action find a slot."""
        for activation_id in [a for a, d in self.demand.items() if d.action == action]:
            del self.demand[activation_id]
            self.tell(DemandRemoved(activation_id, action))

    def obey(self, host: Host) -> None:
        """Let the host carry out the next command in its stream."""
        if not host.is_up or not host.commands:
            return
        command, stage = host.commands.popleft()
        match command:
            case StartGroup() if stage is not None:
                if host.refuses:
                    refused = CommandRefused(stage.command_id, stage.host_id, command.plan.group_id, DRAINING)
                    return self.tell(refused)
                self.say(host, record_of(command, STARTING, stage.stage))
            case CancelGroup():
                for record in [r for r in host.instances.values() if r.group_id == command.group_id]:
                    if record.n_stages > 1 or record.state is STARTING:  # a worker by itself goes on
                        self.say(host, replace(record, state=GONE))
            case ConsolidateInstance():
                self._consolidate(host, command)
            case ReleaseInstance():
                self._release(host, command)

    def _consolidate(self, host: Host, command: ConsolidateInstance) -> None:
        if command.instance_id not in host.instances:
            refused = CommandRefused(command.command_id, command.host_id, command.group_id, UNKNOWN)
            return self.tell(refused)
        host.consolidating.add(command.instance_id)
        record = host.instances[command.instance_id]
        if record.n_stages > 1:
            self.say(host, replace(record, is_consolidating=True))

    def _asked(self) -> list[tuple[Host, InstanceId]]:
        return [(h, i) for h in self.hosts.values() if h.is_up for i in sorted(h.consolidating & h.instances.keys())]

    def switch(self, n: int) -> None:
        """Let a stage that was asked become a worker: stage 0 at any time, a later stage once stage 0 has switched.  Its
        host says so later (``hear``)."""
        for host, instance_id in one([(h, i) for h, i in self._asked() if self._may_switch(h.instances[i])], n):
            host.consolidating.discard(instance_id)
            record = host.instances[instance_id]
            if record.state is READY:
                if record.stage == 0:
                    self.switched.add(record.group_id)
                own = own_group(record.group_id, record.stage)
                worker = replace(record, n_stages=1, stage=0, slots=8, group_id=own, is_consolidating=False)
                host.instances[instance_id] = worker
                self.unheard.append((host, instance_id))

    def _may_switch(self, record: InstanceRecord) -> bool:
        return record.stage == 0 or record.group_id in self.switched

    def hear(self) -> None:
        """Let the scheduler hear of the switch that was first."""
        if self.unheard:
            host, instance_id = self.unheard.popleft()
            if host.is_up and instance_id in host.instances:
                self.say(host, host.instances[instance_id])

    def fail_to_switch(self, n: int) -> None:
        for host, instance_id in one(self._asked(), n):
            host.consolidating.discard(instance_id)
            record = replace(host.instances[instance_id], is_consolidating=False)
            self.say(host, record)
            self.tell(ConsolidationFailed(instance_id, record.host_id, record.group_id, UNKNOWN))

    def _release(self, host: Host, command: ReleaseInstance) -> None:
        record = host.instances.get(command.instance_id)
        if record is None:
            return
        if command.only_idle and record.inflight:
            return self.tell(CommandRefused(command.command_id, command.host_id, record.group_id, BUSY))
        self.say(host, replace(record, state=GONE))

    def say(self, host: Host, record: InstanceRecord) -> None:
        if record.state is GONE:
            host.instances.pop(record.instance_id, None)
            self.registry.pop(record.instance_id, None)
        else:
            host.instances[record.instance_id] = self.registry[record.instance_id] = record
        self.tell(InstanceChanged(record))

    def ready(self, n: int, *, busy: bool = False) -> None:
        """Let one of the instances report that it is ready."""
        idle_ms = None if busy else int(self.w.now * 1000)
        for host, record in self._one_instance(n):
            self.say(host, replace(record, state=READY, inflight=int(busy), idle_since_wall_ms=idle_ms))

    def die(self, n: int) -> None:
        for host, record in self._one_instance(n):
            self.say(host, replace(record, state=GONE, error=LOST))

    def _one_instance(self, n: int) -> list[tuple[Host, InstanceRecord]]:
        return one([(h, r) for h in self.hosts.values() if h.is_up for r in h.instances.values()], n)

    def set_up(self, host: Host, *, is_up: bool) -> None:
        host.is_up = is_up
        self.heartbeat()

    def restart(self, host: Host) -> None:
        """Start a host again whose machine was switched off.

        Its invoker finds none of the containers that the registry names for this host, and reports them as gone.  The
        instances of a host that was lost before are no longer in the registry.
        """
        host.is_up = True
        host.instances.clear()
        for record in [r for r in self.registry.values() if r.host_id == host.name]:
            self.say(host, replace(record, state=GONE, error=LOST))

    def heartbeat(self) -> None:
        self.tell(HostsSeen(self.live()))

    def later(self, seconds: float) -> None:
        """Let time pass and fire the timers that fall due.  A crash may replace the scheduler in between."""
        until = self.w.now + seconds
        while due := [t for t in self.w.timers if t.at_s <= until]:
            first = min(due, key=lambda t: t.at_s)
            self.w.timers.remove(first)
            self.w.now = max(self.w.now, first.at_s)
            self.carry_out(self.w.fire(first))
        self.w.now = until

    def everybody_obeys(self) -> None:
        for host in self.hosts.values():
            while host.is_up and host.commands:
                self.obey(host)

    def everybody_goes_on(self) -> None:
        """Every host that is up carries out its commands, starting instances become ready, and busy ones idle."""
        self.everybody_obeys()
        while self.unheard:
            self.hear()
        for host in [h for h in self.hosts.values() if h.is_up]:
            for record in list(host.instances.values()):
                if record.instance_id in host.instances:
                    idle_ms = record.idle_since_wall_ms or int(self.w.now * 1000)
                    self.say(host, replace(record, state=READY, inflight=0, idle_since_wall_ms=idle_ms))

    def settle(self) -> None:
        """Every host comes back and carries out its commands, and idle instances are released."""
        self.crash_after = -1
        self.relay_is_up = True
        for host in self.hosts.values():
            host.is_up, host.refuses = True, False
        for _ in range(12):
            self.heartbeat()
            self.everybody_goes_on()
            for name in self.actions:
                self.serve(name)
            self.later(70.0)


# histories -----------------------------------------------------------------------------------------------------------

Step = tuple[str, int]
STEPS: Final[dict[str, Callable[[Cluster, int], None]]] = {
    "ask": lambda c, n: c.ask(c.an_action(n)),
    "obey": lambda c, n: c.obey(c.a_host(n)),
    "ready": lambda c, n: c.ready(n),
    "busy": lambda c, n: c.ready(n, busy=True),
    "switch": lambda c, n: c.switch(n),
    "hear": lambda c, n: c.hear(),
    "fail": lambda c, n: c.fail_to_switch(n),
    "die": lambda c, n: c.die(n),
    "lose": lambda c, n: c.set_up(c.a_host(n), is_up=False),
    "back": lambda c, n: c.set_up(c.a_host(n), is_up=True),
    "restart": lambda c, n: c.restart(c.a_host(n)),
    "refuse": lambda c, n: setattr(c.a_host(n), "refuses", not c.a_host(n).refuses),
    "crash": lambda c, n: setattr(c, "crash_after", n % 6),
    "relay": lambda c, n: setattr(c, "relay_is_up", not c.relay_is_up),
    "wait": lambda c, n: c.later(float(n)),
    "long_wait": lambda c, n: c.later(float(n * 3)),
    "beat": lambda c, n: c.heartbeat(),
    "whole": lambda c, n: c.everybody_goes_on(),
    "serve": lambda c, n: c.serve(c.an_action(n)),
}
"""The steps of a history.  A step's number chooses the host, the instance or the action."""


def steps(least: int, most: int, names: str, *numbers: int) -> st.SearchStrategy[list[Any]]:
    """Histories of ``least`` to ``most`` steps.  A step has a name and ``numbers`` up to these.

    A name that stands twice is drawn twice as often.
    """
    step = st.tuples(st.sampled_from(names.split()), *(st.integers(0, n) for n in numbers))
    return st.lists(step, min_size=least, max_size=most)


def few_or_many(few: int, many: int, **drawn: st.SearchStrategy[Any]) -> Callable[[Callable[..., Any]], Any]:
    """Make a property a test with ``few`` examples, and with ``many`` in the full run."""

    def of(holds: Callable[..., Any]) -> Any:
        @pytest.mark.parametrize("n", [few, pytest.param(many, marks=pytest.mark.full)])
        def test(n: int) -> None:
            settings(max_examples=n)(given(**drawn)(holds))()

        test.__name__, test.__doc__, test.__module__ = holds.__name__, holds.__doc__, holds.__module__
        return test

    return of
