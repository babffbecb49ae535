"""A view, a clock that the test moves, and the messages that hosts and gateways would send."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, TypeVar

from gateway.scheduler.decisions import ConsolidateInstance, Decision, InspectModelOn, ReleaseInstance, StartGroup, Wake
from gateway.scheduler.events import ActionFacts, ActionSeen, HostsSeen, Rebuilt, Timer
from gateway.scheduler.policy.decide import decide_all
from gateway.scheduler.settings import SchedulerSettings
from gateway.scheduler.view.cluster import ClusterView
from gateway.scheduler.view.history import History
from relay.protocol.messages import (
    CommandRefused,
    ConsolidationFailed,
    DemandAdded,
    DemandRemoved,
    InstanceChanged,
    ModelInspected,
)
from tests.scheduler.facts import BUSY, CHAT, FACTS, GONE, HELLO, chat, demand, hello, report
from thaw.errors import ErrorInfo
from thaw.host import HostReport
from thaw.ids import ActionName, CommandId, GroupId, HostId
from thaw.instance import InstanceRecord, InstanceState, StartMode
from thaw.model import ModelFacts
from thaw.plan import Plan

D = TypeVar("D")


class World:
    """A view with a clock.  It keeps every timer that the policy requested."""

    def __init__(self, *hosts: HostReport, ids: str = "id", **settings_: Any) -> None:
        n = itertools.count()
        self.view = ClusterView(7, SchedulerSettings("redis://", **settings_), lambda: f"{ids}{next(n)}", History())
        self.now = 100.0
        self.timers: list[Wake] = []
        self._asked = itertools.count()
        # no model changes: a look whether known facts hold is answered at once, and not returned
        self.answers_looks = True
        self.reports = {h.host_id: h for h in hosts}
        self.do(HostsSeen(tuple(hosts)))

    def do(self, *events: Any) -> list[Decision]:
        """Give the policy events that are read together, and return its decisions."""
        decided = decide_all(self.view, [self._asked_for(event) for event in events], self.now)
        self.timers += [d for d in decided if isinstance(d, Wake)]
        if self.answers_looks:
            looks = [d for d in decided if isinstance(d, InspectModelOn) and self.view.model(d.uri).fresh]
            decided = [d for d in decided if d not in looks]
            for look in looks:
                decided += self.do(ModelInspected(look.uri, look.host_id, None, None, look.known_version))
        return decided

    def _asked_for(self, event: Any) -> Any:
        """Make an answer that names no question the answer to the open one, which is put if there is none."""
        if not isinstance(event, ModelInspected) or event.command_id:
            return event
        model = self.view.model(event.uri)
        if model.asked is None:
            model.asked, model.asked_s = (event.host_id, CommandId("asked")), self.now
        return replace(event, command_id=model.asked[1])

    def ask(self, action: ActionName = HELLO, gateway: str = "g") -> list[Decision]:
        return self.do(self.request(action, gateway))

    def burst(self, n: int, action: ActionName = CHAT) -> list[Decision]:
        """Send ``n`` requests that the scheduler reads at once."""
        return self.do(*(self.request(action) for _ in range(n)))

    def request(self, action: ActionName = HELLO, gateway: str = "g") -> DemandAdded:
        return demand(f"a{next(self._asked)}", action, gateway)

    def started(self, action: ActionName | None = None) -> StartGroup:
        """The one start that a request leads to.  It is for the only action that the world knows, if none is named."""
        (start,) = of(self.ask(action or next(iter(self.view.actions))), StartGroup)
        return start

    def serving(self, action: ActionName | None = None, *, idle: bool = True) -> StartGroup:
        """The one start that a request leads to, after all its stages have become ready."""
        start = self.started(action)
        self.ready(start, idle=idle)
        return start

    def deploy(self, *actions: ActionFacts, changed: bool = False) -> list[Decision]:
        return self.do(*(ActionSeen(facts, changed=changed) for facts in actions))

    def see(self, *hosts: HostReport) -> list[Decision]:
        """Let these hosts report.  All others are lost."""
        return self.do(HostsSeen(hosts))

    def see_all(self, *where: HostId | str, **fields: Any) -> list[Decision]:
        """Let all hosts report what they reported first, with other ``fields`` for those that ``where`` names."""
        return self.see(*(replace(r, **fields) if h in where else r for h, r in self.reports.items()))

    def looked(
        self, facts: ModelFacts | None, error: ErrorInfo | None = None, unchanged: str = "", host: str = "h0"
    ) -> list[Decision]:
        """Let a host answer the question for the model of most tests."""
        return self.do(ModelInspected("s3://m/x", HostId(host), facts, error, unchanged))

    def refused(self, command: ReleaseInstance | ConsolidateInstance, error: ErrorInfo = BUSY) -> list[Decision]:
        """Let a host refuse a command about an instance."""
        group_id = self.view.instances[command.instance_id].record.group_id
        return self.do(CommandRefused(command.command_id, command.host_id, group_id, error))

    def said(self, start: StartGroup, state: InstanceState, stage: int = 0, **fields: Any) -> list[Decision]:
        return self.do(InstanceChanged(record_of(start, state, stage, **fields)))

    def gone(self, start: StartGroup, *stages: int, **fields: Any) -> list[Decision]:
        """Report these stages as gone, or stage 0."""
        return [d for stage in stages or (0,) for d in self.said(start, GONE, stage, **fields)]

    def ready(self, start: StartGroup, *, idle: bool = True) -> list[Decision]:
        """Report every stage as ready, the last stage first."""
        decided: list[Decision] = []
        for stage in reversed(range(len(start.stages))):
            decided += self.said(
                start, InstanceState.READY, stage, idle_since_wall_ms=1 if idle else None, inflight=int(not idle)
            )
        for activation in start.activation_ids:
            self.do(DemandRemoved(activation, start.plan.action))
        return decided

    def stays_a_pipeline(self, start: StartGroup) -> list[Decision]:
        """Report that the engine of the group's stage 0 cannot make one worker of it."""
        head, error = start.stages[0], ErrorInfo("ModelUnsupported", "this engine cannot")
        return self.do(ConsolidationFailed(head.instance_id, head.host_id, start.plan.group_id, error))

    def fire(self, timer: Wake) -> list[Decision]:
        return self.do(Timer(timer.kind, timer.key))

    def later(self, seconds: float) -> list[Decision]:
        """Let time pass and fire every timer that falls due, in order."""
        until, decided = self.now + seconds, list[Decision]()
        while due := [t for t in self.timers if t.at_s <= until]:
            first = min(due, key=lambda t: t.at_s)
            self.timers.remove(first)
            self.now = max(self.now, first.at_s)
            decided += self.fire(first)
        self.now = until
        return decided


