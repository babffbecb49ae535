"""Writes docs/simulation.md from the record.  The page has what a reader needs; tables.py writes every other number."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from bench.simulation import charts, record, tables, why
from bench.simulation.bands import Band, EndToEnd
from bench.simulation.matrix import CENTRE
from bench.simulation.metrics import Summary
from bench.simulation.record import Record
from bench.simulation.specs import ABLATIONS, SYSTEMS, Mechanism, SystemSpec
from bench.simulation.tables import TITLES, spread, table
from bench.simulation.waits import Cause

_SHOWN: Final = ("generated-rps", "generated-slo", "generated-application", "files-rps")
"""The charts of this page; the others are on the page of the tables."""
_UNCOUNTED: Final = frozenset(
    (Mechanism.ALGORITHM_1, Mechanism.ADMISSION, Mechanism.DEADLINE_ORDER, Mechanism.PRECREATED)
)
"""Every start of a system that has these mechanisms uses them, so their uses are not counted."""
_SHARE_SHOWN: Final = 0.005
"""A cause that explains less than this of every system's late requests has no column."""


def write(docs: Path) -> None:
    """Write the page, its tables and its charts from what ``docs``/simulation/results.json records."""
    directory = docs / "simulation"
    found = record.read(directory)
    drawn = [path.stem for path in charts.write(directory, found.runs)]
    (docs / "simulation.md").write_text(page(found, [name for name in drawn if name in _SHOWN]))
    (directory / "tables.md").write_text(tables.page(found, [name for name in drawn if name not in _SHOWN]))


def page(found: Record, drawn: Sequence[str]) -> str:
    parts = [_text("preface.md"), _result(found.runs), _pictures(drawn), _late(found.runs)]
    parts += [_parts_worth(found.ablations), _mechanisms(found.runs), _published(found.bands), _text("method.md")]
    parts.append(_provenance(found))
    return "\n\n".join(p for p in parts if p).rstrip() + "\n"


def _text(name: str) -> str:
    return Path(__file__).with_name(name).read_text().rstrip()


def _pictures(drawn: Sequence[str]) -> str:
    return "\n\n".join(f"![{name}](simulation/{name}.svg)" for name in drawn)


# results -------------------------------------------------------------------------------------------------------------


def _result(runs: Sequence[Summary]) -> str:
    cv, rps = CENTRE
    sources = [s for s in TITLES if any(r.source == s and _is_centre(r) for r in runs)]
    if not sources:
        return ""
    medians = {source: EndToEnd(source, runs) for source in sources}
    head, rows = ["system"], []
    for source in sources:
        head += [f"{charts.SOURCES[source]}: in time %", "mean TTFT s"]
    for name, spec in SYSTEMS.items():
        cells = [spec.label]
        for source in sources:
            mean_s = medians[source].median(name, cv, rps, value=lambda r: r.ttft_mean_s)
            cells += [spread(medians[source].values(name, cv, rps)), "–" if mean_s is None else f"{mean_s:.1f}"]
        rows.append(cells)
    intro = (
        f"## Results\n\nAt CV {cv:g} and {rps:g} requests/s: the share of requests whose first token came in time, as "
        "the median over the seeds (in parentheses the lowest and the highest), and the mean time to the first token."
    )
    said = [behind(source, [r for r in runs if r.source == source]) for source in sources]
    seeds = [lead(mine) for source in sources if (mine := [r for r in runs if r.source == source])]
    return "\n\n".join((intro, table(head, rows), " ".join(s for s in (*seeds, *said) if s)))


def lead(runs: Sequence[Summary]) -> str:
    """Say for how many seeds Thaw is better at the centre.  The text is empty for one seed."""
    found = {(r.system, r.seed): r.ttft_pct for r in runs if _is_centre(r)}
    seeds = sorted({seed for _, seed in found})
    if len(seeds) < 2:
        return ""
    leads = [found["thaw", seed] - found["paraserve-cache", seed] for seed in seeds]
    return (
        f"Thaw leads ParaServe with a cache in {sum(each > 0 for each in leads)} of {len(seeds)} seeds, by "
        f"{min(leads):.1f} to {max(leads):.1f} points."
    )


def behind(source: str, runs: Sequence[Summary]) -> str:
    """Name the points at which today's Thaw is not better than the best published system."""
    medians, whose = EndToEnd(source, runs), charts.SOURCES[source]
    points = sorted({(r.cv, r.rps, r.scale) for r in runs})
    both = [(p, medians.median("thaw", *p), medians.median("paraserve-cache", *p)) for p in points]
    worse = [(p, a, b) for p, a, b in both if a is not None and b is not None and a <= b]
    if not worse:
        return (
            f"At all {len(both)} points of the {whose} Thaw answers more requests in time than ParaServe with a cache."
        )
    named = ", ".join(
        f"CV {cv:g} at {rps:g}/s{'' if scale == 1 else f' ×{scale:g}'} ({a:.1f} against {b:.1f})"
        for (cv, rps, scale), a, b in worse
    )
    return (
        f"At {len(worse)} of {len(both)} points of the {whose} Thaw is **not** better than ParaServe with a "
        f"cache: {named}."
    )


