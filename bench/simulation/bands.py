"""Does the simulator reproduce what was published?  One line a band: met or missed, and what it consists of."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bench.simulation.experiments import ColdStart, Scenario
from bench.simulation.metrics import Summary
from bench.simulation.reference import APP_RATIO, ATTAINMENT, ORDER, RPS


@dataclass(frozen=True, slots=True)
class Band:
    source: str  # "calibration" (constants were fitted to it), "generated", "files", "scenario"
    name: str
    published: str
    band: str
    value: str
    met: bool | None  # None: no run of it
    evidence: str = ""  # what of the runs themselves explains the value


def cold_start_bands(found: Sequence[ColdStart]) -> list[Band]:
    """Stage constants were fitted to these very figures, so nothing here validates anything."""
    s = {(c.gpu, c.model, c.system): c for c in found}
    off = [abs(c.simulated_s / c.published_s - 1) for c in found]
    worst = max(found, key=lambda c: abs(c.simulated_s / c.published_s - 1))
    cells = sorted({(c.gpu, c.model) for c in found})
    bands = [Band(
        "calibration", "cold start, every cell", "A", "within 15 %",
        f"{sum(o <= 0.15 for o in off)} of {len(off)} cells; worst {worst.system} {worst.model} {worst.gpu}: "
        f"{worst.simulated_s:.1f} s for {worst.published_s:.1f}", all(o <= 0.15 for o in off))]  # fmt: skip
    for name, slow, fast, published, low, high in (
        ("vLLM / four workers", "vllm", "paraserve", "2.1–4.7", 1.9, 5.2),
        ("ServerlessLLM / four workers", "serverlessllm", "paraserve", "1.7–3.1", 1.5, 3.4),
        ("vLLM / one worker", "vllm", "paraserve-single", "1.8–2.5", 1.6, 2.8),
    ):
        ratios = [s[*c, slow].simulated_s / s[*c, fast].simulated_s for c in cells]
        bands.append(Band("calibration", f"cold start, {name}", published, f"{low}–{high}",
                          _span(ratios), low <= min(ratios) and max(ratios) <= high))  # fmt: skip
    return bands


def _span(ratios: Sequence[float]) -> str:
    return f"{min(ratios):.2f}–{max(ratios):.2f}"


def scenario_bands(found: Sequence[Scenario]) -> list[Band]:
    limits = {"scale_up_ttft": ("1.87", 1.5, 2.2), "scale_up_tpot": ("1.08–1.19", 1.0, 1.3),
              "scale_down": ("2.29 (P), 1.61–1.70 (H)", 1.5, 2.4), "brownfield": ("2.6", 2.0, 3.2)}  # fmt: skip
    return [Band("scenario", f.name, limits[f.name][0], f"{limits[f.name][1]}–{limits[f.name][2]}",
                 f"{f.value:.2f} ({f.detail})", limits[f.name][1] <= f.value <= limits[f.name][2])
            for f in found]  # fmt: skip


class EndToEnd:
    """Means over the seeds of one source of workloads."""

    def __init__(self, source: str, runs: Sequence[Summary]) -> None:
        self.source, self._runs = source, [r for r in runs if r.source == source]

    def mean(self, system: str, cv: float, rps: float, scale: float = 1.0,
             value: Callable[[Summary], float] = lambda r: r.ttft_pct) -> float | None:  # fmt: skip
        found = [value(r) for r in self._runs if (r.system, r.cv, r.rps, r.scale) == (system, cv, rps, scale)]
        return statistics.fmean(found) if found else None

    def _cold(self, points: Sequence[tuple[float, float]]) -> str:
        """How many requests found no free slot, and how many of those still came in time."""
        said = []
        for system in ("vllm", "paraserve"):
            cold = [c for p in points if (c := self.mean(system, *p, value=lambda r: r.cold_pct)) is not None]
            late = [100 - a for p in points if (a := self.mean(system, *p)) is not None]
            if cold and len(cold) == len(late):
                share, missed = statistics.fmean(cold), statistics.fmean(late)
                said.append(f"{system} {share:.0f} % cold, of which {100 * min(1.0, missed / share):.0f} % late")
        return "; ".join(said)

    def bands(self) -> list[Band]:
        return [*self._levels(), *self._ratios(), *self._apps(), *self._looser(), *self._tokens()]

    def _levels(self) -> list[Band]:
        bands = []
        for cv, table in ATTAINMENT.items():
            for i, rps in enumerate(RPS):
                got = [self.mean(s, cv, rps) for s in ORDER]
                values = [g for g in got if g is not None]
                if len(values) < len(ORDER):
                    continue
                want = [table[s][i] for s in ORDER]
                near = [abs(v - w) <= 10 for v, w in zip(values, want, strict=True)]
                text = " ".join(f"{v:.1f}" for v in values)
                bands.append(Band(self.source, f"attainment, CV {cv}, RPS {rps} ({sum(near)} of 4 near)",
                                  " ".join(map(str, want)), "±10 points each", text, all(near),
                                  self._cold(((float(cv), rps),))))  # fmt: skip
                bands.append(Band(self.source, f"order, CV {cv}, RPS {rps}", "vLLM < SLLM < ParaServe < cache", "order",
                                  text, values == sorted(values)))  # fmt: skip
        return bands

    def _ratios(self) -> list[Band]:
        gains = [("ParaServe / vLLM", "paraserve", "vllm", "1.43–1.74", 1.3, 1.9),
                 ("ParaServe / ServerlessLLM", "paraserve", "serverlessllm-cache", "1.43–1.74", 1.3, 1.9),
                 ("cache on top", "paraserve-cache", "paraserve", "≤ 1.11", 1.0, 1.2)]  # fmt: skip
        bands = []
        for name, over, under, published, low, high in gains:
            points = [(self.mean(over, cv, rps), self.mean(under, cv, rps)) for cv in ATTAINMENT for rps in RPS]
            ratios = [a / b for a, b in points if a is not None and b]
            if ratios:
                bands.append(Band(self.source, f"attainment ratio, {name}", published, f"{low}–{high}",
                                  _span(ratios), low <= min(ratios) and max(ratios) <= high,
                                  self._cold([(float(cv), rps) for cv in ATTAINMENT for rps in RPS])))  # fmt: skip
        return bands

    def _apps(self) -> list[Band]:
        def app(system: str, name: str) -> float | None:
            return self.mean(system, 8, 0.6, value=lambda r: r.app_pct[name])

        bands = []
        for name, published in APP_RATIO.items():
            over, under = app("paraserve", name), app("vllm", name)
            if over is not None and under:
                bands.append(Band(self.source, f"ParaServe / vLLM, {name}", str(published), "±20 %",
                                  f"{over / under:.2f}", abs(over / under / published - 1) <= 0.2))  # fmt: skip
        pairs = [(s, app(s, "code"), app(s, "chatbot")) for s in ORDER]
        known = [(s, c, h) for s, c, h in pairs if c is not None and h is not None]
        if known:
            text = ", ".join(f"{s} {c:.0f}/{h:.0f}" for s, c, h in known)
            bands.append(Band(self.source, "code ≤ chatbot for every system", "yes", "yes", text,
                              all(c <= h for _, c, h in known)))  # fmt: skip
        return bands

    def _looser(self) -> list[Band]:
        bands = []
        for system, published in (("paraserve", "1.38–1.52"), ("paraserve-cache", "1.49–1.58")):
            found = [(self.mean(system, 8, 0.6, x), self.mean("vllm", 8, 0.6, x)) for x in (1.5, 2.0)]
            ratios = [a / b for a, b in found if a is not None and b]
            if ratios:
                name = f"looser SLO (1.5×, 2×), {system} / vLLM"
                bands.append(Band(self.source, name, published, "1.25–1.7", _span(ratios),
                                  all(1.25 <= r <= 1.7 for r in ratios), self._cold(((8.0, 0.6),))))  # fmt: skip
        tight = [(s, v) for s in ORDER if (v := self.mean(s, 8, 0.6, 0.5)) is not None]
        if tight:
            bands.append(Band(self.source, "tight SLO (0.5×), every system", "≤ 63 %", "≤ 70 %",
                              ", ".join(f"{s} {v:.0f}" for s, v in tight), all(v <= 70 for _, v in tight)))  # fmt: skip
        return bands

    def _tokens(self) -> list[Band]:
        least = min((r.tpot_pct for r in self._runs if r.scale == 1.0), default=None)
        bands = [] if least is None else [
            Band(self.source, "TPOT attainment, worst run", "> 90 %", "> 90 %", f"{least:.1f} %", least > 90)
        ]  # fmt: skip
        for name, value in (("TPOT", lambda r: r.tpot_mean_ms), ("cost", lambda r: r.cost_gb_h)):
            points = [(self.mean("paraserve", cv, rps, value=value), self.mean("vllm", cv, rps, value=value))
                      for cv in ATTAINMENT for rps in RPS]  # fmt: skip
            ratios = [a / b for a, b in points if a is not None and b]
            if ratios:
                mean = statistics.fmean(ratios)
                bands.append(Band(self.source, f"mean {name}, ParaServe / vLLM", "1.06 (TPOT); cost mostly lower",
                                  "≤ 1.12", f"{mean:.2f}", mean <= 1.12))  # fmt: skip
        return bands
