"""The report's charts, made from its recorded runs: attainment by CV, rate, SLO scale and application, and cost.

matplotlib draws them.  Equal runs give equal files: ids come from a fixed salt, and no date is written.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

from bench.simulation.bands import EndToEnd
from bench.simulation.constants import APPS
from bench.simulation.matrix import CENTRE
from bench.simulation.metrics import Summary
from bench.simulation.specs import SYSTEMS

Values = Mapping[str, Sequence[float | None]]
"""The values of each system, by its name.  A value is None where there was no run."""

SOURCES: Final = {"generated": "generated workloads", "files": "workload files"}
_COLOURS: Final = dict(
    zip(
        SYSTEMS,
        ("#8c8c8c", "#d99a2b", "#9a5b24", "#7db8e8", "#2b7bba", "#123f7a", "#1d8f4e"),
        strict=True,
    )
)
_MARKERS: Final = dict(zip(SYSTEMS, "osD^v<*", strict=True))
_STYLE: Final[dict[Any, Any]] = {
    "svg.hashsalt": "thaw",
    "svg.fonttype": "none",
    "font.size": 11,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#dddddd",
    "legend.frameon": False,
}
"""Text stays text.  The layout is made for DejaVu Sans, and the fonts that a viewer may use instead are narrower."""
_SIZE_IN, _PAD_IN = (9.6, 4.4), 0.12


def write(directory: Path, runs: Sequence[Summary]) -> list[Path]:
    """Write one file for each chart that has points.  Return the written files."""
    return [path for source in SOURCES for path in _of_source(directory, source, runs)]


def _of_source(directory: Path, source: str, runs: Sequence[Summary]) -> list[Path]:
    mine = [r for r in runs if r.source == source]
    medians, (cv, rps) = EndToEnd(source, mine), CENTRE
    rates = sorted({r.rps for r in mine if r.cv == cv})
    cvs = sorted({r.cv for r in mine if r.rps == rps})
    scales = sorted({r.scale for r in mine if (r.cv, r.rps) == CENTRE})
    whose = SOURCES[source]
    drawn = {
        "rps": _sweep(f"{whose}, CV {cv:g}", "requests/s", rates, lambda s, x: medians.median(s, cv, x)),
        "cv": _sweep(f"{whose}, {rps:g} requests/s", "CV", cvs, lambda s, x: medians.median(s, x, rps)),
        "slo": _sweep(
            f"{whose}, CV {cv:g}, {rps:g} requests/s",
            "objectives, as multiples of the paper's",
            scales,
            lambda s, x: medians.median(s, cv, rps, x),
        ),
        "cost": _sweep(
            f"{whose}, CV {cv:g}",
            "requests/s",
            rates,
            lambda s, x: medians.median(s, cv, x, value=lambda r: r.cost_gb_h),
            "device memory held, GB·h",
        ),
        "application": _applications(whose, medians),
    }
    written = []
    for name, draw in drawn.items():
        if draw is not None:
            written.append(_save(directory / f"{source}-{name}.svg", draw))
    return written


Draw = Callable[[Axes], None]


def _save(path: Path, draw: Draw) -> Path:
    with matplotlib.rc_context(_STYLE):
        figure = Figure(_SIZE_IN, layout=ConstrainedLayoutEngine(h_pad=_PAD_IN, w_pad=_PAD_IN))
        axes = figure.add_subplot()
        draw(axes)
        axes.set_ylim(bottom=0)
        figure.legend(loc="outside right upper", borderaxespad=1.2)
        figure.savefig(path, format="svg", metadata={"Date": None, "Creator": None})
    return path


def _sweep(
    title: str,
    x_name: str,
    xs: Sequence[float],
    point: Callable[[str, float], float | None],
    y_name: str = "requests answered in time, %",
) -> Draw | None:
    """Return a function that draws the chart, or None if there are fewer than two points."""
    if len(xs) < 2:
        return None
    return lambda axes: lines(axes, title, x_name, y_name, xs, {s: [point(s, x) for x in xs] for s in SYSTEMS})


def lines(axes: Axes, title: str, x_name: str, y_name: str, xs: Sequence[float], values: Values) -> None:
    """Draw one line for each system.  Missing points are left out."""
    axes.set(title=title, xlabel=x_name, ylabel=y_name)
    axes.set_xticks(list(xs), [f"{x:g}" for x in xs])
    for system, ys in values.items():
        known = [(x, y) for x, y in zip(xs, ys, strict=True) if y is not None]
        axes.plot(
            [x for x, _ in known],
            [y for _, y in known],
            color=_COLOURS[system],
            marker=_MARKERS[system],
            linewidth=3 if system == "thaw" else 1.8,
            markersize=8 if system == "thaw" else 5,
            label=SYSTEMS[system].label,
        )


def bars(axes: Axes, title: str, y_name: str, groups: Sequence[str], values: Values) -> None:
    """Draw one bar for each group and system."""
    axes.set(title=title, ylabel=y_name)
    axes.set_xticks(range(len(groups)), groups)
    axes.grid(visible=False, axis="x")
    width = 0.84 / max(1, len(values))
    for i, (system, heights) in enumerate(values.items()):
        at = [g + (i - (len(values) - 1) / 2) * width for g in range(len(groups))]
        known = [(x, y) for x, y in zip(at, heights, strict=True) if y is not None]
        axes.bar(
            [x for x, _ in known],
            [y for _, y in known],
            0.9 * width,
            color=_COLOURS[system],
            label=SYSTEMS[system].label,
        )


def _applications(whose: str, medians: EndToEnd) -> Draw | None:
    cv, rps = CENTRE
    if medians.median("vllm", cv, rps) is None:
        return None

    def pct(system: str, app: str) -> float | None:
        return medians.median(system, cv, rps, value=lambda r: r.app_pct[app])

    values = {s: [pct(s, app) for app in APPS] for s in SYSTEMS}
    title = f"{whose}, CV {cv:g}, {rps:g} requests/s"
    return lambda axes: bars(axes, title, "requests answered in time, %", list(APPS), values)
