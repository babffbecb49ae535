"""One run: it takes a workload, a system and a testbed, and returns the outcome of every request."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from bench.simulation.baselines import ServerlessLlm, ServerlessVllm
from bench.simulation.cluster import SimServer, build
from bench.simulation.constants import TESTBEDS
from bench.simulation.engine import Engine
from bench.simulation.groups import Groups
from bench.simulation.production import Production
from bench.simulation.specs import Mechanism, Objectives, Placing, SystemSpec
from bench.simulation.system import Consolidation, System
from bench.simulation.workload import Request, Workload

_CLASSES: dict[Placing, type[System]] = {
    Placing.FIRST_FIT: ServerlessVllm,
    Placing.STARTUP: ServerlessLlm,
    Placing.SELECT: Groups,
    Placing.PRODUCTION: Production,
}


class Lost(AssertionError):
    """A request that never ended, or ended twice."""


@dataclass(slots=True)
class Outcome:
    """The outcome of one run.  ``held_byte_s`` is device memory × time, for which a provider pays."""

    requests: list[Request]
    log_hash: str
    n_events: int
    n_starts: int
    simulated_s: float
    wall_s: float
    cpu_s: float
    held_byte_s: float
    used: Mapping[Mechanism, int]  # how often each mechanism was used
    consolidations: Sequence[Consolidation]


def simulate(
    workload: Workload, spec: SystemSpec, testbed: str = "ii", objectives: Objectives | None = None
) -> Outcome:
    engine = Engine()
    servers = build(TESTBEDS[testbed], engine, spec.discipline, cache=spec.cache, admission=spec.admission)
    system = _CLASSES[spec.placing](engine, servers, spec, objectives or Objectives())
    requests = workload.fresh()
    began, cpu = time.perf_counter(), time.process_time()
    for request in requests:
        engine.at(request.arrival_s, system.arrive, request)
    engine.run(alive=lambda: system.n_ended < len(requests))
    took, cpu = time.perf_counter() - began, time.process_time() - cpu
    _check(requests)
    return Outcome(
        requests,
        engine.log_hash(),
        engine.n_events,
        system.n_starts,
        engine.now,
        took,
        cpu,
        _held(servers, engine.now),
        dict(system.used),
        system.consolidations,
    )


def _held(servers: Sequence[SimServer], now: float) -> float:
    for server in servers:
        server.account(0, now)
    return sum(s.held_byte_s for s in servers)


def _check(requests: Iterable[Request]) -> None:
    wrong = [r.index for r in requests if r.n_ends != 1]
    if wrong:
        raise Lost(f"{len(wrong)} request(s) did not end exactly once, the first is {wrong[0]}")
