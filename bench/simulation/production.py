"""Thaw as it is today: ``gateway/scheduler/policy.decide`` itself, fed with what hosts and gateways would say.

The simulator plays the gateway (queue, routes), the invokers (records, releases) and fetchd (a link that keeps
deadlines, models that stay resident in host memory), and carries out whatever is decided.  Messages take no time; a
reply is put behind the message that caused it, so ``decide`` is never entered twice.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from bench.simulation.cluster import SimServer
from bench.simulation.constants import HEARTBEAT_S, HOP_S, KEEP_ALIVE_S, SLOTS, prefill_s
from bench.simulation.engine import Engine, Kind
from bench.simulation.naming import action, activation, function_of, host, name
from bench.simulation.serving import Endpoint
from bench.simulation.specs import Objectives, SystemSpec
from bench.simulation.system import System, Unit, free_unit
from bench.simulation.workload import Request
from gateway.scheduler.decisions import (
    Decision,
    FailDemand,
    InspectModelOn,
    LearnFrom,
    ReleaseInstance,
    StartGroup,
    Wake,
)
from gateway.scheduler.events import ActionSeen, Event, HostsSeen, Timer
from gateway.scheduler.history import History, Measured
from gateway.scheduler.policy import decide
from gateway.scheduler.settings import SchedulerSettings
from gateway.scheduler.view import ClusterView
from relay.messages import CommandRefused, DemandAdded, DemandRemoved, InstanceChanged, ModelInspected
from thaw.action import KIND_LLM
from thaw.errors import InstanceBusy
from thaw.host import Device, HostReport
from thaw.ids import GatewayId, InstanceId, Namespace
from thaw.instance import InstanceRecord, InstanceState, StartMode
from thaw.model import ModelFacts

_GATEWAY, _NAMESPACE = GatewayId("gateway"), Namespace("guest")


@dataclass(slots=True)
class Instance:
    record: InstanceRecord
    unit: Unit
    resident: bool


class Production(System):
    def __init__(self, engine: Engine, servers: Sequence[SimServer], spec: SystemSpec, objectives: Objectives) -> None:
        super().__init__(engine, servers, spec, objectives)
        settings = SchedulerSettings("redis://simulated:0/0", discipline=spec.discipline, variant=spec.variant)
        numbers = itertools.count(1)
        self.view = ClusterView(1, settings, lambda: f"{next(numbers):032x}", History())
        self._inbox: deque[Event] = deque()
        self._deciding = False
        self._instances: dict[str, Instance] = {}
        self._ids: dict[int, str] = {}  # of units
        self._by_group: dict[str, Instance] = {}
        self._stem_cells = [s.spec.n_gpus for s in self.servers]  # one waits for each device
        self._requests: dict[str, Request] = {}
        self._heartbeat()

    # the scheduler's side ------------------------------------------------------------------------------------------

    def tell(self, event: Event) -> None:
        self._inbox.append(event)
        if self._deciding:
            return
        self._deciding = True
        while self._inbox:
            for decision in decide(self.view, self._inbox.popleft(), self.engine.now):
                self._carry_out(decision)
        self._deciding = False

    def _carry_out(self, decision: Decision) -> None:
        match decision:
            case StartGroup():
                self._start(decision)
            case ReleaseInstance():
                self._release(decision)
            case Wake():
                self.engine.at(decision.at_s, self.tell, Timer(decision.kind, decision.key))
            case LearnFrom():
                self._learn(decision)
            case InspectModelOn():
                self.tell(ModelInspected(decision.uri, decision.host_id, self._facts(decision.uri)))
            case FailDemand():
                for activation_id in decision.activation_ids:
                    self._fail(self._requests[activation_id])

    def _heartbeat(self) -> None:
        self.tell(HostsSeen(tuple(self._report(s) for s in self.servers)))
        self.engine.after(HEARTBEAT_S, self._heartbeat)

    def _report(self, server: SimServer) -> HostReport:
        host_id = host(server)
        devices = tuple(Device(f"cuda:{i}", server.kind.name, d.memory, d.free) for i, d in enumerate(server.devices))
        kinds = (KIND_LLM,) if self._stem_cells[server.index] else ()
        mine = tuple(InstanceId(k) for k, v in self._instances.items() if v.record.host_id == host_id)
        now_ms = int(self.engine.now * 1000)
        return HostReport(host_id, "boot", "simulated:0", devices, 16, server.spec.link, "none", "process", 0, now_ms,
                          self._stem_cells[server.index], kinds, 0, False, mine)  # fmt: skip

    def _facts(self, uri: str) -> ModelFacts:
        model = self.functions[int(uri.rsplit("/", 1)[1])].model
        layer = model.n_bytes // 32
        return ModelFacts(uri, model.n_bytes, model.n_bytes, 32, (layer,) * 32, 0, "", uri, False,
                          {"model.safetensors": model.n_bytes})  # fmt: skip

    def _learn(self, decision: LearnFrom) -> None:
        """What the trace of that start would have said."""
        instance = self._by_group[decision.group_id]
        worker, prewarmed = instance.unit.workers[0], decision.mode is StartMode.PREWARMED
        kind, model = worker.server.kind, instance.unit.function.model
        took = worker.fetch_end_s - instance.unit.started_s
        there = max(worker.fetch_end_s, worker.runtime_end_s)
        self.view.history.update(decision.action, decision.device_kind, decision.mode, Measured(
            t_cc=0.2 if prewarmed else kind.t_cc, t_cu=kind.t_cu, t_l=0.0 if prewarmed else kind.t_l,
            t_p=prefill_s(model, 1024), t_d=model.t_d, t_n=HOP_S, t_tail=self.engine.now - there,
            bandwidth=None if instance.resident or took <= 0 else model.n_bytes / took))  # fmt: skip

    # the gateway's side --------------------------------------------------------------------------------------------

    def arrive(self, request: Request) -> None:
        self.engine.note(Kind.ARRIVAL, request.index, request.function)
        new = request.function not in self.functions
        function = self.function(request)
        if new:
            self.tell(ActionSeen(action(function)))
        if (unit := free_unit(function)) is not None and unit.endpoint is not None:
            unit.endpoint.submit(request)
            self._say(unit)
            return
        request.cold = True
        function.queue.append(request)
        self._requests[activation(request)] = request
        self.tell(DemandAdded(activation(request), name(function), _NAMESPACE, _GATEWAY, int(self.engine.now * 1e3)))

    def dispatch(self, unit: Unit) -> None:
        function, endpoint = unit.function, unit.endpoint
        while endpoint is not None and function.queue and endpoint.free:
            request = function.queue.popleft()
            endpoint.submit(request)
            self.tell(DemandRemoved(activation(request), name(function)))

    def _fail(self, request: Request) -> None:
        self.functions[request.function].queue.remove(request)
        self.engine.note(Kind.FAILED, request.index)
        request.end(self.engine.now, failed=True)
        self.n_ended += 1

    def completed(self, unit: Unit) -> None:
        self.n_ended += 1
        self.dispatch(unit)
        self._say(unit)

    def check_idle(self, unit: Unit) -> None:
        """The scheduler's business here."""

    # the invokers' side --------------------------------------------------------------------------------------------

    def _start(self, decision: StartGroup) -> None:
        plan, stage, at = decision.plan, decision.stages[0], decision.plan.stages[0]
        function = self.functions[function_of(plan)]
        server = self.servers[int(stage.host_id.removeprefix("host-"))]
        stem_cell = self._stem_cells[server.index] > 0
        device, part = int(at.device.removeprefix("cuda:")), float(function.model.n_bytes)
        worker = self.hold(server, device, at.reserve_bytes, part)
        unit = self.begin(function, [worker], 1, SLOTS)
        resident = function.index in server.cache
        record = InstanceRecord(
            stage.instance_id, stage.host_id, plan.action, plan.action_version, plan.group_id, InstanceState.STARTING,
            "simulated:0", SLOTS, at.reserve_bytes, at.device, StartMode.PREWARMED if stem_cell else StartMode.COLD,
            keep_alive_s=KEEP_ALIVE_S,
        )  # fmt: skip
        self._instances[stage.instance_id] = self._by_group[plan.group_id] = Instance(record, unit, resident)
        self._ids[unit.index] = stage.instance_id
        self.tell(InstanceChanged(record))
        if stem_cell:
            self._take_stem_cell(server)
        if resident:
            server.cache.use(function.index)
        deadline = math.inf if at.fetch_deadline_ms is None else self.engine.now + at.fetch_deadline_ms / 1000
        ready = partial(self._ready, stage.instance_id)
        self.starter.overlapped(worker, 0.0 if resident else part, deadline, stem_cell, ready)

    def _take_stem_cell(self, server: SimServer) -> None:
        """Another one is made as soon as this one is used."""
        self._stem_cells[server.index] -= 1
        self.engine.after(server.kind.t_cc + server.kind.t_l, self._stem_cell_made, server.index)

    def _stem_cell_made(self, server: int) -> None:
        self._stem_cells[server] += 1

    def _ready(self, instance_id: str) -> None:
        instance = self._instances[instance_id]
        unit = instance.unit
        unit.workers[0].server.cache.put(unit.function.index, unit.function.model.n_bytes)
        endpoint = Endpoint(self.engine, unit.function.model, SLOTS, hops=1, done=lambda _: self.completed(unit))
        self.serve(unit, endpoint)
        self._say(unit)

    def _say(self, unit: Unit) -> None:
        """Its invoker's word, whenever the number of requests in it has changed."""
        instance = self._instances[self._ids[unit.index]]
        inflight = unit.endpoint.inflight if unit.endpoint else 0
        idle_ms = None if inflight else int(self.engine.now * 1000)
        instance.record = replace(instance.record, state=InstanceState.READY, inflight=inflight,
                                  idle_since_wall_ms=idle_ms)  # fmt: skip
        self.tell(InstanceChanged(instance.record))

    def _release(self, decision: ReleaseInstance) -> None:
        instance = self._instances.get(decision.instance_id)
        if instance is None:
            return
        record, unit = instance.record, instance.unit
        if decision.only_idle and unit.endpoint is not None and unit.endpoint.inflight:
            error = InstanceBusy("it has requests").info()
            self.tell(CommandRefused(decision.command_id, decision.host_id, record.group_id, error))
            return
        self.engine.note(Kind.EXPIRY, unit.index)
        del self._instances[decision.instance_id], self._by_group[record.group_id]
        unit.function.ready.remove(unit)
        self.release(unit.workers)
        self.tell(InstanceChanged(replace(record, state=InstanceState.GONE)))
