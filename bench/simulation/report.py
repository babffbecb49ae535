"""docs/simulation.md, made from the results: readable tables, and every band with its verdict."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from bench.simulation import why
from bench.simulation.bands import Band, EndToEnd
from bench.simulation.constants import HASH
from bench.simulation.experiments import ColdStart
from bench.simulation.matrix import CENTRE
from bench.simulation.metrics import Summary
from bench.simulation.reference import COLD_START_MODELS
from bench.simulation.specs import ABLATIONS, SYSTEMS, Mechanism, SystemSpec
from bench.simulation.waits import Cause

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
_UNCOUNTED = frozenset((Mechanism.ALGORITHM_1, Mechanism.ADMISSION, Mechanism.DEADLINE_ORDER, Mechanism.PRECREATED))
"""Every start of a system that has these mechanisms uses them, so their uses are not counted."""


def page(
    runs: Sequence[Summary], cold: Sequence[ColdStart], bands: Sequence[Band], facts: Mapping[str, str],
    pictures: Sequence[Path], ablations: Sequence[Summary],
) -> str:  # fmt: skip
    parts = [Path(__file__).with_name("preface.md").read_text(), _facts(facts)]
    parts += ["## What each system has, and lacks", mechanisms(runs)]
    for source, title in _SOURCES.items():
        mine = [r for r in runs if r.source == source]
        if mine:
            shown = [p for p in pictures if p.name.startswith(source)]
            parts += [f"## {title}", _CAVEATS[source], _centre(source, mine), by_seed(mine), late(source, mine),
                      _points(source, mine), _scales(source, mine), _behind(source, mine)]  # fmt: skip
            parts.append("\n\n".join(f"![{p.stem}](simulation/{p.name})" for p in shown))
    if ablations:
        parts += ["## What each part is worth", parts_worth(ablations)]
    parts += ["## Calibration: cold starts", _cold(cold), "## Bands", _bands(bands)]
    return "\n\n".join(p for p in parts if p).rstrip() + "\n"


def _table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(str(c) for c in line) + " |" for line in lines)


def _facts(facts: Mapping[str, str]) -> str:
    return "## This report\n\n" + _table(("", ""), [("constants", f"`{HASH}`"), *facts.items()])


# the systems' mechanisms ---------------------------------------------------------------------------------------------


def mechanisms(runs: Sequence[Summary]) -> str:
    """The mechanisms of each system's specification, with how often the runs at the centre used each of them."""
    used = {name: _used([r for r in runs if r.system == name and _is_centre(r)]) for name in SYSTEMS}
    rows = [(m, *(_has(spec, m, used[name]) for name, spec in SYSTEMS.items())) for m in Mechanism]
    choices = [
        ("placement", *(_placement(spec) for spec in SYSTEMS.values())),
        ("phases of a start", *(spec.phases for spec in SYSTEMS.values())),
    ]
    intro = (
        "The table is made from the specifications that the simulator runs (`bench/simulation/specs.py`). A number "
        f"says how often the runs at CV {CENTRE[0]:g} and {CENTRE[1]:g} requests/s used the mechanism in 100 starts. "
        '"Not simulated" means that the published system has it and the simulated one does not.'
    )
    table = _table(("", *(spec.label for spec in SYSTEMS.values())), [*choices, *rows])
    lacking = "\n".join(f"- {spec.label} lacks: {_lacks(spec)}." for name, spec in SYSTEMS.items() if name != "thaw")
    return "\n\n".join((intro, table, "Compared with Thaw (today):", lacking))


def _is_centre(run: Summary) -> bool:
    return (run.cv, run.rps) == CENTRE and run.scale == 1.0


def _used(runs: Sequence[Summary]) -> dict[str, float]:
    """Mechanism → how often it was used in 100 starts."""
    n_starts = sum(r.n_starts for r in runs)
    return {m.name: 100 * sum(r.used.get(m.name, 0) for r in runs) / n_starts for m in Mechanism} if n_starts else {}


def _has(spec: SystemSpec, mechanism: Mechanism, used: Mapping[str, float]) -> str:
    if mechanism in spec.not_simulated:
        return "not simulated"
    if mechanism not in spec.mechanisms:
        return "–"
    return "yes" if mechanism in _UNCOUNTED or not used else f"yes ({used[mechanism.name]:.0f})"


def _placement(spec: SystemSpec) -> str:
    selects = Mechanism.ALGORITHM_1 in spec.mechanisms
    return f"{spec.placing}, `{spec.variant}`" if selects else str(spec.placing)


def _lacks(spec: SystemSpec) -> str:
    lacking = [m for m in Mechanism if m in SYSTEMS["thaw"].mechanisms - spec.mechanisms]
    more = [m for m in Mechanism if m in spec.mechanisms - SYSTEMS["thaw"].mechanisms]
    has = f"; it has what Thaw lacks: {'; '.join(more)}" if more else ""
    return ("; ".join(lacking) or "nothing") + has