def _late(runs: Sequence[Summary]) -> str:
    """A table of why requests are late, at the centre, for the first source that has runs."""
    mine = [r for r in runs if _is_centre(r)]
    source = next((s for s in TITLES if any(r.source == s for r in mine)), "")
    counts = {name: why.late(r for r in mine if (r.source, r.system) == (source, name)) for name in SYSTEMS}
    shares = {name: {c: n / found.total() for c, n in found.items()} for name, found in counts.items() if found}
    shown = [c for c in Cause if any(share.get(c, 0.0) >= _SHARE_SHOWN for share in shares.values())]
    if not shown:
        return ""
    rows = [
        (SYSTEMS[name].label, counts[name].total(), *(f"{100 * share.get(c, 0.0):.0f}" for c in shown))
        for name, share in shares.items()
    ]
    intro = (
        f"## Why requests are late\n\nThe share, in percent, of the late requests whose longest wait was this "
        f"({charts.SOURCES[source]}, CV {CENTRE[0]:g}, {CENTRE[1]:g} requests/s). [Below](#how-waits-are-counted) the "
        "causes are explained."
    )
    return f"{intro}\n\n" + table(("system", "late requests", *shown), rows)


def _parts_worth(runs: Sequence[Summary]) -> str:
    """A table of the points of attainment that Thaw loses without each of its parts, for each source."""
    base = SYSTEMS["thaw"]
    changed = {n: spec for n, spec in ABLATIONS.items() if n.startswith(f"{base.name}:")}
    found = {source: _changes(source, runs, base, changed) for source in TITLES}
    sources = [source for source, changes in found.items() if changes]
    if not sources:
        return ""
    rows = [(spec.label, *(spread(found[s].get(name, ())) for s in sources)) for name, spec in changed.items()]
    intro = (
        "## What each part is worth\n\nThaw with one thing changed, at the same point: by how many points the "
        "share of requests in time changes. [The tables](simulation/tables.md#what-each-part-is-worth) have times and "
        "costs too."
    )
    return f"{intro}\n\n" + table(("change", *(charts.SOURCES[s] for s in sources)), rows)


def _changes(
    source: str, runs: Sequence[Summary], base: SystemSpec, changed: Mapping[str, SystemSpec]
) -> dict[str, list[float]]:
    whole = {r.workload: r.ttft_pct for r in runs if (r.source, r.system) == (source, base.name)}
    found = {
        name: [
            r.ttft_pct - whole[r.workload]
            for r in runs
            if (r.source, r.system) == (source, name) and r.workload in whole
        ]
        for name in changed
    }
    return {name: points for name, points in found.items() if points}


# the systems' mechanisms ---------------------------------------------------------------------------------------------


def _mechanisms(runs: Sequence[Summary]) -> str:
    return "## What each system has\n\n" + mechanisms(runs)


def mechanisms(runs: Sequence[Summary]) -> str:
    """The mechanisms of each system's specification, with how often the runs at the centre used each of them."""
    used = {name: _used([r for r in runs if r.system == name and _is_centre(r)]) for name in SYSTEMS}
    rows = [(m, *(_has(spec, m, used[name]) for name, spec in SYSTEMS.items())) for m in Mechanism]
    choices = [
        ("placement", *(_placement(spec) for spec in SYSTEMS.values())),
        ("phases of a start", *(spec.phases for spec in SYSTEMS.values())),
    ]
    intro = (
        "The simulator runs these specifications (`bench/simulation/specs.py`). A number says how often the runs at "
        f"CV {CENTRE[0]:g} and {CENTRE[1]:g} requests/s used the mechanism in 100 starts. "
        '"Not simulated" means that the published system has it and the simulated one does not.'
    )
    return intro + "\n\n" + table(("", *(spec.label for spec in SYSTEMS.values())), [*choices, *rows])


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


# published results ---------------------------------------------------------------------------------------------------


_OF = {
    "calibration": "cold starts, to which the constants were fitted",
    "scenario": "single experiments of the papers",
    "generated": "attainment, workloads of the project's generator",
    "files": "attainment, workloads from files",
}


def _published(bands: Sequence[Band]) -> str:
    rows = []
    for source, of in _OF.items():
        mine = [b.met for b in bands if b.source == source]
        if mine:
            rows.append((of, *(sum(met is verdict for met in mine) for verdict in (True, False, None))))
    intro = (
        "## How near this comes to what was published\n\nFor each published figure there is a band in which the "
        "simulator should land. No constant was changed to meet one. [The tables](simulation/tables.md#bands) say for "
        "each missed band what the traces of its runs counted."
    )
    return f"{intro}\n\n" + table(("published figures", "met", "missed", "not run"), rows)


def _provenance(found: Record) -> str:
    rows = [
        ("size", found.size),
        ("made with", found.commit),
        ("policy code", f"`{found.code}`: {len(found.modules)} modules, without comments, docstrings, imports"),
        ("constants", f"`{found.constants}`"),
        ("numbers", "[results.json](simulation/results.json), [every table](simulation/tables.md)"),
    ]
    return "## This report\n\n" + table(("", ""), rows)
