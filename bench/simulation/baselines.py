"""Serverless vLLM (first fit, one phase after another) and ServerlessLLM (its start-up time estimator)."""

from __future__ import annotations

from functools import partial

from bench.simulation.cluster import SimServer
from bench.simulation.constants import KV_RESERVE, SLOTS
from bench.simulation.serving import Endpoint
from bench.simulation.starting import Bytes
from bench.simulation.system import Function, System, Unit
from gateway.scheduler.placement.predict import Tier
from gateway.scheduler.placement.serverlessllm import LoadServer, choose


class ServerlessVllm(System):
    def place(self, function: Function, n_workers: int) -> bool:
        return all(self._place_one(function) for _ in range(n_workers))

    def _place_one(self, function: Function) -> bool:
        need = function.model.n_bytes + KV_RESERVE
        for server in self.servers:
            if (device := server.best_fit(need)) is not None:
                worker = self.hold(server, device, need, function.model.n_bytes)
                unit = self.begin(function, [worker], 1, SLOTS)
                self.start(worker, Bytes(worker.part), partial(self._ready, unit))
                return True
        return False

    def _ready(self, unit: Unit) -> None:
        endpoint = Endpoint(self.engine, unit.function.model, SLOTS, done=lambda _: self.completed(unit))
        self.serve(unit, endpoint, unit.workers[0])


class ServerlessLlm(System):
    """Each model gets a whole device.  There is no SSD tier (as in P's comparison), and runs are not migrated."""

    def place(self, function: Function, n_workers: int) -> bool:
        return all(self._place_one(function) for _ in range(n_workers))

    def _place_one(self, function: Function) -> bool:
        need = function.model.n_bytes + KV_RESERVE
        free = {s.index: d for s in self.servers if (d := s.idle_device(need)) is not None}
        offers = [self._offer(self.servers[i], function) for i in free]
        choice = choose(offers, str(function.index), function.model.n_bytes, 1)
        if choice is None:
            return False
        server = self.servers[choice.server]
        reserve = server.kind.memory  # the whole device
        worker = self.hold(server, free[server.index], reserve, function.model.n_bytes)
        unit = self.begin(function, [worker], 1, SLOTS)
        hit = function.index in server.cache
        if hit:
            server.cache.use(function.index)
        self.start(worker, Bytes(0.0 if hit else worker.part), partial(self._ready, unit))
        return True

    def _offer(self, server: SimServer, function: Function) -> LoadServer:
        queue_s = sum(server.link.pending()) / server.spec.link
        name = str(function.index)
        tiers = {name: Tier.RESIDENT} if function.index in server.cache else {}
        return LoadServer(server.index, 1, server.kind.sllm_copy, float("inf"), server.spec.link, 0.0, queue_s, tiers)

    def _ready(self, unit: Unit) -> None:
        unit.workers[0].server.cache.put(unit.function.index, unit.function.model.n_bytes)
        endpoint = Endpoint(self.engine, unit.function.model, SLOTS, done=lambda _: self.completed(unit))
        self.serve(unit, endpoint, unit.workers[0])
