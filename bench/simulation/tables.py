"""Writes docs/simulation/tables.md from the record: every point, every part, and every band with its verdict."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence

from bench.simulation import why
from bench.simulation.bands import Band, EndToEnd
from bench.simulation.experiments import ColdStart
from bench.simulation.matrix import CENTRE
from bench.simulation.metrics import Summary
from bench.simulation.record import Record
from bench.simulation.reference import COLD_START_MODELS
from bench.simulation.specs import ABLATIONS, SYSTEMS, SystemSpec
from bench.simulation.waits import Cause

TITLES = {
    "generated": "Workloads of the project's generator",
    "files": "Workloads from files",
}
_CAVEATS = {
    "generated": "Functions are more evenly popular here than in the published trace, so more starts are cold (see "
    "the last column). Only ratios between systems carry information, levels do not.",
    "files": "Each file is one hour, made elsewhere from the published counts of the 2021 Azure trace. That generator "
    "was adjusted until one level (vLLM at CV 8) and the application shares matched. So levels are calibrated, and "
    "only relations between systems carry information.",
}
_INTRO = (
    "Every table of the simulation's report, written from [results.json](results.json). "
    "[Simulation](../simulation.md) explains what they mean."
)


def page(record: Record, charts: Sequence[str]) -> str:
    """``charts`` are the charts that the other page does not show, as names of files without their suffix."""
    parts = ["# Simulation: every table", _INTRO]
    for source, title in TITLES.items():
        mine = [r for r in record.runs if r.source == source]
        if mine:
            parts += [
                f"## {title}",
                _CAVEATS[source],
                _centre(source, mine),
                by_seed(mine),
                late(source, mine),
                _points(source, mine),
                _scales(source, mine),
            ]
            parts.append("\n\n".join(f"![{name}]({name}.svg)" for name in charts if name.startswith(source)))
    if record.ablations:
        parts += ["## What each part is worth", parts_worth(record.ablations)]
    parts += ["## Calibration: cold starts", _cold(record.cold_starts), "## Bands", _bands(record.bands)]
    return "\n\n".join(p for p in parts if p).rstrip() + "\n"


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(str(c) for c in line) + " |" for line in lines)


# end to end ----------------------------------------------------------------------------------------------------------


def spread(values: Sequence[float], digits: int = 1) -> str:
    """The median, followed by the lowest and the highest value where there are several values."""
    if not values:
        return "–"
    median = f"{statistics.median(values):.{digits}f}"
    low, high, to = min(values), max(values), " to " if min(values) < 0 else "–"
    return median if len(values) == 1 else f"{median} ({low:.{digits}f}{to}{high:.{digits}f})"


def of_seeds(runs: Sequence[Summary]) -> str:
    n = len({r.seed for r in runs})
    return "one run each" if n == 1 else f"the median of {n} seeds, in parentheses the lowest and the highest"


def _centre(source: str, runs: Sequence[Summary]) -> str:
    (cv, rps), medians = CENTRE, EndToEnd(source, runs)
    apps = list(next(iter(runs)).app_pct)
    columns: dict[str, tuple[int, Callable[[Summary], float]]] = {
        **{f"{a} %": (1, lambda r, a=a: r.app_pct[a]) for a in apps},  # type: ignore[misc]
        "TPOT in time %": (1, lambda r: r.tpot_pct),
        "TTFT p50 s": (2, lambda r: r.ttft_p50_s),
        "mean": (2, lambda r: r.ttft_mean_s),
        "p99": (1, lambda r: r.ttft_p99_s),
        "GB·h": (0, lambda r: r.cost_gb_h),
        "failed": (0, lambda r: r.n_failed),
        "cold %": (0, lambda r: r.cold_pct),
    }
    rows = []
    for name, spec in SYSTEMS.items():
        if in_time := medians.values(name, cv, rps):
            rest = (f"{medians.median(name, cv, rps, value=value):.{digits}f}" for digits, value in columns.values())
            rows.append((spec.label, spread(in_time), *rest))
    if not rows:
        return ""
    head = ("system", "TTFT in time %", *columns)
    return f"CV {cv:g}, {rps:g} requests/s, {of_seeds(runs)}:\n\n" + table(head, rows)


def by_seed(runs: Sequence[Summary]) -> str:
    """A table of the values by seed."""
    cv, rps = CENTRE
    found = {(r.system, r.seed): r.ttft_pct for r in runs if (r.cv, r.rps, r.scale) == (cv, rps, 1.0)}
    seeds = sorted({seed for _, seed in found})
    if len(seeds) < 2:
        return ""
    rows = [(spec.label, *(_pct(found.get((name, seed))) for seed in seeds)) for name, spec in SYSTEMS.items()]
    head = ("system", *(f"seed {seed}" for seed in seeds))
    return f"TTFT attainment in percent by seed, CV {cv:g}, {rps:g} requests/s:\n\n{table(head, rows)}"


def late(source: str, runs: Sequence[Summary]) -> str:
    """A table of what the late requests of each system waited for, at the centre."""
    medians, rows = EndToEnd(source, runs), []
    for name, spec in SYSTEMS.items():
        mine = medians.runs(name, [CENTRE])
        counts = why.late(mine)
        if n_late := sum(counts.values()):
            seconds = [sum(r.late_s.get(cause.name, 0.0) for r in mine) / n_late for cause in Cause]
            cells = (f"{100 * counts[c] / n_late:.0f} % / {s:.1f}" for c, s in zip(Cause, seconds, strict=True))
            rows.append((spec.label, n_late, *cells))
    if not rows:
        return ""
    intro = (
        f"What late requests waited for, CV {CENTRE[0]:g}, {CENTRE[1]:g} requests/s, all runs. Each cell: the share of "
        "late requests whose longest wait this was, and the mean seconds that a late request waited for it."
    )
    return f"{intro}\n\n" + table(("system", "late requests", *Cause), rows)


def _points(source: str, runs: Sequence[Summary]) -> str:
    points = sorted({(r.cv, r.rps) for r in runs if r.scale == 1.0})
    if len(points) < 2:
        return ""
    medians = EndToEnd(source, runs)
    rows = [(f"{cv:g}", f"{rps:g}", *(spread(medians.values(s, cv, rps)) for s in SYSTEMS)) for cv, rps in points]
    head = ("CV", "requests/s", *(s.label for s in SYSTEMS.values()))
    return f"TTFT attainment in percent, {of_seeds(runs)}:\n\n" + table(head, rows)


def _scales(source: str, runs: Sequence[Summary]) -> str:
    cv, rps = CENTRE
    scales = sorted({r.scale for r in runs if (r.cv, r.rps) == CENTRE})
    if len(scales) < 2:
        return ""
    medians = EndToEnd(source, runs)
    rows = [(f"{x:g}", *(spread(medians.values(s, cv, rps, x)) for s in SYSTEMS)) for x in scales]
    head = ("SLO scale", *(s.label for s in SYSTEMS.values()))
    return f"The same by SLO scale, CV {cv:g}, {rps:g} requests/s:\n\n" + table(head, rows)


def _pct(value: float | None) -> str:
    return "–" if value is None else f"{value:.1f}"


# parts ---------------------------------------------------------------------------------------------------------------


def parts_worth(runs: Sequence[Summary]) -> str:
    """Thaw with one thing changed, compared with Thaw on the same workload."""
    shown = []
    base = SYSTEMS["thaw"]
    for source, title in TITLES.items():
        found = [r for r in runs if r.source == source and r.system in ABLATIONS]
        if found:
            head = f"{base.label}, {title.lower()}, CV {CENTRE[0]:g}, {CENTRE[1]:g} requests/s, {of_seeds(found)}:"
            shown.append(f"{head}\n\n{_worth(base, ABLATIONS, found)}")
    return "\n\n".join(shown)


def _worth(base: SystemSpec, specs: Mapping[str, SystemSpec], runs: Sequence[Summary]) -> str:
    whole = {r.workload: r for r in runs if r.system == base.name}
    rows, lost = [], dict[str, float]()
    for name, spec in specs.items():
        mine = [r for r in runs if r.system == name]
        changes = [r.ttft_pct - whole[r.workload].ttft_pct for r in mine if r.workload in whole]
        if name != base.name and changes:
            lost[spec.label] = statistics.median(changes)
        rows.append(
            (
                spec.label,
                spread([r.ttft_pct for r in mine]),
                spread(changes) if name != base.name else "",
                spread([r.ttft_mean_s for r in mine], 2),
                spread([r.cost_gb_h for r in mine], 0),
            )
        )
    shown = table(("", "TTFT in time %", "change, points", "mean TTFT s", "GB·h"), rows)
    return f"{shown}\n\n{_most_worth(lost)}".rstrip()


def _most_worth(lost: Mapping[str, float]) -> str:
    in_order = sorted(lost, key=lambda label: lost[label])
    costly = [f"{label} ({lost[label]:+.1f})" for label in in_order[:3] if lost[label] < 0]
    better = [f"{label} ({lost[label]:+.1f})" for label in reversed(in_order) if lost[label] > 0]
    said = [f"The changes that cost most points: {'; '.join(costly)}."] if costly else []
    said += [f"Better than with the part, in the median: {'; '.join(better)}."] if better else []
    return " ".join(said)


# what it is compared with --------------------------------------------------------------------------------------------


def _cold(found: Sequence[ColdStart]) -> str:
    systems = list(dict.fromkeys(c.system for c in found))
    cells = {(c.gpu, c.model, c.system): c for c in found}
    rows = []
    for gpu, models in COLD_START_MODELS.items():
        for model in models:
            mine = [cells[gpu, model, s] for s in systems]
            rows.append((gpu, model, *(f"{c.simulated_s:.1f} / {c.published_s:.1f}" for c in mine)))
    names = ["four workers" if s == "paraserve" else SYSTEMS[s].label for s in systems]
    intro = "Seconds to the first token on an idle testbed, simulated / published. The phases' durations were fitted "
    intro += "to these very figures: the table says that the formulas can express them, and validates nothing."
    return intro + "\n\n" + table(("device", "model", *names), rows)


def _bands(bands: Sequence[Band]) -> str:
    rows = []
    for b in bands:
        verdict = "not run" if b.met is None else "met" if b.met else "**missed**"
        rows.append((b.source, b.name, b.published, b.band, b.value, verdict, "" if b.met else b.why))
    met = sum(b.met is True for b in bands)
    intro = (
        f"{met} of {len(bands)} met. No constant was changed to meet one. For a missed one the last column says what "
        "the traces of its runs counted."
    )
    return intro + "\n\n" + table(("of", "what", "published", "band", "simulated", "", "what the traces say"), rows)
