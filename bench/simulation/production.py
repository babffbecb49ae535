"""Thaw as it is today: ``gateway/scheduler/policy/decide.py`` itself, with the messages that hosts and gateways would
send.

The simulator takes the place of the gateway (queue, routes), the invokers (records, releases) and fetchd (a link that
keeps deadlines, models that stay resident in host memory), and carries out every decision.  Messages take no time.  A
reply is queued after the message that caused it, so ``decide`` is never called while it runs.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from bench.simulation.cluster import SimServer
from bench.simulation.constants import HEARTBEAT_S, HOP_S, KEEP_ALIVE_S, SLOTS, prefill_s
from bench.simulation.engine import Engine, Kind
from bench.simulation.heedless import HeedlessLedger
from bench.simulation.naming import action, activation, function_of, host, name, uri
from bench.simulation.serving import Endpoint
from bench.simulation.specs import Mechanism, Objectives, SystemSpec
from bench.simulation.starting import Bytes, Worker
from bench.simulation.switching import Stage, Switching
from bench.simulation.system import System, Unit, free_unit
from bench.simulation.workload import Request
from gateway.scheduler.ablations import Parts
from gateway.scheduler.decisions import (
    CancelGroup,
    ConsolidateInstance,
    Decision,
    DropDemand,
    FailDemand,
    InspectModelOn,
    LearnFrom,
    ReleaseInstance,
    StartGroup,
    Wake,
)
from gateway.scheduler.events import ActionSeen, Event, HostsSeen, Timer
from gateway.scheduler.placement.predict import f_factor
from gateway.scheduler.policy.decide import decide
from gateway.scheduler.settings import SchedulerSettings
from gateway.scheduler.view.cluster import ClusterView
from gateway.scheduler.view.history import History, Measured
from gateway.scheduler.view.waiting_line import Turn, Turns
from relay.protocol.messages import CommandRefused, DemandAdded, DemandRemoved, InstanceChanged, ModelInspected
from thaw import partition
from thaw.action import KIND_LLM
from thaw.errors import InstanceBusy
from thaw.host import Device, HostReport, Resident
from thaw.ids import ActionName, GatewayId, GroupId, InstanceId, Namespace
from thaw.instance import InstanceRecord, InstanceState, StartMode
from thaw.model import FileRange, ModelFacts, ModelParts
from thaw.plan import PlanStage, StageRole

_FILE = "model.safetensors"
_GATEWAY, _NAMESPACE = GatewayId("gateway"), Namespace("guest")


class Production(System):
    def __init__(self, engine: Engine, servers: Sequence[SimServer], spec: SystemSpec, objectives: Objectives) -> None:
        super().__init__(engine, servers, spec, objectives)
        settings = SchedulerSettings(
            "redis://simulated:0/0", discipline=spec.discipline, variant=spec.variant, relay_url="redis://simulated:0/1"
        )
        numbers = itertools.count(1)
        parts = Parts(overlap=spec.equation == 5, succession=spec.succession, consolidation=spec.consolidate)
        self.view = ClusterView(1, settings, lambda: f"{next(numbers):032x}", History(), parts)
        self.view.blocked = WatchedTurns(self._blocked)
        self._inbox: deque[Event] = deque()
        self._deciding = False
        self._instances: dict[str, Stage] = {}
        self._on_server: list[dict[str, None]] = [{} for _ in self.servers]
        self._heads: dict[int, str] = {}  # a unit's first worker → the instance that takes its requests
        self._by_group: dict[str, list[Stage]] = {}
        self._switching = Switching(self)
        self._stem_cells = [s.spec.n_gpus if spec.stem_cells else 0 for s in self.servers]  # one for each device
        self._requests: dict[str, Request] = {}  # the waiting requests
        self._reported: list[tuple[tuple[int, int, int], HostReport] | None] = [None] * len(self.servers)
        self._heartbeat()
        if not spec.admission:
            for at in self.view.hosts.values():
                at.ledger = HeedlessLedger(at.ledger.bytes_per_s, spec.discipline)

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
            case CancelGroup():
                for instance in list(self._by_group.get(decision.group_id, ())):
                    if instance.record.host_id == decision.host_id:
                        self._leave(instance)
            case ConsolidateInstance():
                self._switching.ask(self._instances.get(decision.instance_id), decision)
            case Wake():
                self.engine.at(decision.at_s, self.tell, Timer(decision.kind, decision.key))
            case LearnFrom():
                self._learn(decision)
            case InspectModelOn():
                facts = self._facts(decision.uri)
                self.tell(ModelInspected(decision.uri, decision.host_id, facts, command_id=decision.command_id))
            case FailDemand():
                for activation_id in decision.activation_ids:
                    self._fail(self._requests.pop(activation_id))
            case DropDemand():  # the request waited longer than its time limit, so its gateway has answered it
                self._fail(self._requests.pop(decision.activation_id))

    def _heartbeat(self) -> None:
        self.tell(HostsSeen(tuple(self._report(s) for s in self.servers)))
        self.engine.after(HEARTBEAT_S, self._heartbeat)

    def _report(self, server: SimServer) -> HostReport:
        """Return the last report again if nothing has changed, because a thousand hosts report every second."""
        now = server.n_changes, server.cache.n_changes, self._stem_cells[server.index]
        last = self._reported[server.index]
        if last is None or last[0] != now:
            last = self._reported[server.index] = now, self._look_at(server)
        return last[1]

    def _look_at(self, server: SimServer) -> HostReport:
        host_id = host(server)
        devices = tuple(Device(f"cuda:{i}", server.kind.name, d.memory, d.free) for i, d in enumerate(server.devices))
        kinds = (KIND_LLM,) if self._stem_cells[server.index] else ()
        mine = tuple(InstanceId(k) for k in self._on_server[server.index])
        now_ms, link = int(self.engine.now * 1000), server.spec.link
        return HostReport(
            host_id,
            "boot",
            "simulated:0",
            devices,
            16,
            link,
            "enforced",
            "process",
            0,
            now_ms,
            self._stem_cells[server.index],
            kinds,
            instances=mine,
            resident=tuple(Resident(uri(f), n) for f, n in server.cache.models()),
        )

    def _facts(self, of: str) -> ModelFacts:
        model = self.functions[int(of.rsplit("/", 1)[1])].model
        layer = model.n_bytes // 34
        return ModelFacts(
            of,
            model.n_bytes,
            model.n_bytes,
            32,
            (layer,) * 32,
            model.n_bytes - 32 * layer,
            "",
            of,
            False,
            {_FILE: model.n_bytes},
            parts=_parts(model.n_bytes),
        )

    def _learn(self, decision: LearnFrom) -> None:
        """Add to the history the facts that the trace of that start would have."""
        head = self._by_group[decision.group_id][0]
        worker, prewarmed = head.worker, decision.mode is StartMode.PREWARMED
        kind, model = worker.server.kind, head.unit.function.model
        there = max(worker.fetch_end_s, worker.runtime_end_s)
        tail = kind.tail + kind.tail_per_byte * worker.part if head.resident else max(0.0, worker.ready_s - there)
        self.view.history.update(
            decision.action,
            decision.device_kind,
            decision.mode,
            Measured(
                t_c=0.2 if prewarmed else kind.t_cc + kind.t_l,
                t_cc=0.2 if prewarmed else kind.t_cc,
                t_cu=kind.t_cu,
                t_l=0.0 if prewarmed else kind.t_l,
                t_p=prefill_s(model, 1024),
                t_d=model.t_d,
                t_n=HOP_S,
                t_tail=tail,
                copy=kind.pcie,
            ),
        )

    # the gateway's side --------------------------------------------------------------------------------------------

    def arrive(self, request: Request) -> None:
        self.engine.note(Kind.ARRIVAL, request.index, request.function)
        new = request.function not in self.functions
        function = self.function(request)
        if new:
            self.tell(ActionSeen(action(function, self.spec.max_stages, self.spec.forced_stages)))
        if (unit := free_unit(function)) is not None:
            self.submit(unit, request)
            self.say(unit)
            return
        request.cold = True
        function.queue.append(request)
        self._requests[activation(request)] = request
        self.tell(DemandAdded(activation(request), name(function), _NAMESPACE, _GATEWAY, int(self.engine.now * 1e3)))

    def dispatch(self, unit: Unit) -> None:
        function = unit.function
        while function.queue and unit.free:
            request = function.queue.popleft()
            del self._requests[activation(request)]
            self.submit(unit, request)
            self.tell(DemandRemoved(activation(request), name(function)))
        if not function.queue:
            function.blocked.forget()

    def _blocked(self, of: ActionName, is_blocked: bool) -> None:
        """Record that the scheduler found an action blocked, or no longer blocked."""
        blocked = self.functions[function_of(of)].blocked
        (blocked.begin if is_blocked else blocked.end)(self.engine.now)

    def _fail(self, request: Request) -> None:
        self.functions[request.function].queue.remove(request)
        self.engine.note(Kind.FAILED, request.index)
        request.end(self.engine.now, failed=True)
        self.n_ended += 1

    def completed(self, unit: Unit) -> None:
        self.n_ended += 1
        self.dispatch(unit)
        self.say(unit)

    def check_idle(self, unit: Unit) -> None:
        """Do nothing: here the scheduler decides when an idle unit is released."""

    # the invokers' side --------------------------------------------------------------------------------------------

    def _start(self, decision: StartGroup) -> None:
        plan, n = decision.plan, len(decision.plan.stages)
        function = self.functions[function_of(plan.action)]
        workers = [self._worker(plan.stages[s.stage]) for s in decision.stages]
        unit = self.begin(function, workers, 1, SLOTS * n)
        waiting = [n]
        for stage, worker in zip(decision.stages, workers, strict=True):
            self._start_stage(decision, stage.stage, stage.instance_id, Starting(unit, worker, waiting))

    def _worker(self, at: PlanStage) -> Worker:
        server = self.servers[int(at.host.removeprefix("host-"))]
        part = float(partition.size(at.first_ranges))
        return self.hold(
            server, int(at.device.removeprefix("cuda:")), at.reserve_bytes, part, full=at.role is StageRole.FULL
        )

    def _start_stage(self, decision: StartGroup, stage: int, instance_id: InstanceId, of: Starting) -> None:
        plan, at, server, function = decision.plan, decision.plan.stages[stage], of.worker.server, of.unit.function
        stem_cell = self._stem_cells[server.index] > 0
        resident = function.index in server.cache
        record = InstanceRecord(
            instance_id,
            at.host,
            plan.action,
            plan.action_version,
            plan.group_id,
            InstanceState.STARTING,
            "simulated:0",
            SLOTS * len(plan.stages) if stage == 0 else 0,
            at.reserve_bytes,
            at.device,
            StartMode.PREWARMED if stem_cell else StartMode.COLD,
            keep_alive_s=KEEP_ALIVE_S,
            stage=stage,
            n_stages=len(plan.stages),
        )
        later = 0.0 if resident else float(partition.size(at.later_ranges))
        whole_part = float(partition.size(at.first_ranges) + partition.size(at.later_ranges))
        instance = Stage(record, of.unit, of.worker, resident, later, whole_part - of.worker.part)
        self._instances[instance_id] = instance
        self._on_server[server.index][instance_id] = None
        self._by_group.setdefault(plan.group_id, []).append(instance)
        if stage == 0:
            self._heads[of.worker.index] = instance_id
        self.tell(InstanceChanged(record))
        if stem_cell:
            self._take_stem_cell(server)
        if resident:
            server.cache.use(function.index)
        deadline = math.inf if at.fetch_deadline_ms is None else self.engine.now + at.fetch_deadline_ms / 1000
        ready = partial(self._stage_ready, instance_id, of.waiting)
        self.start(of.worker, Bytes(0.0 if resident else of.worker.part, deadline), ready, stem_cell=stem_cell)

    def _take_stem_cell(self, server: SimServer) -> None:
        """Use a stem cell of the server, which begins to make another one at once."""
        self._stem_cells[server.index] -= 1
        self.engine.after(server.kind.t_cc + server.kind.t_l, self._stem_cell_made, server.index)

    def _stem_cell_made(self, server: int) -> None:
        self._stem_cells[server] += 1

    def _stage_ready(self, instance_id: str, waiting: list[int]) -> None:
        """Mark a stage as ready.  The group serves once its last stage is ready."""
        if (instance := self._instances.get(instance_id)) is None:
            return
        unit, worker = instance.unit, instance.worker
        worker.ready_s = self.engine.now
        waiting[0] -= 1
        if waiting[0] == 0:
            self._serve_group(unit, worker)
        if instance.record.stage != 0 or waiting[0] > 0:
            idle_ms = int(self.engine.now * 1000)
            instance.record = replace(instance.record, state=InstanceState.READY, idle_since_wall_ms=idle_ms)
            self.tell(InstanceChanged(instance.record))
            if instance_id not in self._instances:
                return  # it is whole and no request waits for it, so the policy has released it to make room
        if waiting[0] == 0:
            self.say(unit)
        if instance.later > 0:
            self.starter.fetch(worker, instance.later, partial(self._resident, instance))
        elif len(unit.workers) == 1:
            self._resident(instance)
        else:
            self._switching.arrived(instance)

    def _serve_group(self, unit: Unit, last: Worker) -> None:
        s, n_full = len(unit.workers), sum(w.full for w in unit.workers)
        link = min(w.server.spec.link for w in unit.workers)
        endpoint = Endpoint(
            self.engine,
            unit.function.model,
            unit.slots,
            s=s,
            factor=f_factor(s, n_full),
            hops=s,
            link=link,
            done=lambda _: self.completed(unit),
        )
        self.serve(unit, endpoint, last)

    def _resident(self, instance: Stage) -> None:
        instance.worker.server.cache.put(instance.unit.function.index, instance.unit.function.model.n_bytes)
        self._switching.arrived(instance)

    def stages(self, group_id: GroupId) -> Sequence[Stage]:
        return tuple(self._by_group.get(group_id, ()))

    def becomes_worker(self, instance: Stage, record: InstanceRecord) -> None:
        """The instance answers alone from now on, in its own group."""
        self._by_group[instance.record.group_id].remove(instance)
        self._by_group.setdefault(record.group_id, []).insert(0, instance)
        self._heads[instance.worker.index] = record.instance_id
        instance.record = record

    def say(self, unit: Unit) -> None:
        """Send the invoker's report, which follows every change of the number of requests in the unit."""
        instance = self._instances[self._heads[unit.workers[0].index]]
        inflight = unit.endpoint.inflight if unit.endpoint else 0
        idle_ms = None if inflight else int(self.engine.now * 1000)
        instance.record = replace(
            instance.record, state=InstanceState.READY, inflight=inflight, idle_since_wall_ms=idle_ms
        )
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
        mechanism = {"memory": Mechanism.EVICTION, "successor": Mechanism.SUCCESSION}.get(decision.reason)
        if mechanism is not None:
            self.used[mechanism] += 1
        self._leave(instance)

    def _leave(self, instance: Stage) -> None:
        """Remove an instance.  The stages of a group that ends leave one after another.

        Once the first of them has left, the group gets no more requests.
        """
        unit, record = instance.unit, instance.record
        if unit in unit.function.ready:
            self.engine.note(Kind.EXPIRY, unit.index)
            unit.function.ready.remove(unit)
        del self._instances[record.instance_id], self._on_server[instance.worker.server.index][record.instance_id]
        self._heads.pop(instance.worker.index, None)
        self._by_group[record.group_id].remove(instance)
        if not self._by_group[record.group_id]:
            del self._by_group[record.group_id]
        self.release([instance.worker])
        self.tell(InstanceChanged(replace(record, state=InstanceState.GONE)))


class WatchedTurns(Turns):
    """The queue of actions that wait for memory.  It calls ``tell`` when an action begins or stops waiting."""

    def __init__(self, tell: Callable[[ActionName, bool], None]) -> None:
        super().__init__()
        self._tell = tell

    def put(self, turn: Turn) -> None:
        super().put(turn)
        self._tell(turn.name, True)

    def drop(self, name: ActionName) -> None:
        super().drop(name)
        self._tell(name, False)


@dataclass(frozen=True, slots=True)
class Starting:
    """A stage's worker in its group.  ``waiting`` counts the stages that are not ready."""

    unit: Unit
    worker: Worker
    waiting: list[int]


def _parts(n_bytes: int) -> ModelParts:
    """32 layers and two ends, each about as large as a layer."""
    layer = n_bytes // 34
    first = (n_bytes - 32 * layer) // 2
    layers = tuple((FileRange(_FILE, first + i * layer, layer),) for i in range(32))
    end = first + 32 * layer
    return ModelParts((FileRange(_FILE, 0, first),), layers, (FileRange(_FILE, end, n_bytes - end),))
