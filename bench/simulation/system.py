"""What every simulated platform does: queue, route to the first free slot, scale by the window, expire what is idle.

How workers are placed and started is the subclass's (``place``).  The scaling window and the number of workers are
the production functions.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from bench.simulation.cluster import SimServer
from bench.simulation.constants import KEEP_ALIVE_S, MODELS, SCALING_WINDOW_S, SLOTS, Model
from bench.simulation.engine import Engine, Kind
from bench.simulation.serving import Endpoint
from bench.simulation.specs import Objectives, SystemSpec
from bench.simulation.starting import Starter, Worker
from bench.simulation.workload import Request
from gateway.scheduler.scaling import Window, groups, new_workers


@dataclass(slots=True)
class Unit:
    """Workers that answer together, from their decision until they are let go."""

    index: int
    function: Function
    workers: list[Worker]
    n_wanted: int  # of the group: this many are to stay if the load does
    slots: int
    started_s: float
    endpoint: Endpoint | None = None
    idle_check_s: float = -1.0
    consolidating: bool = False


@dataclass(slots=True)
class Function:
    index: int
    model: Model
    slo_ttft: float
    slo_tpot: float
    scaling: bool = False
    queue: deque[Request] = field(default_factory=deque)
    ready: list[Unit] = field(default_factory=list)
    starting: list[Unit] = field(default_factory=list)
    window: Window = field(default_factory=lambda: Window(SCALING_WINDOW_S))


class System:
    def __init__(self, engine: Engine, servers: Sequence[SimServer], spec: SystemSpec, objectives: Objectives) -> None:
        self.engine, self.servers, self.spec, self.objectives = engine, list(servers), spec, objectives
        self.starter = Starter(engine)
        self.functions: dict[int, Function] = {}
        self.blocked: dict[int, None] = {}
        self.n_starts = 0
        self.n_ended = 0
        self._n_workers = 0

    # what subclasses decide ----------------------------------------------------------------------------------------

    def place(self, function: Function, n_workers: int) -> bool:
        """Begin to start one group of this many workers; False: no room now."""
        raise NotImplementedError

    # requests ------------------------------------------------------------------------------------------------------

    def function(self, request: Request) -> Function:
        known = self.functions.get(request.function)
        if known is None:
            slo = self.objectives
            known = self.functions[request.function] = Function(
                request.function, MODELS[request.model], slo.ttft(request.app, request.model),
                slo.tpot(request.app, request.model),
            )  # fmt: skip
        return known

    def arrive(self, request: Request) -> None:
        self.engine.note(Kind.ARRIVAL, request.index, request.function)
        function = self.function(request)
        function.window.add(self.engine.now)
        if (unit := free_unit(function)) is not None and unit.endpoint is not None:
            unit.endpoint.submit(request)
            return
        request.cold = True
        function.queue.append(request)
        if not function.scaling:  # what arrives at the same instant is looked at together
            function.scaling = True
            self.engine.after(0.0, self._scale_once, function)

    def _scale_once(self, function: Function) -> None:
        function.scaling = False
        self.scale(function)

    def scale(self, function: Function) -> None:
        if not function.queue:
            self.blocked.pop(function.index, None)
            return
        supply = sum(u.slots for u in function.starting)
        supply += sum(u.endpoint.free for u in function.ready if u.endpoint)
        n_new = new_workers(len(function.queue), function.window.count(self.engine.now), supply, SLOTS)
        for n in groups(n_new, self.spec.largest_group):
            if not self.place(function, n):
                self.blocked[function.index] = None
                return
        self.blocked.pop(function.index, None)

    def retry_blocked(self) -> None:
        """Memory or a link was freed.  Who waits longest is asked first."""
        for index in list(self.blocked):
            self.scale(self.functions[index])

    # units ---------------------------------------------------------------------------------------------------------

    def hold(self, server: SimServer, device: int, reserve: int, part: float, *, full: bool = True) -> Worker:
        self._n_workers += 1
        self.memory_changed()
        server.hold(device, reserve, self.engine.now)
        self.engine.note(Kind.PLACED, self._n_workers, server.index * 64 + device)
        return Worker(self._n_workers, server, device, reserve, part, full)

    def begin(self, function: Function, workers: list[Worker], n_wanted: int, slots: int) -> Unit:
        self.n_starts += 1
        unit = Unit(self.n_starts, function, workers, n_wanted, slots, self.engine.now)
        function.starting.append(unit)
        return unit

    def serve(self, unit: Unit, endpoint: Endpoint) -> None:
        """It is ready: who waits goes first."""
        unit.endpoint = endpoint
        unit.function.starting.remove(unit)
        unit.function.ready.append(unit)
        self.dispatch(unit)
        self.check_idle(unit)

    def dispatch(self, unit: Unit) -> None:
        function, endpoint = unit.function, unit.endpoint
        while endpoint is not None and function.queue and endpoint.free:
            endpoint.submit(function.queue.popleft())
        if not function.queue:
            self.blocked.pop(function.index, None)

    def completed(self, unit: Unit) -> None:
        self.n_ended += 1
        self.dispatch(unit)
        self.check_idle(unit)

    def check_idle(self, unit: Unit) -> None:
        if unit.endpoint is not None and unit.endpoint.inflight == 0:
            unit.endpoint.idle_since = self.engine.now
            if unit.idle_check_s <= self.engine.now:
                unit.idle_check_s = self.engine.now + KEEP_ALIVE_S
                self.engine.at(unit.idle_check_s, self._expire, unit)

    def _expire(self, unit: Unit) -> None:
        endpoint = unit.endpoint
        if endpoint is None or unit not in unit.function.ready or endpoint.inflight:
            unit.idle_check_s = -1.0
            return
        due = endpoint.idle_since + KEEP_ALIVE_S
        if self.engine.now < due:
            unit.idle_check_s = due
            self.engine.at(due, self._expire, unit)
            return
        self.engine.note(Kind.EXPIRY, unit.index)
        self.drop(unit)

    def drop(self, unit: Unit) -> None:
        unit.function.ready.remove(unit)
        self.release(unit.workers)
        self.retry_blocked()

    def release(self, workers: Sequence[Worker]) -> None:
        for worker in workers:
            if worker.transfer is not None:
                worker.server.link.cancel(worker.transfer)
                worker.transfer = None
            for key in (str(worker.index), f"{worker.index}b"):
                worker.server.ledger.remove(key, self.engine.now)
            worker.server.let_go(worker.device, worker.reserve, self.engine.now)
        self.memory_changed()

    def memory_changed(self) -> None:
        """Of some device."""


def free_unit(function: Function) -> Unit | None:
    return next((u for u in function.ready if u.endpoint is not None and u.endpoint.free), None)
