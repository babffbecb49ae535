"""The results of a run of the simulator: docs/simulation/results.json, from which the page and its charts are written.

Numbers are rounded to five digits.  A table is its columns and then one row a line, so that a diff shows the changes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

from bench.simulation.bands import Band
from bench.simulation.experiments import ColdStart
from bench.simulation.metrics import Summary

NAME: Final = "results.json"
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Record:
    """``code`` is the digest of all ``modules``.  The digest of each module tells whether it has changed since
    (provenance.py).
    """

    constants: str
    size: str  # in words: which points and how many seeds
    commit: str
    code: str
    modules: Mapping[str, str]
    runs: tuple[Summary, ...]
    ablations: tuple[Summary, ...]  # Thaw with one thing changed
    cold_starts: tuple[ColdStart, ...]
    bands: tuple[Band, ...]

    def write(self, directory: Path) -> None:
        facts = {
            "constants": self.constants,
            "size": self.size,
            "commit": self.commit,
            "code": self.code,
            "modules": dict(self.modules),
        }
        tables: Mapping[str, Sequence[Summary | ColdStart | Band]]
        tables = {"runs": self.runs, "ablations": self.ablations, "cold_starts": self.cold_starts, "bands": self.bands}
        rows = {name: [asdict(each) for each in found] for name, found in tables.items()}
        (directory / NAME).write_text(_lines(facts, rows) + "\n")


def read(directory: Path) -> Record:
    """Read the record.  Raises FileNotFoundError if nothing was recorded."""
    plain = json.loads((directory / NAME).read_text())
    return Record(
        plain["constants"],
        plain["size"],
        plain["commit"],
        plain["code"],
        plain["modules"],
        _rows(Summary, plain["runs"]),
        _rows(Summary, plain["ablations"]),
        _rows(ColdStart, plain["cold_starts"]),
        _rows(Band, plain["bands"]),
    )


def _rows(kind: type[T], table: Mapping[str, Any]) -> tuple[T, ...]:
    return tuple(kind(**dict(zip(table["columns"], row, strict=True))) for row in table["rows"])


def _lines(facts: Mapping[str, Any], tables: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    parts = [f'"{k}": {json.dumps(v)}' for k, v in facts.items()]
    for name, rows in tables.items():
        columns = json.dumps(list(rows[0]) if rows else [])
        plain = ",\n  ".join(json.dumps([_short(v) for v in row.values()], ensure_ascii=False) for row in rows)
        parts.append(f'"{name}": {{"columns": {columns}, "rows": [\n  {plain}\n ]}}')
    return "{" + ",\n ".join(parts) + "}"


def _short(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _short(v) for k, v in value.items()}
    return float(f"{value:.5g}") if isinstance(value, float) else value
