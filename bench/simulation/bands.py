"""Does the simulator reproduce the published results?  Each band has one line: met or missed, and the reasons."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from bench.simulation import why
from bench.simulation.experiments import ColdStart, Scenario
from bench.simulation.metrics import Summary
from bench.simulation.reference import APP_RATIO, ATTAINMENT, ORDER, RPS
from bench.simulation.specs import SYSTEMS, Mechanism

Point = tuple[float, float]
"""CV and requests/s."""

PUBLISHED_POINTS: tuple[Point, ...] = tuple((float(cv), rps) for cv in ATTAINMENT for rps in RPS)


@dataclass(frozen=True, slots=True)
class Band:
    source: str  # "calibration" (constants were fitted to these figures), "generated", "files", "scenario"
    name: str
    published: str
    band: str
    value: str
    met: bool | None  # None: it was not run
    why: str = ""  # the reasons that the traces of its runs give, if it is not met


def cold_start_bands(found: Sequence[ColdStart]) -> list[Band]:
    """The constants of the phases were fitted to these same figures, so these bands validate nothing."""
    off = sorted((c for c in found if c.off > 0.15), key=lambda c: -c.off)
    worst = max(found, key=lambda c: c.off)
    value = f"{len(found) - len(off)} of {len(found)} cells; worst {worst.in_words}"
    reasons = "; ".join(f"{c.system} {c.model} {c.gpu} consists of {c.consists_of}" for c in off)
    bands = [Band("calibration", "cold start, every cell", "A", "within 15 %", value, not off, reasons)]
    for name, slow, fast, published, low, high in (
        ("vLLM / four workers", "vllm", "paraserve", "2.1–4.7", 1.9, 5.2),
        ("ServerlessLLM / four workers", "serverlessllm", "paraserve", "1.7–3.1", 1.5, 3.4),
        ("vLLM / one worker", "vllm", "paraserve-single", "1.8–2.5", 1.6, 2.8),
    ):
        bands.append(_cold_ratio(found, name, (slow, fast), published, (low, high)))
    return bands


def _cold_ratio(
    found: Sequence[ColdStart], name: str, systems: tuple[str, str], published: str, limits: tuple[float, float]
) -> Band:
    cells = {(c.gpu, c.model, c.system): c for c in found}
    slow, fast = systems
    pairs = [(cells[gpu, model, slow], cells[gpu, model, fast]) for gpu, model in sorted({c.cell for c in found})]
    ratios = [a.simulated_s / b.simulated_s for a, b in pairs]
    beyond = [pair for pair, ratio in zip(pairs, ratios, strict=True) if not limits[0] <= ratio <= limits[1]]
    reasons = "; ".join(f"{c.in_words} consists of {c.consists_of}" for pair in beyond for c in pair)
    limit = f"{limits[0]}–{limits[1]}"
    return Band("calibration", f"cold start, {name}", published, limit, _span(ratios), not beyond, reasons)


def _span(ratios: Sequence[float]) -> str:
    return f"{min(ratios):.2f}–{max(ratios):.2f}"


def scenario_bands(found: Sequence[Scenario]) -> list[Band]:
    limits = {
        "scale_up_ttft": ("1.87", 1.5, 2.2),
        "scale_up_tpot": ("1.08–1.19", 1.0, 1.3),
        "scale_down": ("2.29 (P), 1.61–1.70 (H)", 1.5, 2.4),
        "brownfield": ("2.6", 2.0, 3.2),
    }
    bands = []
    for f in found:
        published, low, high = limits[f.name]
        met = low <= f.value <= high
        bands.append(Band("scenario", f.name, published, f"{low}–{high}", f"{f.value:.2f} ({f.detail})", met, f.why))
    migration = why.without(Mechanism.MIGRATION)
    return [*bands, Band("scenario", "L scheduler: P99 against random", "1.95", "1.3–2.5", "", None, migration)]


class EndToEnd:
    """Medians over the seeds of one source of workloads."""

    def __init__(self, source: str, runs: Sequence[Summary]) -> None:
        self.source, self._runs = source, [r for r in runs if r.source == source]

    def runs(self, system: str, points: Iterable[Point], scale: float = 1.0) -> list[Summary]:
        wanted = set(points)
        return [r for r in self._runs if r.system == system and r.scale == scale and (r.cv, r.rps) in wanted]

    def values(
        self,
        system: str,
        cv: float,
        rps: float,
        scale: float = 1.0,
        value: Callable[[Summary], float] = lambda r: r.ttft_pct,
    ) -> list[float]:
        """One value for each seed, in order."""
        return [value(r) for r in sorted(self.runs(system, [(cv, rps)], scale), key=lambda r: r.seed)]

    def median(
        self,
        system: str,
        cv: float,
        rps: float,
        scale: float = 1.0,
        value: Callable[[Summary], float] = lambda r: r.ttft_pct,
    ) -> float | None:
        found = self.values(system, cv, rps, scale, value)
        return statistics.median(found) if found else None

    def bands(self) -> list[Band]:
        return [*self._levels(), *self._ratios(), *self._apps(), *self._looser(), *self._tight(), *self._tokens()]

    def _late(self, systems: Iterable[str], points: Iterable[Point], scale: float = 1.0, app: str | None = None) -> str:
        """Say in words why the late requests of these systems waited."""
        among, whose = list(points), "" if app is None else f", {app}"
        return " ".join(
            why.late_sentence(SYSTEMS[s].label + whose, why.late(self.runs(s, among, scale), app=app)) for s in systems
        )

    def _levels(self) -> list[Band]:
        bands = []
        for cv, table in ATTAINMENT.items():
            for i, rps in enumerate(RPS):
                got = {s: v for s in ORDER if (v := self.median(s, cv, rps)) is not None}
                if len(got) == len(ORDER):
                    bands += self._level((float(cv), rps), got, {s: table[s][i] for s in ORDER})
        return bands

    def _level(self, point: Point, got: dict[str, float], want: dict[str, float]) -> list[Band]:
        cv, rps = point
        far = [s for s in ORDER if abs(got[s] - want[s]) > 10]
        text = " ".join(f"{v:.1f}" for v in got.values())
        reasons = " ".join(why.level_sentence(SYSTEMS[s].label, self.runs(s, [point]), got[s], want[s]) for s in far)
        wrong = [s for a, b in itertools.pairwise(ORDER) if got[a] > got[b] for s in (a, b)]
        near = f"{len(ORDER) - len(far)} of {len(ORDER)} near"
        return [
            Band(
                self.source,
                f"attainment, CV {cv:g}, RPS {rps} ({near})",
                " ".join(map(str, want.values())),
                "±10 points each",
                text,
                not far,
                reasons,
            ),
            Band(
                self.source,
                f"order, CV {cv:g}, RPS {rps}",
                "vLLM < SLLM < ParaServe < cache",
                "order",
                text,
                not wrong,
                self._late(dict.fromkeys(wrong), [point]),
            ),
        ]

    def _ratios(self) -> list[Band]:
        gains = [
            ("ParaServe / vLLM", "paraserve", "vllm", "1.43–1.74", 1.3, 1.9),
            ("ParaServe / ServerlessLLM", "paraserve", "serverlessllm-cache", "1.43–1.74", 1.3, 1.9),
            ("cache on top", "paraserve-cache", "paraserve", "≤ 1.11", 1.0, 1.2),
        ]
        bands = []
        for name, over, under, published, low, high in gains:
            pairs = [(p, self.median(over, *p), self.median(under, *p)) for p in PUBLISHED_POINTS]
            ratios = {p: a / b for p, a, b in pairs if a is not None and b}
            beyond = [p for p, ratio in ratios.items() if not low <= ratio <= high]
            if ratios:
                span, reasons = _span(list(ratios.values())), self._late((over, under), beyond)
                bands.append(
                    Band(
                        self.source, f"attainment ratio, {name}", published, f"{low}–{high}", span, not beyond, reasons
                    )
                )
        return bands

    def _apps(self) -> list[Band]:
        def app(system: str, name: str) -> float | None:
            return self.median(system, 8, 0.6, value=lambda r: r.app_pct[name])

        centre = [(8.0, 0.6)]
        bands = []
        for name, published in APP_RATIO.items():
            over, under = app("paraserve", name), app("vllm", name)
            if over is not None and under:
                met = abs(over / under / published - 1) <= 0.2
                reasons = self._late(("paraserve", "vllm"), centre, app=name)
                title = f"ParaServe / vLLM, {name}"
                bands.append(Band(self.source, title, str(published), "±20 %", f"{over / under:.2f}", met, reasons))
        pairs = [(s, app(s, "code"), app(s, "chatbot")) for s in ORDER]
        known = [(s, c, h) for s, c, h in pairs if c is not None and h is not None]
        if known:
            text = ", ".join(f"{s} {c:.0f}/{h:.0f}" for s, c, h in known)
            wrong = [s for s, c, h in known if c > h]
            reasons = " ".join(self._late(wrong, centre, app=name) for name in ("chatbot", "code") if wrong)
            title = "code ≤ chatbot for every system"
            bands.append(Band(self.source, title, "yes", "yes", text, not wrong, reasons))
        return bands

    def _looser(self) -> list[Band]:
        bands = []
        for system, published in (("paraserve", "1.38–1.52"), ("paraserve-cache", "1.49–1.58")):
            pairs = [(x, self.median(system, 8, 0.6, x), self.median("vllm", 8, 0.6, x)) for x in (1.5, 2.0)]
            ratios = {x: a / b for x, a, b in pairs if a is not None and b}
            beyond = [x for x, ratio in ratios.items() if not 1.25 <= ratio <= 1.7]
            if ratios:
                name = f"looser SLO (1.5×, 2×), {system} / vLLM"
                reasons = " ".join(f"{x:g}×: {self._late((system, 'vllm'), [(8.0, 0.6)], x)}" for x in beyond)
                span = _span(list(ratios.values()))
                bands.append(Band(self.source, name, published, "1.25–1.7", span, not beyond, reasons))
        return bands

    def _tight(self) -> list[Band]:
        tight = [(s, v) for s in ORDER if (v := self.median(s, 8, 0.6, 0.5)) is not None]
        if not tight:
            return []
        beyond = [(s, v) for s, v in tight if v > 70]
        reasons = " ".join(
            why.level_sentence(SYSTEMS[s].label, self.runs(s, [(8.0, 0.6)], 0.5), v, 63) for s, v in beyond
        )
        values = ", ".join(f"{s} {v:.0f}" for s, v in tight)
        return [Band(self.source, "tight SLO (0.5×), every system", "≤ 63 %", "≤ 70 %", values, not beyond, reasons)]

    def _tokens(self) -> list[Band]:
        bands = []
        least = min((r for r in self._runs if r.scale == 1.0), key=lambda r: r.tpot_pct, default=None)
        if least is not None:
            reasons = why.groups_sentence(SYSTEMS[least.system].label, [least])
            met, value = least.tpot_pct > 90, f"{least.tpot_pct:.1f} %"
            bands.append(Band(self.source, "TPOT attainment, worst run", "> 90 %", "> 90 %", value, met, reasons))
        groups = why.groups_sentence(SYSTEMS["paraserve"].label, self.runs("paraserve", PUBLISHED_POINTS))
        for name, value_of in (("TPOT", lambda r: r.tpot_mean_ms), ("cost", lambda r: r.cost_gb_h)):
            pairs = [
                (self.median("paraserve", *p, value=value_of), self.median("vllm", *p, value=value_of))
                for p in PUBLISHED_POINTS
            ]
            ratios = [a / b for a, b in pairs if a is not None and b]
            if ratios:
                mean = statistics.fmean(ratios)
                title, published = f"mean {name}, ParaServe / vLLM", "1.06 (TPOT); cost mostly lower"
                bands.append(Band(self.source, title, published, "≤ 1.12", f"{mean:.2f}", mean <= 1.12, groups))
        return bands
