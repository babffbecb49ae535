"""docs/simulation.md from the results: tables a person can read, and every band with its verdict."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from bench.simulation.bands import Band, EndToEnd
from bench.simulation.constants import HASH
from bench.simulation.experiments import ColdStart
from bench.simulation.matrix import CENTRE
from bench.simulation.metrics import Summary
from bench.simulation.reference import COLD_START_MODELS
from bench.simulation.specs import SYSTEMS
from bench.simulation.why import REASONS

_SOURCES = {
    "generated": "Workloads of the project's generator",
    "files": "Workloads from files",
}
_CAVEATS = {
    "generated": "Functions are more evenly popular here than in the published trace, so more are cold (see "
    "the last column); ratios carry information, levels do not.",
    "files": "One hour each, made elsewhere from the published counts of the 2021 Azure trace; that generator "
    "was adjusted until one level (vLLM at CV 8) and the application shares matched, so levels are calibrated and "
    "only relations between systems say something.",
}


def page(
    runs: Sequence[Summary], cold: Sequence[ColdStart], bands: Sequence[Band], facts: Mapping[str, str],
    pictures: Sequence[Path], ablations: tuple[str, Sequence[tuple[str, float, float, float]]],
) -> str:  # fmt: skip
    parts = [Path(__file__).with_name("preface.md").read_text(), _facts(facts)]
    for source, title in _SOURCES.items():
        mine = [r for r in runs if r.source == source]
        if mine:
            shown = [p for p in pictures if p.name.startswith(source)]
            parts += [f"## {title}", _CAVEATS[source], _centre(mine), by_seed(mine), _points(source, mine),
                      _scales(source, mine), _behind(source, mine)]  # fmt: skip
            parts.append("\n\n".join(f"![{p.stem}](simulation/{p.name})" for p in shown))
    parts += ["## What each part is worth", _ablations(*ablations)]
    parts += ["## Calibration: cold starts", _cold(cold), "## Bands", _bands(bands)]
    return "\n\n".join(p for p in parts if p).rstrip() + "\n"


def _table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(str(c) for c in line) + " |" for line in lines)


def _facts(facts: Mapping[str, str]) -> str:
    return "## This report\n\n" + _table(("", ""), [("constants", f"`{HASH}`"), *facts.items()])


def _centre(runs: Sequence[Summary]) -> str:
    cv, rps = CENTRE
    rows = []
    for name, spec in SYSTEMS.items():
        found = [r for r in runs if (r.system, r.cv, r.rps, r.scale) == (name, cv, rps, 1.0)]
        if found:
            r = found[0]
            rows.append((spec.label, f"{r.ttft_pct:.1f}", *(f"{v:.1f}" for v in r.app_pct.values()),
                         f"{r.tpot_pct:.1f}", f"{r.ttft_p50_s:.2f}", f"{r.ttft_mean_s:.2f}", f"{r.ttft_p99_s:.1f}",
                         f"{r.cost_gb_h:.0f}", r.n_failed, f"{r.cold_pct:.0f}"))  # fmt: skip
    if not rows:
        return ""
    apps = [f"{a} %" for a in next(iter(runs)).app_pct]
    head = ("system", "TTFT in time %", *apps, "TPOT in time %", "TTFT p50 s", "mean", "p99", "GB·h", "failed",
            "cold %")  # fmt: skip
    seeds = sorted({r.seed for r in runs})
    return f"CV {cv:g}, {rps:g} requests/s, seed {seeds[0]}:\n\n" + _table(head, rows)


def by_seed(runs: Sequence[Summary]) -> str:
    """How far one seed is from another, and whether Thaw's lead is larger than that."""
    cv, rps = CENTRE
    found = {(r.system, r.seed): r.ttft_pct for r in runs if (r.cv, r.rps, r.scale) == (cv, rps, 1.0)}
    seeds = sorted({seed for _, seed in found})
    if len(seeds) < 2:
        return ""
    rows = [(spec.label, *(_pct(found.get((name, seed))) for seed in seeds)) for name, spec in SYSTEMS.items()]
    leads = [found["thaw", seed] - found["paraserve-cache", seed] for seed in seeds]
    return "\n\n".join((
        f"TTFT attainment in percent by seed, CV {cv:g}, {rps:g} requests/s:",
        _table(("system", *(f"seed {seed}" for seed in seeds)), rows),
        f"Thaw (today) leads ParaServe with a cache with {sum(lead > 0 for lead in leads)} of {len(seeds)} seeds, by "
        f"{min(leads):.1f} to {max(leads):.1f} points.",
    ))  # fmt: skip


