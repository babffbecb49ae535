"""The part that all simulated platforms share: queue requests, route them to the first free slot, scale by the window,
and expire idle units.

A subclass places and starts the workers (``place``).  The scaling window and the number of workers come from the
production functions.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from bench.simulation.cluster import SimServer
from bench.simulation.constants import KEEP_ALIVE_S, MODELS, SCALING_WINDOW_S, SLOTS, Model
from bench.simulation.engine import Engine, Kind
from bench.simulation.serving import Endpoint
from bench.simulation.specs import Mechanism, Objectives, SystemSpec
from bench.simulation.starting import Bytes, Starter, Worker
from bench.simulation.waits import Blocked, Span, until_submitted
from bench.simulation.workload import Request
from gateway.scheduler.placement.window import Window, groups, new_workers


@dataclass(slots=True)
class Unit:
    """Workers that answer together, from the decision to start them until they are released."""

    index: int
    function: Function
    workers: list[Worker]
    n_wanted: int  # this many of the group's workers are wanted if the load stays the same
    slots: int
    started_s: float
    endpoint: Endpoint | None = None
    idle_check_s: float = -1.0
    consolidating: bool = False
    ready_s: float = math.inf
    chain: Sequence[Span] = ()  # the chain of the worker that was ready last

    @property
    def free(self) -> int:
        return 0 if self.endpoint is None else self.endpoint.free


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
    blocked: Blocked = field(default_factory=Blocked)


@dataclass(frozen=True, slots=True)
class Consolidation:
    """The event that a group became one worker while it served."""

    at_s: float
    stall_s: float  # for this time the unit made no token


class System:
    def __init__(self, engine: Engine, servers: Sequence[SimServer], spec: SystemSpec, objectives: Objectives) -> None:
        self.engine, self.servers, self.spec, self.objectives = engine, list(servers), spec, objectives
        self.starter = Starter(engine)
        self.functions: dict[int, Function] = {}
        self.blocked: dict[int, None] = {}
        self.n_starts = 0
        self.n_ended = 0
        self.used = Counter[Mechanism]()
        self.consolidations: list[Consolidation] = []
        self._n_workers = 0

    # decisions of the subclasses -----------------------------------------------------------------------------------

    def place(self, function: Function, n_workers: int) -> bool:
        """Begin to start one group of this many workers.  Return False if there is no room now."""
        raise NotImplementedError

    # requests ------------------------------------------------------------------------------------------------------

    def function(self, request: Request) -> Function:
        known = self.functions.get(request.function)
        if known is None:
            slo = self.objectives
            known = self.functions[request.function] = Function(
                request.function,
                MODELS[request.model],
                slo.ttft(request.app, request.model),
                slo.tpot(request.app, request.model),
            )
        return known

    def arrive(self, request: Request) -> None:
        self.engine.note(Kind.ARRIVAL, request.index, request.function)
        function = self.function(request)
        function.window.add(self.engine.now)
        if (unit := free_unit(function)) is not None:
            self.submit(unit, request)
            return
        request.cold = True
        function.queue.append(request)
        if not function.scaling:  # requests that arrive at the same instant are handled together
            function.scaling = True
            self.engine.after(0.0, self._scale_once, function)

    def _scale_once(self, function: Function) -> None:
        function.scaling = False
        self.scale(function)

    def submit(self, unit: Unit, request: Request) -> None:
        """Raises ValueError for a unit that is not ready."""
        if unit.endpoint is None:
            raise ValueError(f"unit {unit.index} is not ready")
        if self.engine.now > request.arrival_s:
            blocked = unit.function.blocked
            request.waits = until_submitted(request.arrival_s, unit.chain, unit.ready_s, blocked, self.engine.now)
        unit.endpoint.submit(request)

    def scale(self, function: Function) -> None:
        if not function.queue:
            self._unblock(function)
            return
        supply = 0  # functions that wait for memory are scaled often, and they nearly always have no supply
        if function.starting:
            supply += sum(u.slots for u in function.starting)
        if function.ready:
            supply += sum(u.free for u in function.ready)
        n_new = new_workers(len(function.queue), function.window.count(self.engine.now), supply, SLOTS)
        for n in groups(n_new, self.spec.largest_group):
            if not self.place(function, n):
                if function.index not in self.blocked:
                    self.blocked[function.index] = None
                    function.blocked.begin(self.engine.now)
                return
        self._unblock(function)

    def _unblock(self, function: Function) -> None:
        if function.index in self.blocked:
            del self.blocked[function.index]
            function.blocked.end(self.engine.now)
        if not function.queue:
            function.blocked.forget()

    def retry_blocked(self) -> None:
        """Scale the blocked functions again, because memory or a link was freed.  The longest waiting one is first."""
        for index in list(self.blocked):
            self.scale(self.functions[index])

    # units ---------------------------------------------------------------------------------------------------------

    def hold(self, server: SimServer, device: int, reserve: int, part: float, *, full: bool = True) -> Worker:
        self._n_workers += 1
        self.memory_changed()
        self.used[Mechanism.SHARED_DEVICE] += server.devices[device].n_workers > 0
        server.hold(device, reserve, self.engine.now)
        self.engine.note(Kind.PLACED, self._n_workers, server.index * 64 + device)
        return Worker(self._n_workers, server, device, reserve, part, full)

    def begin(self, function: Function, workers: list[Worker], n_wanted: int, slots: int) -> Unit:
        self.n_starts += 1
        unit = Unit(self.n_starts, function, workers, n_wanted, slots, self.engine.now)
        function.starting.append(unit)
        self.used[Mechanism.GROUPS] += len(workers) > 1
        return unit

    def start(self, worker: Worker, wanted: Bytes, ready: Callable[[], None], *, stem_cell: bool = False) -> None:
        self.used[Mechanism.STEM_CELLS] += stem_cell
        self.used[Mechanism.RETAINED] += wanted.n_bytes <= 0
        self.starter.start(self.spec.phases, worker, wanted, ready, stem_cell=stem_cell)

    def serve(self, unit: Unit, endpoint: Endpoint, last: Worker) -> None:
        """Mark the unit as ready, ``last`` being the worker that was ready last.  Waiting requests are served first."""
        self.used[Mechanism.OVERLAP] += any(w.fetch_begin_s < w.runtime_end_s for w in unit.workers)
        unit.endpoint, unit.ready_s, unit.chain = endpoint, self.engine.now, last.chain
        unit.function.starting.remove(unit)
        unit.function.ready.append(unit)
        self.dispatch(unit)
        self.check_idle(unit)

    def dispatch(self, unit: Unit) -> None:
        function = unit.function
        while function.queue and unit.free:
            self.submit(unit, function.queue.popleft())
        if not function.queue:
            self._unblock(function)

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
        """A hook for subclasses: the free memory of some device has changed."""


def free_unit(function: Function) -> Unit | None:
    return next((u for u in function.ready if u.free), None)
