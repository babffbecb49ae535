"""Published results: ``bench/results/<program>.jsonl``, one line for each run that is still on the page.

A line is the last line that a program printed, without the facts that only concern that run.  The newest measurement of
a figure counts.  A line is removed when each of its figures has been measured again; git keeps the history.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from bench._common import ROOT

DIRECTORY: Final = ROOT / "bench" / "results"
ENOUGH_ROUNDS: Final = 5
"""One slow minute of the machine can change a median of fewer rounds."""

_KEPT: Final = ("bench", "command", "rounds", "path", "goals", "machine")
_KEPT_OF_A_GOAL: Final = ("name", "value", "op", "goal", "ok", "paced", "floor", "rounds")


@dataclass(frozen=True, slots=True)
class Figure:
    """One measured value.  ``op`` is empty and ``ok`` is None where the value has no goal."""

    bench: str
    name: str
    value: float
    op: str
    goal: float | None
    ok: bool | None
    paced: bool
    floor: str
    rounds: int
    command: str
    commit: str
    dirty: bool | None  # None: it was not recorded
    load_1m: tuple[float | None, float | None]  # at the program's beginning and end; None: it was not recorded
    cores: int
    machine: str
    path: str  # the path of messages between its pipelines' stages; "" where there is none, or several

    @property
    def is_indicative(self) -> bool:
        return self.rounds < ENOUGH_ROUNDS


def record(line: Mapping[str, Any], directory: Path = DIRECTORY) -> None:
    """Record a run.  A figure that the run could not measure replaces no earlier one."""
    goals = [{k: v for k, v in g.items() if k in _KEPT_OF_A_GOAL} for g in line["goals"] if g["value"] is not None]
    if not goals:
        return
    new = {k: v for k, v in line.items() if k in _KEPT} | {"goals": goals}
    path = directory / f"{line['bench']}.jsonl"
    lines = [*_read(path), new]
    counted = [one for i, one in enumerate(lines) if _counts(one, lines[i + 1 :])]
    directory.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(one, ensure_ascii=False) + "\n" for one in counted))


def newest(directory: Path = DIRECTORY) -> dict[tuple[str, str], Figure]:
    """The newest figures, by program and name."""
    found = {}
    for path in sorted(directory.glob("*.jsonl")):
        for line in _read(path):
            for goal in line["goals"]:
                found[line["bench"], goal["name"]] = _figure(line, goal)
    return found


def _counts(line: Mapping[str, Any], later: list[Mapping[str, Any]]) -> bool:
    return bool(_names(line) - {name for one in later for name in _names(one)})


def _names(line: Mapping[str, Any]) -> set[str]:
    return {g["name"] for g in line["goals"]}


def _read(path: Path) -> Iterator[Mapping[str, Any]]:
    if path.exists():
        yield from (json.loads(line) for line in path.read_text().splitlines())


def _figure(line: Mapping[str, Any], goal: Mapping[str, Any]) -> Figure:
    machine = line["machine"]
    began, ended = machine["load_1m"]
    return Figure(
        bench=line["bench"],
        name=goal["name"],
        value=goal["value"],
        op=goal.get("op", ""),
        goal=goal.get("goal"),
        ok=goal.get("ok"),
        paced=goal.get("paced", False),
        floor=goal.get("floor", ""),
        rounds=goal.get("rounds", line["rounds"]),
        command=line["command"],
        commit=machine["commit"],
        dirty=machine["dirty"],
        load_1m=(began, ended),
        cores=machine["cores"],
        machine=_describe(machine),
        path=path if isinstance(path := line.get("path"), str) else "",
    )


def _describe(machine: Mapping[str, Any]) -> str:
    return (
        f"{machine['cores']} cores of {machine['cpu']}, {machine['memory_gib']} GiB, Linux {machine['kernel']}, "
        f"Python {machine['python']}"
    )
