"""Which parts of the platform are running, read from its pid files and /proc."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path

from thaw.dev.layout import Layout, Platform
from thaw.dev.processes import ProcessId, belonging_to, is_alive
from thaw.dev.restarts import AGAIN_AND_AGAIN, STEADY_S, Recorded, read_pid_file

_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True, slots=True)
class Running:
    name: str
    pid: int
    running: bool
    up_s: float = 0.0
    rss_bytes: int = 0
    cpu_s: float = 0.0
    n_restarts: int = 0  # restarts since the platform was started
    in_a_row: int = 0  # the latest of these restarts in a row that each came soon after a start
    cause: str = ""  # the cause of the last restart

    @property
    def ends_again_and_again(self) -> bool:
        return self.in_a_row >= AGAIN_AND_AGAIN and (not self.running or self.up_s < STEADY_S)


def components(layout: Layout, platform: Platform) -> list[Running]:
    """The supervisor and every component, each as one row, and all other processes (containers) as one further row."""
    recorded = {"supervisor": Recorded(platform.supervisor)}
    for path in sorted(layout.pids.glob("*")):
        recorded[path.name] = read_pid_file(path) or Recorded(ProcessId(0, 0))
    rows = [
        replace(_look(name, one.process), n_restarts=one.n_restarts, in_a_row=one.in_a_row, cause=one.cause)
        for name, one in recorded.items()
    ]
    processes = {one.process for one in recorded.values()}
    others = belonging_to(layout.homes, processes) - processes
    looked = [_look("", process) for process in others]
    if looked:
        rows.append(
            Running(
                f"{len(looked)} containers and helpers",
                looked[0].pid,
                True,
                max(r.up_s for r in looked),
                sum(r.rss_bytes for r in looked),
                sum(r.cpu_s for r in looked),
            )
        )
    return rows


def _look(name: str, process: ProcessId) -> Running:
    if not is_alive(process):
        return Running(name, process.pid, False)
    try:
        fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return Running(name, process.pid, False)
    uptime = float(Path("/proc/uptime").read_text().split()[0])
    return Running(
        name,
        process.pid,
        True,
        uptime - int(fields[19]) / _TICKS,
        int(fields[21]) * _PAGE,
        (int(fields[11]) + int(fields[12])) / _TICKS,
    )
