"""Attainment, times and cost of a run.  A request that failed misses its TTFT objective."""

from __future__ import annotations

import math
import re
import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bench.simulation.constants import APPS
from bench.simulation.run import Outcome
from bench.simulation.specs import Objectives
from bench.simulation.waits import longest, total
from bench.simulation.workload import Request


@dataclass(frozen=True, slots=True)
class Summary:
    """One run in numbers.  Attainments are in percent; the cost is in GB·h of held device memory."""

    source: str  # "generated" or "files"
    workload: str
    cv: float
    rps: float
    seed: int
    system: str
    scale: float
    n_requests: int
    n_failed: int
    ttft_pct: float
    tpot_pct: float
    app_pct: dict[str, float]
    ttft_mean_s: float
    ttft_p50_s: float
    ttft_p99_s: float
    tpot_mean_ms: float
    cost_gb_h: float
    cold_pct: float
    late: dict[str, dict[str, int]]  # application → the cause that took longest → number of late requests
    late_s: dict[str, float]  # cause → seconds, summed over all late requests
    used: dict[str, int]  # mechanism → how often it was used
    n_starts: int
    n_events: int
    cpu_s: float
    log_hash: str


def summarise(source: str, workload: str, system: str, outcome: Outcome, objectives: Objectives) -> Summary:
    requests = outcome.requests
    cv, rps, seed = parameters(workload)
    answered = [r for r in requests if not r.failed]
    ttfts = sorted(r.ttft for r in answered)
    apps = [a for a in APPS if any(r.app == a for r in requests)]

    def in_time(r: Request) -> bool:
        return r.ttft <= objectives.ttft(r.app, r.model)

    late = [r for r in requests if not in_time(r)]
    return Summary(
        source=source,
        workload=workload,
        cv=cv,
        rps=rps,
        seed=seed,
        system=system,
        scale=objectives.scale,
        n_requests=len(requests),
        n_failed=len(requests) - len(answered),
        ttft_pct=percent(requests, in_time),
        tpot_pct=percent(answered, lambda r: r.tpot <= objectives.tpot(r.app, r.model)),
        app_pct={a: percent([r for r in requests if r.app == a], in_time) for a in apps},
        ttft_mean_s=statistics.fmean(ttfts),
        ttft_p50_s=ttfts[len(ttfts) // 2],
        ttft_p99_s=ttfts[min(len(ttfts) - 1, math.ceil(0.99 * len(ttfts)) - 1)],
        tpot_mean_ms=1000 * statistics.fmean(r.tpot for r in answered),
        cost_gb_h=outcome.held_byte_s / 1e9 / 3600,
        cold_pct=percent(requests, lambda r: r.cold),
        late={a: dict(Counter(longest(r.waits).name for r in late if r.app == a)) for a in apps},
        late_s={cause.name: seconds for cause, seconds in total(r.waits for r in late).items()},
        used={mechanism.name: n for mechanism, n in outcome.used.items() if n},
        n_starts=outcome.n_starts,
        n_events=outcome.n_events,
        cpu_s=outcome.cpu_s,
        log_hash=outcome.log_hash,
    )


def percent(requests: Sequence[Request], good: Callable[[Request], bool]) -> float:
    return 100 * sum(map(good, requests)) / len(requests) if requests else math.nan


def parameters(name: str) -> tuple[float, float, int]:
    """CV, RPS and seed from a workload's name.  A value that the name does not contain is 0."""
    found = {k: float(m[1]) for k in ("cv", "rps", "seed") if (m := re.search(rf"{k}([\d.]+)", name))}
    return found.get("cv", 0.0), found.get("rps", 0.0), int(found.get("seed", 0))
