"""Small scenarios in addition to the end-to-end workload: cold starts, scaling up and down, a slow production link."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, replace

from bench.simulation.reference import COLD_START_MODELS, COLD_START_S
from bench.simulation.run import simulate
from bench.simulation.specs import SYSTEMS, Objectives, SystemSpec
from bench.simulation.why import waits_in_words, waits_sentence
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
    consists_of: str  # in words

    @property
    def cell(self) -> tuple[str, str]:
        return self.gpu, self.model

    @property
    def off(self) -> float:
        """The difference from the published time, relative to the published time."""
        return abs(self.simulated_s / self.published_s - 1)

    @property
    def in_words(self) -> str:
        return f"{self.system} {self.model} {self.gpu}: {self.simulated_s:.1f} s for {self.published_s:.1f}"


@dataclass(frozen=True, slots=True)
class Scenario:
    name: str
    value: float
    detail: str
    why: str  # the reasons that the traces of its runs give


def cold_starts() -> list[ColdStart]:
    """One request on an idle testbed (i) with servers of one kind.  A system with a cache is measured at its second
    start.
    """
    found = []
    for gpu, models in COLD_START_MODELS.items():
        for system, published in COLD_START_S[gpu].items():
            for model, reference in zip(models, published, strict=True):
                request = cold_start(gpu, model, SYSTEMS[system])
                words = waits_in_words(request.waits)
                found.append(ColdStart(gpu, model, system, request.ttft, reference, words))
    return found


def cold_start(gpu: str, model: str, spec: SystemSpec) -> Request:
    if spec.name == "paraserve":
        spec = replace(spec, min_stages=4)
    times = (0.0, _LATER_S) if spec.cache else (0.0,)
    outcome = simulate(burst(model, times, _SHORT_PROMPT, 2), spec, f"i-{gpu.lower()}", _NO_OBJECTIVE)
    return outcome.requests[-1]


def burst(model: str, times: tuple[float, ...], n_in: int, n_out: int) -> Workload:
    """Requests of one function."""
    return Workload("burst", tuple(Request(i, t, 0, "chatbot", model, n_in, n_out) for i, t in enumerate(times)))


def scale_up() -> tuple[Scenario, Scenario]:
    """128 requests at once for a 13B model on 16 V100: groups of four compared with single workers."""
    work = burst("llama2-13b", (0.0,) * 128, 512, 512)
    group = simulate(work, SYSTEMS["paraserve"], "i-v100", _NO_OBJECTIVE).requests
    single = simulate(work, replace(SYSTEMS["paraserve-single"], largest_group=1), "i-v100", _NO_OBJECTIVE).requests
    ttft = [statistics.fmean(r.ttft for r in rs) for rs in (group, single)]
    tpot = [statistics.fmean(r.tpot for r in rs) for rs in (group, single)]
    reasons = "; ".join((waits_sentence("single", single), waits_sentence("in groups", group)))
    return (
        Scenario(
            "scale_up_ttft", ttft[1] / ttft[0], f"mean TTFT {ttft[1]:.1f} s single, {ttft[0]:.1f} s in groups", reasons
        ),
        Scenario(
            "scale_up_tpot", tpot[0] / tpot[1], f"mean TPOT {1e3 * tpot[0]:.0f} ms against {1e3 * tpot[1]:.0f}", reasons
        ),
    )


def scale_down() -> Scenario:
    """512 tokens of a 13B model on four stages, one of them a full worker: with and without consolidation."""
    work = burst("llama2-13b", (0.0,), 512, 512)
    four = replace(SYSTEMS["paraserve"], min_stages=4)
    consolidated = simulate(work, four, "i-v100", _NO_OBJECTIVE)
    with_it = consolidated.requests[0]
    without = simulate(work, replace(four, consolidate=False), "i-v100", _NO_OBJECTIVE).requests[0]
    spans = [r.end_s - r.first_token_s for r in (without, with_it)]
    whole = without.end_s / with_it.end_s
    text = f"first to last token {spans[0]:.1f} s, with it {spans[1]:.1f} s; from the start {whole:.2f}"
    reasons = "; ".join(
        f"consolidated {c.at_s - with_it.first_token_s:.1f} s after the first token, stalled for {c.stall_s:.2f} s, "
        f"then {with_it.end_s - c.at_s - c.stall_s:.1f} s on one worker"
        for c in consolidated.consolidations
    )
    return Scenario("scale_down", spans[0] / spans[1], text, reasons)


def brownfield() -> Scenario:
    """A cold start over 5 Gbit/s: serverless vLLM compared with a group of four."""
    slow = simulate(burst("llama2-7b", (0.0,), 1024, 2), SYSTEMS["vllm"], "brownfield", _NO_OBJECTIVE).requests
    four = replace(SYSTEMS["paraserve"], min_stages=4)
    fast = simulate(burst("llama2-7b", (0.0,), 1024, 2), four, "brownfield", _NO_OBJECTIVE).requests
    reasons = "; ".join((waits_sentence("serverless vLLM", slow), waits_sentence("four workers", fast)))
    text = f"{slow[0].ttft:.1f} s against {fast[0].ttft:.1f} s"
    return Scenario("brownfield", slow[0].ttft / fast[0].ttft, text, reasons)


def scenarios() -> list[Scenario]:
    return [*scale_up(), scale_down(), brownfield()]