def record_of(start: StartGroup, state: InstanceState, stage: int = 0, **fields: Any) -> InstanceRecord:
    at, n = start.plan.stages[stage], len(start.plan.stages)
    plain = InstanceRecord(
        start.stages[stage].instance_id,
        at.host,
        start.plan.action,
        start.plan.action_version,
        start.plan.group_id,
        state,
        "a:1",
        0 if stage else n,
        at.reserve_bytes,
        at.device,
        StartMode.COLD,
        keep_alive_s=60.0,
        stage=stage,
        n_stages=n,
    )
    return replace(plain, **fields)


def of(decided: Iterable[Decision], kind: type[D]) -> list[D]:
    return [d for d in decided if isinstance(d, kind)]


def starting(w: World, action: ActionName | None = None) -> tuple[World, StartGroup]:
    return w, w.started(action)


def serving(w: World, action: ActionName | None = None, *, idle: bool = True) -> tuple[World, StartGroup]:
    return w, w.serving(action, idle=idle)


def hosts_of(decided: Iterable[Decision]) -> list[str]:
    """The hosts of the first stages of the starts."""
    return [s.plan.stages[0].host for s in of(decided, StartGroup)]


def foretold_s(start: StartGroup) -> float:
    """When the first token of a start is foretold."""
    assert start.plan.predicted_ttft_s is not None
    return start.plan.predicted_ttft_s


def world(*hosts: HostReport, facts: ActionFacts | None = None, **settings_: Any) -> World:
    made = World(*(hosts or (report(),)), **settings_)
    made.deploy(facts or hello())
    return made


def llm_world(
    *hosts: HostReport, facts: ActionFacts | None = None, model: ModelFacts = FACTS, **settings_: Any
) -> World:
    made = world(*hosts, facts=facts or chat(), **settings_)
    made.do(ModelInspected("s3://m/x", HostId("h0"), model))
    return made


def free_slabs(w: World) -> dict[str, int]:
    """The slabs of each host's pool that are free."""
    return {h.host_id: h.pool.free_slabs() for h in w.view.hosts.values()}


def rebuilt(**fields: Any) -> Rebuilt:
    """What a successor reads, by default of a host and a function."""
    return replace(Rebuilt(10_000, (report(),), (), (), (), (), (hello(),)), **fields)


def plan_of(group: str) -> Plan:
    return replace(world().started().plan, group_id=GroupId(group))