def _points(source: str, runs: Sequence[Summary]) -> str:
    points = sorted({(r.cv, r.rps) for r in runs if r.scale == 1.0})
    if len(points) < 2:
        return ""
    means = EndToEnd(source, runs)
    rows = [(f"{cv:g}", f"{rps:g}", *(_pct(means.mean(s, cv, rps)) for s in SYSTEMS)) for cv, rps in points]
    head = ("CV", "requests/s", *(s.label for s in SYSTEMS.values()))
    n = len({r.seed for r in runs})
    return f"TTFT attainment in percent, mean of {n} seed(s):\n\n" + _table(head, rows)


def _scales(source: str, runs: Sequence[Summary]) -> str:
    cv, rps = CENTRE
    scales = sorted({r.scale for r in runs if (r.cv, r.rps) == CENTRE})
    if len(scales) < 2:
        return ""
    means = EndToEnd(source, runs)
    rows = [(f"{x:g}", *(_pct(means.mean(s, cv, rps, x)) for s in SYSTEMS)) for x in scales]
    head = ("SLO scale", *(s.label for s in SYSTEMS.values()))
    return f"The same by SLO scale, CV {cv:g}, {rps:g} requests/s:\n\n" + _table(head, rows)


def _pct(value: float | None) -> str:
    return "–" if value is None else f"{value:.1f}"


def _ablations(workload: str, rows: Sequence[tuple[str, float, float, float]]) -> str:
    head = ("", "TTFT in time %", "mean TTFT s", "GB·h")
    shown = [(name, f"{pct:.1f}", f"{mean_s:.2f}", f"{cost:.0f}") for name, pct, mean_s, cost in rows]
    return f"Thaw with one thing changed, `{workload}`, one run each:\n\n" + _table(head, shown)


def _behind(source: str, runs: Sequence[Summary]) -> str:
    """Where Thaw as it is does not do better than the best published system."""
    means = EndToEnd(source, runs)
    points = sorted({(r.cv, r.rps, r.scale) for r in runs})
    both = [(p, means.mean("thaw", *p), means.mean("paraserve-cache", *p)) for p in points]
    behind = [(p, a, b) for p, a, b in both if a is not None and b is not None and a <= b]
    if not behind:
        return f"At all {len(both)} points Thaw (today) answers more requests in time than ParaServe with a cache."
    named = ", ".join(
        f"CV {cv:g} at {rps:g}/s{'' if scale == 1 else f' ×{scale:g}'} ({a:.1f} against {b:.1f})"
        for (cv, rps, scale), a, b in behind
    )  # fmt: skip
    return (
        f"At {len(behind)} of {len(both)} points Thaw (today) is **not** better than ParaServe with a cache: {named}."
    )


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
    return intro + "\n\n" + _table(("device", "model", *names), rows)


def _bands(bands: Sequence[Band]) -> str:
    rows = []
    for b in bands:
        verdict = "not run" if b.met is None else "met" if b.met else "**missed**"
        why = "" if b.met else next((text for start, text in REASONS if b.name.startswith(start)), "")
        if why and b.evidence:
            why = f"{why} ({b.evidence})"
        rows.append((b.source, b.name, b.published, b.band, b.value, verdict, why))
    met = sum(b.met is True for b in bands)
    intro = f"{met} of {len(bands)} met. No constant was changed to meet one. A missed one says why, as far as known."
    return intro + "\n\n" + _table(("of", "what", "published", "band", "simulated", "", "why"), rows)
