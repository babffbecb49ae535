"""The list of runs, each with its key.  A run that has a checkpoint is not made again.

A checkpoint's key includes the digest of all code that could change its result, the constants included, so a stale
checkpoint is never read.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench.simulation.metrics import Summary, parameters, summarise
from bench.simulation.run import simulate
from bench.simulation.specs import ABLATIONS, SYSTEMS, Objectives
from bench.simulation.workload import Workload, generate

CVS = (2.0, 4.0, 8.0)
ALL_RPS = (0.2, 0.4, 0.6, 0.7, 0.8, 1.0)
SCALES = (0.5, 0.75, 1.0, 1.5, 2.0)
CENTRE = (8.0, 0.6)
"""CV and requests/s of the point at which the SLO scales are swept."""


@dataclass(frozen=True, slots=True)
class Run:
    source: str
    workload: Workload
    system: str
    scale: float = 1.0

    @property
    def name(self) -> str:
        return f"{self.source} {self.workload.name} {self.system} ×{self.scale:g}"

    def key(self, code: str) -> str:
        rows = repr(
            [(r.arrival_s, r.function, r.app, r.model, r.input_tokens, r.output_tokens) for r in self.workload.requests]
        )
        text = f"{code} {self.source} {self.workload.name} {rows} {self.system} {self.scale}"
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    def make(self) -> Summary:
        objectives = Objectives(self.scale)
        outcome = simulate(self.workload, (SYSTEMS | ABLATIONS)[self.system], "ii", objectives)
        return summarise(self.source, self.workload.name, self.system, outcome, objectives)


def sweep(source: str, workloads: Sequence[Workload], *, scales: bool) -> Iterator[Run]:
    for workload in workloads:
        centre = scales and parameters(workload.name)[:2] == CENTRE
        for scale in SCALES if centre else (1.0,):
            for system in SYSTEMS:
                yield Run(source, workload, system, scale)


def ablations(source: str, workloads: Sequence[Workload]) -> Iterator[Run]:
    """Runs of Thaw with one thing changed, at the centre."""
    for workload in workloads:
        if parameters(workload.name)[:2] == CENTRE:
            for system in ABLATIONS:
                yield Run(source, workload, system)


def generated(seeds: Sequence[int], size: str) -> list[Workload]:
    """``size`` is ``quick`` for the centre, ``paper`` for the published points, or ``all`` for every rate."""
    cvs, rates = {
        "quick": ((CENTRE[0],), (CENTRE[1],)),
        "paper": (CVS, (0.6, 0.7, 0.8)),
        "all": (CVS, ALL_RPS),
    }[size]
    return [generate(cv, rps, seed) for seed in seeds for cv in cvs for rps in rates]


class Checkpoints:
    """``code`` is the digest of all code that a result depends on."""

    def __init__(self, directory: Path, code: str) -> None:
        self._directory, self._code = directory, code
        directory.mkdir(parents=True, exist_ok=True)

    def get_or_make(self, run: Run) -> tuple[Summary, bool]:
        """Return the result, and whether it had a checkpoint.  An incomplete file is made again."""
        path = self._directory / f"{run.key(self._code)}.json"
        try:
            plain: dict[str, Any] = json.loads(path.read_text())
            return Summary(**plain), True
        except (FileNotFoundError, json.JSONDecodeError, TypeError):
            summary = run.make()
        part = path.with_suffix(".part")
        part.write_text(json.dumps(asdict(summary)))
        part.replace(path)
        return summary, False
