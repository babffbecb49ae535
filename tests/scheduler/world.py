"""A view, a clock that the test moves, and the messages that hosts and gateways would send."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, TypeVar

from gateway.scheduler.decisions import Decision, InspectModelOn, StartGroup, Wake
from gateway.scheduler.events import ActionFacts, ActionSeen, HostsSeen, Rebuilt, Timer
from gateway.scheduler.policy.decide import decide_all
from gateway.scheduler.settings import SchedulerSettings
from gateway.scheduler.view.cluster import ClusterView
from gateway.scheduler.view.history import History
from relay.protocol.messages import (
    ConsolidationFailed,
    DemandAdded,
    DemandRemoved,
    InstanceChanged,
    ModelInspected,
)
from thaw.errors import ErrorInfo
from thaw.host import Device, HeldSegment, HostReport, PoolReport
from thaw.ids import ActionName, ActivationId, CommandId, GatewayId, GroupId, HostId, Namespace
from thaw.instance import InstanceRecord, InstanceState, StartMode
from thaw.model import FileRange, ModelFacts, ModelParts
from thaw.plan import Plan

MIB = 1024 * 1024
D = TypeVar("D")
CHAT, HELLO = ActionName("guest/chat"), ActionName("guest/hello")
FACTS = ModelFacts("s3://m", 100 * MIB, 90 * MIB, 2, (40 * MIB,) * 2, 10 * MIB, "aa", "", True, {"w": 100 * MIB})


def divisible(layer: int, entry: int, n_layers: int, sidecar: int = 700, header: int = 30_536) -> ModelFacts:
    """A checkpoint of one file.  Its head is its embedding, apart from the norm."""
    first = FileRange("model.safetensors", header, entry)
    layers = [FileRange("model.safetensors", header + entry + i * layer, layer) for i in range(n_layers)]
    end = header + entry + n_layers * layer
    norm = FileRange("model.safetensors", end, 1_152)
    parts = ModelParts((first,), tuple((r,) for r in layers), (norm,), (first,))
    files = {"config.json": sidecar, "model.safetensors": end + 1_152}
    weights = entry + n_layers * layer + 1_152
    return ModelFacts(
        "s3://m",
        sum(files.values()),
        weights,
        n_layers,
        (layer,) * n_layers,
        entry + 1_152,
        "aa",
        "",
        True,
        files,
        parts=parts,
    )


SMOLLM2 = divisible(layer=7_080_192, entry=56_623_104, n_layers=30, sidecar=3_519_000)
"""SmolLM2-135M: 30 layers of 3,540,096 parameters and a tied embedding of 49,152 x 576, with two bytes each."""


def hello(**fields: Any) -> ActionFacts:
    return replace(ActionFacts(HELLO, "1", "python:3.11", 256 * MIB, 1, 8, 60.0), **fields)


def chat(**fields: Any) -> ActionFacts:
    return replace(ActionFacts(CHAT, "1", "llm:vllm", 1024 * MIB, 8, 8, 60.0, model_uri="s3://m"), **fields)


def forced(n: int, **fields: Any) -> ActionFacts:
    """The function of a model that always starts as a group of ``n`` stages."""
    return chat(forced_stages=n, max_stages=8, **fields)


def report(host: str = "h0", memory_mb: int = 4096, used_mb: int = 0, **fields: Any) -> HostReport:
    """A host's report.  The host declares the rate of its link."""
    devices = (Device("cpu", "cpu", memory_mb * MIB, (memory_mb - used_mb) * MIB),)
    plain = HostReport(HostId(host), "boot", "a:1", devices, 2, 1e9, "none", "process", 0, 1_000)
    link = fields.get("network_bytes_per_s", plain.network_bytes_per_s)
    return replace(plain, **{"declared_bytes_per_s": link, **fields})


def pool(n_slabs: int, taken: int = 0, seen_ms: int = 1_000, *, slab_mb: int = 64, **fields: Any) -> PoolReport:
    """A pool in which ``taken`` slabs hold something that belongs to no instance of the test."""
    segments = (HeldSegment("other", taken, True),) if taken else ()
    return replace(PoolReport(slab_mb * MIB, n_slabs, seen_ms, segments), **fields)


def pool_after(start: StartGroup, n_slabs: int, held: int, seen_ms: int, *, stage: int = 0) -> PoolReport:
    """The pool of a stage's host once the stage has its part, which takes ``held`` slabs."""
    instance_id = start.stages[stage].instance_id
    return pool(n_slabs, 0, seen_ms, held=(HeldSegment("its", held, True, (instance_id,)),), users=(instance_id,))


class World:
    """A view with a clock.  It keeps every timer that the policy requested."""

    def __init__(self, *hosts: HostReport, ids: str = "id", **settings_: Any) -> None:
        n = itertools.count()
        self.view = ClusterView(7, SchedulerSettings("redis://", **settings_), lambda: f"{ids}{next(n)}", History())
        self.now = 100.0
        self.timers: list[Wake] = []
        self._asked = itertools.count()
        self.answers_looks = (
            True  # no model changes: a look whether known facts hold is answered at once, and not returned
        )
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
        activation = ActivationId(f"a{next(self._asked)}")
        return DemandAdded(activation, action, Namespace("guest"), GatewayId(gateway), 0)

    def said(self, start: StartGroup, state: InstanceState, stage: int = 0, **fields: Any) -> list[Decision]:
        return self.do(InstanceChanged(record_of(start, state, stage, **fields)))

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


def started(w: World) -> StartGroup:
    """The one start that a request for the function of a model leads to."""
    (start,) = of(w.ask(CHAT), StartGroup)
    return start


def world(*hosts: HostReport, facts: ActionFacts | None = None, **settings_: Any) -> World:
    made = World(*(hosts or (report(),)), **settings_)
    made.do(ActionSeen(facts or hello()))
    return made


def llm_world(
    *hosts: HostReport, facts: ActionFacts | None = None, model: ModelFacts = FACTS, **settings_: Any
) -> World:
    made = world(*hosts, facts=facts or chat(), **settings_)
    made.do(ModelInspected("s3://m", HostId("h0"), model))
    return made


def group_world(n_hosts: int = 4, facts: ActionFacts | None = None, model: ModelFacts = SMOLLM2, **host: Any) -> World:
    """Hosts on links of 200 Mbit/s, and a relay."""
    hosts = [report(f"h{i}", **{"network_bytes_per_s": 25e6, **host}) for i in range(n_hosts)]
    return llm_world(*hosts, facts=facts, model=model, relay_url="redis://user:secret@relay:6379/0")


def rebuilt(**fields: Any) -> Rebuilt:
    plain: dict[str, Any] = {
        "wall_ms": 10_000,
        "hosts": (report(),),
        "instances": (),
        "demand": (),
        "plans": (),
        "models": (),
        "actions": (hello(),),
    }
    return Rebuilt(**{**plain, **fields})


def plan_of(group: str) -> Plan:
    (start,) = of(world().ask(), StartGroup)
    return replace(start.plan, group_id=GroupId(group))
