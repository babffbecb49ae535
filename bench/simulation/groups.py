"""ParaServe: groups that the production Algorithm 1 and ledger place, and that are consolidated once they are ready.

The predictor's tail follows the last byte.  Algorithm 1 knows only a bandwidth, so a server offers the bandwidth
part / (part / b + tail).  Eq. 5 then gives max(runtime, fetch + tail), and the fetch is due earlier by the tail.
"""

from __future__ import annotations

import math
from functools import partial

from bench.simulation.cluster import SimServer
from bench.simulation.constants import A_TAIL_S, HOP_S, KV_RESERVE, SLOTS
from bench.simulation.serving import Endpoint
from bench.simulation.specs import Mechanism
from bench.simulation.starting import Bytes, Worker
from bench.simulation.system import Consolidation, Function, System, Unit
from gateway.scheduler.placement.predict import Times, f_factor
from gateway.scheduler.placement.schemes import Request as Wanted
from gateway.scheduler.placement.schemes import Scheme, Server
from gateway.scheduler.placement.select import select
from gateway.scheduler.placement.window import keep


class Groups(System):
    _most_free: int | None = None  # bytes on the emptiest device, until some device changes

    def place(self, function: Function, n_workers: int) -> bool:
        if not self._room(function):
            return False
        if n_workers == 1 and self.spec.cache and self._place_cached(function):
            return True
        if self.spec.max_stages == 1:
            return all(self._place_group(function, 1) for _ in range(n_workers))
        return self._place_group(function, n_workers)

    def _place_cached(self, function: Function) -> bool:
        """Place the worker on a server that has the model in its cache.  In A, such a hit bypasses Algorithm 1."""
        need = function.model.n_bytes + KV_RESERVE
        for server in self.servers:
            device = server.best_fit(need) if function.index in server.cache else None
            if device is not None:
                server.cache.use(function.index)
                worker = self.hold(server, device, need, function.model.n_bytes)
                unit = self.begin(function, [worker], 1, SLOTS)
                ready = partial(self._ready, unit, worker, [1])
                self.start(worker, Bytes(0.0), ready)
                return True
        return False

    def _place_group(self, function: Function, n_workers: int) -> bool:
        if not self._room(function):
            return False
        scheme = self._select(function, n_workers)
        if scheme is None and n_workers > 1:  # too few servers for one group: start the workers one by one instead
            return all(self._place_group(function, 1) for _ in range(n_workers))
        if scheme is None:
            return False
        self._start(function, scheme, n_workers)
        return True

    def _room(self, function: Function) -> bool:
        """Return whether any device has room for a full worker.

        Every scheme has a full worker, also the fallback.  Without room for one, Algorithm 1 finds nothing.
        """
        if self._most_free is None:
            self._most_free = max(gpu.free for server in self.servers for gpu in server.offer())
        return self._most_free >= function.model.n_bytes + KV_RESERVE

    def memory_changed(self) -> None:
        self._most_free = None

    # Algorithm 1 ---------------------------------------------------------------------------------------------------

    def _select(self, function: Function, n_workers: int) -> Scheme | None:
        now, spec, model = self.engine.now, self.spec, function.model
        waited = now - function.queue[0].arrival_s if function.queue else 0.0
        wanted = Wanted(
            model.n_bytes,
            KV_RESERVE,
            function.slo_ttft,
            function.slo_tpot,
            waited,
            self._times(function, self.servers[0]),
            overlap=spec.equation == 5,
        )
        offers = [Server(s.index, s.spec.link, s.kind.pcie, s.offer(), self._times(function, s)) for s in self.servers]

        def bandwidth(server: Server, n_bytes: float, within_s: float) -> float:
            b = self.servers[server.id].ledger.bandwidth(n_bytes, now + within_s - A_TAIL_S, now)
            return n_bytes / (n_bytes / b + A_TAIL_S) if b > 0 else 0.0

        least = min(max(n_workers, spec.min_stages), spec.max_stages)
        return select(
            offers,
            wanted,
            variant=spec.variant,
            min_stages=least,
            max_stages=spec.max_stages,
            min_full=max(1, n_workers),
            bandwidth=bandwidth,
        )

    def _times(self, function: Function, server: SimServer) -> Times:
        kind, model = server.kind, function.model
        return Times(kind.t_cc + kind.t_l, kind.t_cc, kind.t_cu, kind.t_l, model.t_p, model.t_d, HOP_S)

    # a group's life ------------------------------------------------------------------------------------------------

    def _start(self, function: Function, scheme: Scheme, n_workers: int) -> None:
        need, part, now = function.model.n_bytes + KV_RESERVE, function.model.n_bytes / scheme.s, self.engine.now
        low = math.ceil(need / scheme.s)
        workers = [self.hold(self.servers[p.server], p.gpu, need, part) for p in scheme.full]
        workers += [self.hold(self.servers[p.server], p.gpu, low, part, full=False) for p in scheme.low]
        unit = self.begin(function, workers, n_workers, SLOTS * scheme.s)
        waiting = [scheme.s]
        for worker in workers:
            deadline = now + scheme.fetch_within_s - A_TAIL_S
            worker.server.ledger.add(str(worker.index), part, deadline, now)
            ready = partial(self._worker_ready, unit, worker, waiting)
            self.start(worker, Bytes(part, deadline), ready)

    def _worker_ready(self, unit: Unit, worker: Worker, waiting: list[int]) -> None:
        worker.server.ledger.remove(str(worker.index), self.engine.now)
        self._ready(unit, worker, waiting)
        self.retry_blocked()

    def _ready(self, unit: Unit, worker: Worker, waiting: list[int]) -> None:
        waiting[0] -= 1
        if waiting[0] > 0:
            return
        s, n_full = len(unit.workers), sum(w.full for w in unit.workers)
        link = min(w.server.spec.link for w in unit.workers)
        endpoint = Endpoint(
            self.engine,
            unit.function.model,
            SLOTS * s,
            s=s,
            factor=f_factor(s, n_full),
            hops=s,
            link=link,
            done=lambda _: self.completed(unit),
        )
        self.serve(unit, endpoint, worker)
        if s == 1:
            unit.workers[0].server.cache.put(unit.function.index, unit.function.model.n_bytes)
        elif self.spec.consolidate and unit.endpoint is not None:
            self._consolidate(unit)

    def _consolidate(self, unit: Unit) -> None:
        """Let the kept workers fetch the rest of the model in the background."""
        function, endpoint = unit.function, unit.endpoint
        inflight = endpoint.inflight if endpoint else 0
        others = sum(u.free for u in function.ready if u is not unit)
        n_full = sum(w.full for w in unit.workers)
        n_kept = keep(inflight, len(function.queue), function.window.count(self.engine.now), others, SLOTS, n_full)
        kept, missing = unit.workers[:n_kept], function.model.n_bytes * (1 - 1 / len(unit.workers))
        unit.consolidating = True
        for worker in kept:
            worker.server.ledger.add(f"{worker.index}b", missing, math.inf, self.engine.now)
            self.starter.fetch(worker, missing, partial(self._whole, unit, worker, kept))

    def _whole(self, unit: Unit, worker: Worker, kept: list[Worker]) -> None:
        """A kept worker has the whole model.  The first one takes over the group's runs; a later one serves alone."""
        worker.server.ledger.remove(f"{worker.index}b", self.engine.now)
        worker.server.cache.put(unit.function.index, unit.function.model.n_bytes)
        if unit.consolidating:
            unit.consolidating = False
            self._take_over(unit, worker, kept)
        else:
            self._alone(unit, worker)
        self.retry_blocked()

    def _take_over(self, unit: Unit, worker: Worker, kept: list[Worker]) -> None:
        s, endpoint = len(unit.workers), unit.endpoint
        if endpoint is None or unit not in unit.function.ready:
            return
        self.release([w for w in unit.workers if w not in kept])
        for other in kept:
            if other is not worker:
                unit.function.starting.append(self._promise(unit, other))
        unit.workers = [worker]
        moved = endpoint.context * unit.function.model.kv_bytes * (s - 1) / s
        endpoint.reshape(s=1, factor=1.0, hops=1, slots=SLOTS)
        stall_s = moved / worker.server.spec.link
        endpoint.stall(stall_s)
        self.used[Mechanism.CONSOLIDATION] += 1
        self.consolidations.append(Consolidation(self.engine.now, stall_s))

    def _promise(self, unit: Unit, worker: Worker) -> Unit:
        """A unit for a kept worker that is still fetching: the unit counts as a start."""
        return Unit(unit.index, unit.function, [worker], 1, SLOTS, self.engine.now)

    def _alone(self, unit: Unit, worker: Worker) -> None:
        mine = next((u for u in unit.function.starting if u.workers == [worker]), None)
        if mine is not None:
            endpoint = Endpoint(self.engine, unit.function.model, SLOTS, hops=1, done=lambda _: self.completed(mine))
            self.serve(mine, endpoint, worker)
