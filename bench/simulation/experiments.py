"""Small scenarios beside the end-to-end workload: cold starts, scaling up and down, a slow production link."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, replace

from bench.simulation.reference import COLD_START_MODELS, COLD_START_S
from bench.simulation.run import simulate
from bench.simulation.specs import SYSTEMS, Objectives, SystemSpec
from bench.simulation.workload import Request, Workload

_NO_OBJECTIVE = Objectives(scale=1e6)
_SHORT_PROMPT = 16
_LATER_S = 500.0  # everything has expired by then


@dataclass(frozen=True, slots=True)
class ColdStart:
    gpu: str
    model: str
    system: str
    simulated_s: float
    published_s: float


@dataclass(frozen=True, slots=True)
class Scenario:
    name: str
    value: float
    detail: str


def cold_starts() -> list[ColdStart]:
    """One request on an idle testbed (i), servers of one kind; the cached system at its second start."""
    found = []
    for gpu, models in COLD_START_MODELS.items():
        for system, published in COLD_START_S[gpu].items():
            for model, reference in zip(models, published, strict=True):
                found.append(ColdStart(gpu, model, system, cold_start_s(gpu, model, SYSTEMS[system]), reference))
    return found


def cold_start_s(gpu: str, model: str, spec: SystemSpec) -> float:
    if spec.name == "paraserve":
        spec = replace(spec, min_stages=4)
    times = (0.0, _LATER_S) if spec.cache else (0.0,)
    outcome = simulate(burst(model, times, _SHORT_PROMPT, 2), spec, f"i-{gpu.lower()}", _NO_OBJECTIVE)
    return outcome.requests[-1].ttft


def burst(model: str, times: tuple[float, ...], n_in: int, n_out: int) -> Workload:
    """Requests of one function."""
    return Workload("burst", tuple(Request(i, t, 0, "chatbot", model, n_in, n_out) for i, t in enumerate(times)))


def scale_up() -> tuple[Scenario, Scenario]:
    """128 requests at once for a 13B model on 16 V100: groups of four against single workers."""
    work = burst("llama2-13b", (0.0,) * 128, 512, 512)
    group = simulate(work, SYSTEMS["paraserve"], "i-v100", _NO_OBJECTIVE).requests
    single = simulate(work, replace(SYSTEMS["paraserve-single"], largest_group=1), "i-v100", _NO_OBJECTIVE).requests
    ttft = [statistics.fmean(r.ttft for r in rs) for rs in (group, single)]
    tpot = [statistics.fmean(r.tpot for r in rs) for rs in (group, single)]
    return (
        Scenario("scale_up_ttft", ttft[1] / ttft[0], f"mean TTFT {ttft[1]:.1f} s single, {ttft[0]:.1f} s in groups"),
        Scenario("scale_up_tpot", tpot[0] / tpot[1], f"mean TPOT {1e3 * tpot[0]:.0f} ms against {1e3 * tpot[1]:.0f}"),
    )


def scale_down() -> Scenario:
    """512 tokens of a 13B model on four stages, one of them whole: with consolidation against without."""
    work = burst("llama2-13b", (0.0,), 512, 512)
    four = replace(SYSTEMS["paraserve"], min_stages=4)
    with_it = simulate(work, four, "i-v100", _NO_OBJECTIVE).requests[0]
    without = simulate(work, replace(four, consolidate=False), "i-v100", _NO_OBJECTIVE).requests[0]
    spans = [r.end_s - r.first_token_s for r in (without, with_it)]
    whole = without.end_s / with_it.end_s
    text = f"first to last token {spans[0]:.1f} s, with it {spans[1]:.1f} s; from the start {whole:.2f}"
    return Scenario("scale_down", spans[0] / spans[1], text)


def brownfield() -> Scenario:
    """A cold start over 5 Gbit/s: serverless vLLM against a group of four."""
    slow = simulate(burst("llama2-7b", (0.0,), 1024, 2), SYSTEMS["vllm"], "brownfield", _NO_OBJECTIVE).requests[0].ttft
    four = replace(SYSTEMS["paraserve"], min_stages=4)
    fast = simulate(burst("llama2-7b", (0.0,), 1024, 2), four, "brownfield", _NO_OBJECTIVE).requests[0].ttft
    return Scenario("brownfield", slow / fast, f"{slow:.1f} s against {fast:.1f} s")


def ablations(workload: Workload) -> list[tuple[str, float, float, float]]:
    """(name, TTFT attainment in percent, its mean in seconds, GB·h) of Thaw with one thing taken away."""
    planned, today = SYSTEMS["thaw-planned"], SYSTEMS["thaw"]
    cases = {
        "Thaw (today)": today,
        "today, one stage only": replace(today, max_stages=1),
        "today, two stages at most": replace(today, max_stages=2),
        "today, models are not kept in memory": replace(today, cache=False),
        "today, `paper` instead of `min_sharing`": replace(today, variant="paper"),
        "Thaw (planned: consolidation)": planned,
        "without stem cells": replace(planned, stem_cells=False),
        "without eviction of idle workers": replace(planned, evict=False),
        "without the cache": replace(planned, cache=False),
        "without consolidation": replace(planned, consolidate=False),
        "one stage only": replace(planned, max_stages=1),
        "two stages at most": replace(planned, max_stages=2),
        "`paper` instead of `min_sharing`": replace(planned, variant="paper"),
        "equal shares instead of EDF": replace(planned, discipline="equal"),
        "no stem cells, no eviction": replace(planned, stem_cells=False, evict=False),
    }
    objectives = Objectives()
    rows = []
    for name, spec in cases.items():
        outcome = simulate(workload, spec)
        met = [r.ttft <= objectives.ttft(r.app, r.model) for r in outcome.requests]
        mean_s = statistics.fmean(r.ttft for r in outcome.requests)
        rows.append((name, 100 * sum(met) / len(met), mean_s, outcome.held_byte_s / 1e9 / 3600))
    return rows


def scenarios() -> list[Scenario]:
    return [*scale_up(), scale_down(), brownfield()]
