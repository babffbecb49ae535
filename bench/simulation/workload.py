"""Requests: the project's own generator, written from published statistics, and the outcome of each request.

There are 384 functions in six blocks (application × model).  A function's popularity is log-normal (the spread of the
2021 Azure trace), scaled so that every application has its published share.  Its arrivals are a Gamma renewal process
of the wanted CV.  The process restarts in every window, and its rate varies between windows.  The hour is then thinned
to the wanted rate.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from bench.simulation.constants import (
    APPS,
    BLOCKS,
    FUNCTIONS_PER_BLOCK,
    LONGEST_INPUT,
    LONGEST_OUTPUT,
    POPULARITY_SIGMA,
    WINDOW_CV,
    WINDOW_S,
)
from bench.simulation.waits import Waits

HOUR_S = 3600.0
_OVERSAMPLE = 4.0
"""This many arrivals are made for each one that is kept.  Thinning smooths the windows' bursts, as the compression of
the trace does.
"""


@dataclass(slots=True)
class Request:
    index: int
    arrival_s: float
    function: int
    app: str
    model: str
    input_tokens: int
    output_tokens: int
    first_token_s: float = math.inf
    end_s: float = math.inf
    n_ends: int = 0
    failed: bool = False
    cold: bool = False  # True: it found no free slot
    waits: Waits = field(default_factory=dict)  # the waits add up to its time to first token

    def end(self, now: float, *, failed: bool = False) -> None:
        self.end_s, self.failed = now, failed
        self.n_ends += 1

    @property
    def ttft(self) -> float:
        return self.first_token_s - self.arrival_s

    @property
    def tpot(self) -> float:
        return (self.end_s - self.first_token_s) / max(1, self.output_tokens - 1)


@dataclass(frozen=True, slots=True)
class Workload:
    name: str
    requests: tuple[Request, ...]

    def fresh(self) -> list[Request]:
        """Copies of the requests before they were simulated."""
        return [
            Request(r.index, r.arrival_s, r.function, r.app, r.model, r.input_tokens, r.output_tokens)
            for r in self.requests
        ]


def generate(cv: float, rps: float, seed: int, seconds: float = HOUR_S) -> Workload:
    rng = random.Random(f"thaw {cv:g} {seed}")
    arrivals: list[tuple[float, int]] = []
    for block, (app, _) in enumerate(BLOCKS):
        weights = [rng.lognormvariate(0.0, POPULARITY_SIGMA) for _ in range(FUNCTIONS_PER_BLOCK)]
        total = APPS[app].share / 2 * seconds * _OVERSAMPLE / sum(weights)
        for i, weight in enumerate(weights):
            function = block * FUNCTIONS_PER_BLOCK + i
            arrivals += [(t, function) for t in _renewals(rng, weight * total / seconds, cv, seconds)]
    wanted = min(int(rps * seconds), len(arrivals))
    kept = sorted(rng.sample(_by_share(rng, arrivals, wanted), wanted))
    requests = tuple(make_request(rng, i, t, f, f // FUNCTIONS_PER_BLOCK) for i, (t, f) in enumerate(kept))
    return Workload(f"cv{cv:g}-rps{rps:g}-seed{seed}", requests)


def _renewals(rng: random.Random, rate: float, cv: float, seconds: float) -> list[float]:
    """Arrivals with gaps of mean 1/rate and this CV.  The process restarts in every window."""
    spread = math.log(1 + WINDOW_CV**2)
    shape, found, start = 1 / cv**2, list[float](), 0.0
    while start < seconds:
        local = rate * rng.lognormvariate(-spread / 2, math.sqrt(spread))
        end = min(seconds, start + WINDOW_S)
        expected = local * (end - start)
        if expected * 336 >= 3:  # windows of the uncompressed trace with fewer than three arrivals are dropped
            t = start + rng.gammavariate(shape, cv**2 / local)
            while t < end:
                found.append(t)
                t += rng.gammavariate(shape, cv**2 / local)
        start = end
    return found


def _by_share(rng: random.Random, arrivals: list[tuple[float, int]], wanted: int) -> list[tuple[float, int]]:
    """Arrivals by the applications' shares.  Where an application has too few, arrivals of any others fill up."""
    pools: dict[str, list[tuple[float, int]]] = {app: [] for app in APPS}
    for arrival in arrivals:
        pools[BLOCKS[arrival[1] // FUNCTIONS_PER_BLOCK][0]].append(arrival)
    chosen: list[tuple[float, int]] = []
    rest: list[tuple[float, int]] = []
    for app, pool in pools.items():
        rng.shuffle(pool)
        n = math.ceil(APPS[app].share * wanted)
        chosen, rest = chosen + pool[:n], rest + pool[n:]
    missing = max(0, wanted - len(chosen))
    return chosen + rng.sample(rest, min(missing, len(rest)))


def make_request(rng: random.Random, index: int, t: float, function: int, block: int) -> Request:
    name, model = BLOCKS[block]
    app = APPS[name]
    prompt = _length(rng, app.prompt) + app.system_prompt
    output = _length(rng, app.output)
    return Request(index, t, function, name, model, min(prompt, LONGEST_INPUT), max(1, min(output, LONGEST_OUTPUT)))


def _length(rng: random.Random, points: Sequence[float]) -> int:
    """Draw from a distribution whose inverse is linear between 0, the median, the 95th percentile and the largest."""
    median, p95, largest = points
    u = rng.random()
    if u < 0.5:
        return round(u / 0.5 * median)
    if u < 0.95:
        return round(median + (u - 0.5) / 0.45 * (p95 - median))
    return round(p95 + (u - 0.95) / 0.05 * (largest - p95))
