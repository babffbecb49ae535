"""The report's charts, made from its runs: attainment by CV, rate, SLO scale and application, and cost."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from bench.simulation import svg
from bench.simulation.bands import EndToEnd
from bench.simulation.constants import APPS
from bench.simulation.matrix import CENTRE
from bench.simulation.metrics import Summary
from bench.simulation.specs import SYSTEMS

Point = Callable[[str, float], float | None]


def write(directory: Path, source: str, runs: Sequence[Summary]) -> list[Path]:
    """Write one file for each chart that has points.  Return the written files."""
    mine = [r for r in runs if r.source == source]
    medians = EndToEnd(source, mine)
    cv, rps = CENTRE
    drawn = {
        "rps": _sweep(f"TTFT attainment, CV {cv:g}", "requests/s", sorted({r.rps for r in mine if r.cv == cv}),
                      lambda s, x: medians.median(s, cv, x)),
        "cv": _sweep(f"TTFT attainment, {rps:g} requests/s", "CV", sorted({r.cv for r in mine if r.rps == rps}),
                     lambda s, x: medians.median(s, x, rps)),
        "slo": _sweep(f"TTFT attainment, CV {cv:g}, {rps:g} requests/s", "SLO scale",
                      sorted({r.scale for r in mine if (r.cv, r.rps) == CENTRE}),
                      lambda s, x: medians.median(s, cv, rps, x)),
        "cost": _sweep(f"device memory held, CV {cv:g}", "requests/s", sorted({r.rps for r in mine if r.cv == cv}),
                       lambda s, x: medians.median(s, cv, x, value=lambda r: r.cost_gb_h), "GB·h"),
        "application": _applications(medians),
    }  # fmt: skip
    written = []
    for name, text in drawn.items():
        if text:
            path = directory / f"{source}-{name}.svg"
            path.write_text(text)
            written.append(path)
    return written


def _sweep(title: str, x_name: str, xs: Sequence[float], point: Point, y_name: str = "%") -> str:
    """Return the chart, or an empty text if there are fewer than two points."""
    if len(xs) < 2:
        return ""
    series = {spec.label: [point(name, x) for x in xs] for name, spec in SYSTEMS.items()}
    return svg.lines(title, x_name, y_name, xs, series)


def _applications(medians: EndToEnd) -> str:
    cv, rps = CENTRE
    if medians.median("vllm", cv, rps) is None:
        return ""

    def pct(system: str, app: str) -> float | None:
        return medians.median(system, cv, rps, value=lambda r: r.app_pct[app])

    series = {spec.label: [pct(name, app) for app in APPS] for name, spec in SYSTEMS.items()}
    return svg.bars(f"TTFT attainment by application, CV {cv:g}, {rps:g} requests/s", "%", list(APPS), series)
