"""Can the simulator run a cluster of a thousand hosts with ten thousand functions and a million requests?

It runs the whole production policy (``thaw``).  Each request is made when it arrives and forgotten when it has ended,
so memory only holds the cluster and the requests in progress.  Popularity is log-normal as in the workloads.  Arrivals
are Poisson.  At their rate every device is soon taken by workers that serve or are kept warm, so a start of another
function evicts an idle worker.
"""

from __future__ import annotations

import itertools
import random
import resource
import time
from collections.abc import Callable
from dataclasses import dataclass

from bench.simulation.cluster import build
from bench.simulation.constants import BLOCKS, GBIT, POPULARITY_SIGMA, ServerSpec
from bench.simulation.engine import Engine
from bench.simulation.production import Production
from bench.simulation.specs import SYSTEMS, Objectives
from bench.simulation.workload import Request, make_request
from gateway.scheduler.io.gc_pauses import Pauses

HOSTS, FUNCTIONS, REQUESTS = 1_000, 10_000, 1_000_000
_RATE = 300.0  # requests a second
_TIDY_S = 5.0


@dataclass(frozen=True, slots=True)
class Stress:
    n_requests: int
    n_events: int
    n_starts: int
    in_time_pct: float
    simulated_s: float
    wall_s: float
    cpu_s: float
    peak_bytes: int
    log_hash: str


class Crowd:
    """Makes the next request when one has arrived, and counts the requests that have ended."""

    def __init__(
        self, engine: Engine, system: Production, n_requests: int, seed: int, progress: Callable[[int], None]
    ) -> None:
        self._engine, self._system, self._n_requests, self._progress = engine, system, n_requests, progress
        self._rng = random.Random(f"stress {seed}")
        weights = (self._rng.lognormvariate(0.0, POPULARITY_SIGMA / 2) for _ in range(FUNCTIONS))
        self._cumulative = list(itertools.accumulate(weights))
        self._n_made = 0
        self.n_in_time = self.n_ended = 0
        self._open: dict[int, Request] = {}

    def next(self) -> None:
        if self._n_made == self._n_requests:
            return
        (function,) = self._rng.choices(range(FUNCTIONS), cum_weights=self._cumulative)
        made = make_request(self._rng, self._n_made, self._engine.now, function, function % len(BLOCKS))
        self._n_made += 1
        self._open[made.index] = made
        self._system.arrive(made)
        if self._n_made % 1_000 == 0:
            self.sweep()
        self._engine.after(self._rng.expovariate(_RATE), self.next)

    def sweep(self) -> None:
        """Count and forget the requests that have ended.  Raises AssertionError if a request ended twice."""
        objectives = self._system.objectives
        for index in [i for i, r in self._open.items() if r.n_ends]:
            request = self._open.pop(index)
            if request.n_ends != 1:
                raise AssertionError(f"request {index} ended {request.n_ends} times")
            self.n_ended += 1
            self.n_in_time += request.ttft <= objectives.ttft(request.app, request.model)
        self._progress(self.n_ended)

    @property
    def alive(self) -> bool:
        return self._system.n_ended < self._n_requests


def run(
    n_requests: int = REQUESTS, seed: int = 0, n_hosts: int = HOSTS, progress: Callable[[int], None] = lambda _: None
) -> Stress:
    """``progress`` is called from time to time with the number of requests that have ended."""
    specs = [
        ServerSpec("A10", 4, 64 * GBIT, 752 * 10**9) if i % 3 == 0 else ServerSpec("V100", 4, 16 * GBIT, 368 * 10**9)
        for i in range(n_hosts)
    ]
    engine, spec = Engine(), SYSTEMS["thaw"]
    system = Production(engine, build(specs, engine, spec.discipline, cache=True), spec, Objectives())
    crowd = Crowd(engine, system, n_requests, seed, progress)
    pauses = Pauses()  # as in the scheduler's own loop: the collector need not scan a thousand hosts again and again
    pauses.after_rebuild()

    def tidy() -> None:
        pauses.after_heartbeats()
        engine.after(_TIDY_S, tidy)

    tidy()
    wall, cpu = time.perf_counter(), time.process_time()
    crowd.next()
    engine.run(alive=lambda: crowd.alive)
    crowd.sweep()
    if crowd.n_ended != n_requests:
        raise AssertionError(f"{n_requests - crowd.n_ended} request(s) never ended")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return Stress(
        n_requests,
        engine.n_events,
        system.n_starts,
        100 * crowd.n_in_time / n_requests,
        engine.now,
        time.perf_counter() - wall,
        time.process_time() - cpu,
        peak,
        engine.log_hash(),
    )
