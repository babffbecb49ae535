"""Processes by pid and start time: a pid alone may be another process tomorrow."""

from __future__ import annotations

import os
import select
import signal
import time
from pathlib import Path

from thaw.process.kernel_counts import parse_disk_wait, parse_schedstat


def start_ticks(pid: int) -> int | None:
    """Clock ticks since boot at which ``pid`` started; None if there is no such process or it is a zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = stat[stat.rindex(")") + 2 :].split()  # the name before it may hold anything
    return None if fields[0] in "ZX" else int(fields[19])


def is_alive(pid: int, ticks: int) -> bool:
    return pid > 0 and start_ticks(pid) == ticks


def signal_one(pid: int, ticks: int, sig: signal.Signals) -> None:
    if not is_alive(pid, ticks):
        return
    try:
        os.kill(pid, sig)
    except ProcessLookupError:
        return


def signal_tree(pid: int, ticks: int, sig: signal.Signals) -> None:
    """Signal the process group that ``pid`` leads, or the process itself when it leads none."""
    if not is_alive(pid, ticks):
        return
    try:
        if os.getpgid(pid) == pid:
            os.killpg(pid, sig)
        else:
            os.kill(pid, sig)
    except ProcessLookupError:
        return


def kill_group(pgid: int) -> None:
    """Kill the rest of a group after its leader has ended.  A pid stays reserved while a group has its number."""
    try:
        os.killpg(pgid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        return


def wait_gone(pid: int, ticks: int, deadline_s: float) -> bool:
    """Whether a process, ours or not, has ended within ``deadline_s``."""
    if not is_alive(pid, ticks):
        return True
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        poll = select.poll()
        poll.register(fd, select.POLLIN)
        return bool(poll.poll(1000 * deadline_s))
    finally:
        os.close(fd)


def end_group(pgid: int, deadline_s: float) -> None:
    """Kill the rest of a group whose leader has ended, and return when its memory is free."""
    deadline = time.monotonic() + deadline_s
    members = _members(pgid)
    if members:
        kill_group(pgid)
    for pid, ticks in members:
        wait_gone(pid, ticks, max(0.0, deadline - time.monotonic()))


def _members(pgid: int) -> list[tuple[int, int]]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and (ticks := start_ticks(int(entry.name))) is not None:
            try:
                if os.getpgid(int(entry.name)) == pgid:
                    found.append((int(entry.name), ticks))
            except ProcessLookupError:
                continue
    return found


def spent(task: int | str) -> tuple[float, float]:
    """How the first thread of a process spent its time: CPU seconds, and seconds in which it was ready but another
    thread ran.  ``task`` is a pid or "thread-self".

    Zeros for a process that has ended, and where the kernel does not count it.
    """
    try:
        return parse_schedstat(Path(f"/proc/{task}/schedstat").read_bytes())
    except OSError:
        return 0.0, 0.0


def disk_wait_s(pid: int) -> float:
    """The disk wait of a process's first thread; 0 when it has ended, and where the kernel does not count it."""
    try:
        return parse_disk_wait(Path(f"/proc/{pid}/stat").read_text())
    except OSError:
        return 0.0


def usage(pid: int) -> tuple[int, float]:
    """Resident bytes and CPU seconds; zeros for a process that has ended."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return 0, 0.0
    fields = stat[stat.rindex(")") + 2 :].split()
    ticks = int(fields[11]) + int(fields[12])
    return int(fields[21]) * os.sysconf("SC_PAGE_SIZE"), ticks / os.sysconf("SC_CLK_TCK")
