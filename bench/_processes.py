"""Find the process that computes, and choose the cores on which a process may run."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path

from bench._common import cpu_seconds


def busiest(pids: Iterable[int], work: Callable[[], object]) -> int:
    """The process that used the most CPU time while ``work`` ran."""
    known = list(pids)
    before = {pid: _cpu(pid) for pid in known}
    work()
    return max(known, key=lambda pid: _cpu(pid) - before[pid])


def pin(pid: int, core: int) -> None:
    """Pin every thread of ``pid`` to ``core``.  Threads that they start later inherit this."""
    for thread in Path(f"/proc/{pid}/task").iterdir():
        os.sched_setaffinity(int(thread.name), {core})


def wake_ups(pid: int) -> int:
    """How often the threads of ``pid`` have gone to sleep so far."""
    statuses = [status.read_text().splitlines() for status in Path(f"/proc/{pid}/task").glob("*/status")]
    return sum(int(line.split()[1]) for lines in statuses for line in lines if line.startswith("voluntary"))


def tree(pid: int) -> list[int]:
    """All descendants of ``pid``."""
    parents = {int(p.name): _parent(p) for p in Path("/proc").iterdir() if p.name.isdigit()}
    found = {pid}
    while grown := {child for child, parent in parents.items() if parent in found} - found:
        found |= grown
    return sorted(found - {pid})


def _parent(process: Path) -> int:
    try:
        return int((process / "stat").read_text().rpartition(")")[2].split()[1])
    except (FileNotFoundError, ProcessLookupError):
        return 0


def _cpu(pid: int) -> float:
    try:
        return cpu_seconds(pid)
    except OSError:
        return 0.0