# end to end ----------------------------------------------------------------------------------------------------------


def spread(values: Sequence[float], digits: int = 1) -> str:
    """The median, followed by the lowest and the highest value where there are several values."""
    if not values:
        return "–"
    median = f"{statistics.median(values):.{digits}f}"
    return median if len(values) == 1 else f"{median} ({min(values):.{digits}f}–{max(values):.{digits}f})"


def _of_seeds(runs: Sequence[Summary]) -> str:
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
    return f"CV {cv:g}, {rps:g} requests/s, {_of_seeds(runs)}:\n\n" + _table(head, rows)


def by_seed(runs: Sequence[Summary]) -> str:
    """A table of the values by seed, and Thaw's lead over ParaServe with a cache for each seed."""
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
        f"What the late requests waited for, CV {CENTRE[0]:g}, {CENTRE[1]:g} requests/s, all runs: how many of them "
        "waited longest for this, and the mean seconds that a late request waited for it."
    )
    return f"{intro}\n\n" + _table(("system", "late requests", *Cause), rows)


def _points(source: str, runs: Sequence[Summary]) -> str:
    points = sorted({(r.cv, r.rps) for r in runs if r.scale == 1.0})
    if len(points) < 2:
        return ""
    medians = EndToEnd(source, runs)
    rows = [(f"{cv:g}", f"{rps:g}", *(spread(medians.values(s, cv, rps)) for s in SYSTEMS)) for cv, rps in points]
    head = ("CV", "requests/s", *(s.label for s in SYSTEMS.values()))
    return f"TTFT attainment in percent, {_of_seeds(runs)}:\n\n" + _table(head, rows)


def _scales(source: str, runs: Sequence[Summary]) -> str:
    cv, rps = CENTRE
    scales = sorted({r.scale for r in runs if (r.cv, r.rps) == CENTRE})
    if len(scales) < 2:
        return ""
    medians = EndToEnd(source, runs)
    rows = [(f"{x:g}", *(spread(medians.values(s, cv, rps, x)) for s in SYSTEMS)) for x in scales]
    head = ("SLO scale", *(s.label for s in SYSTEMS.values()))
    return f"The same by SLO scale, CV {cv:g}, {rps:g} requests/s:\n\n" + _table(head, rows)


def _pct(value: float | None) -> str:
    return "–" if value is None else f"{value:.1f}"


def _behind(source: str, runs: Sequence[Summary]) -> str:
    """Name the points at which today's Thaw is not better than the best published system."""
    medians = EndToEnd(source, runs)
    points = sorted({(r.cv, r.rps, r.scale) for r in runs})
    both = [(p, medians.median("thaw", *p), medians.median("paraserve-cache", *p)) for p in points]
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


# parts ---------------------------------------------------------------------------------------------------------------


def parts_worth(runs: Sequence[Summary]) -> str:
    """Thaw with one thing changed, compared with Thaw on the same workload."""
    shown = []
    for base in (SYSTEMS["thaw"], SYSTEMS["thaw-planned"]):
        mine = {n: s for n, s in ABLATIONS.items() if n == base.name or n.startswith(f"{base.name}:")}
        for source, title in _SOURCES.items():
            found = [r for r in runs if r.source == source and r.system in mine]
            if found:
                head = f"{base.label}, {title.lower()}, CV {CENTRE[0]:g}, {CENTRE[1]:g} requests/s, {_of_seeds(found)}:"
                shown.append(f"{head}\n\n{_worth(base, mine, found)}")
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
    table = _table(("", "TTFT in time %", "change, points", "mean TTFT s", "GB·h"), rows)
    return f"{table}\n\n{_most_worth(lost)}".rstrip()


def _most_worth(lost: Mapping[str, float]) -> str:
    in_order = sorted(lost, key=lambda label: lost[label])
    costly = [f"{label} ({lost[label]:+.1f})" for label in in_order[:3] if lost[label] < 0]
    better = [f"{label} ({lost[label]:+.1f})" for label in reversed(in_order) if lost[label] > 0]
    said = [f"The changes that cost most points: {'; '.join(costly)}."] if costly else []
    said += [f"Better than with the part, in the median: {'; '.join(better)}."] if better else []
    return " ".join(said)


# published results ---------------------------------------------------------------------------------------------------


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
        rows.append((b.source, b.name, b.published, b.band, b.value, verdict, "" if b.met else b.why))
    met = sum(b.met is True for b in bands)
    intro = (
        f"{met} of {len(bands)} met. No constant was changed to meet one. For a missed one the last column says what "
        "the traces of its runs counted."
    )
    return intro + "\n\n" + _table(("of", "what", "published", "band", "simulated", "", "what the traces say"), rows)
