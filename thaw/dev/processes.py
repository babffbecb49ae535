"""Processes by identity.  A pid alone may mean another process tomorrow; a pid with its start time never does."""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

MARK = "THAW_DEV_RUN"
"""Every child has this variable, set to the platform's run directory: a process with it belongs to that platform."""


@dataclass(frozen=True, slots=True)
class ProcessId:
    pid: int
    start_ticks: int


@dataclass(frozen=True, slots=True)
class _Row:
    identity: ProcessId
    parent: int
    session: int
    tty: int
    state: str


def identify(pid: int) -> ProcessId | None:
    row = _row(pid)
    return None if row is None else row.identity


def is_alive(process: ProcessId) -> bool:
    row = _row(process.pid)
    return row is not None and row.identity == process and row.state != "Z"


def belonging_to(directories: Iterable[Path], seeds: Iterable[ProcessId] = ()) -> set[ProcessId]:
    """Every process of the platform with these directories, except the caller.

    These are the processes that work in one of the directories, or have one (the mark, or a path below it) in their
    environment, and the given ``seeds``.  Processes that descend from them, or are in a session that one of them leads,
    belong to the platform as well, because a function may start anything.
    """
    rows = _table()
    wanted = {p.pid for p in seeds if p.pid in rows and rows[p.pid].identity == p}
    wanted |= {pid for pid, row in rows.items() if any(_is_marked(row, d) for d in directories)}
    while True:
        grown = wanted | {pid for pid, row in rows.items() if row.parent in wanted or row.session in wanted}
        if grown == wanted:
            break
        wanted = grown
    return {rows[pid].identity for pid in wanted if pid != os.getpid() and rows[pid].state != "Z"}


def send(processes: Iterable[ProcessId], sig: signal.Signals) -> None:
    for process in processes:
        if is_alive(process):
            try:
                os.kill(process.pid, sig)
            except ProcessLookupError:
                continue  # the process ended in the meantime


def wait_gone(processes: Iterable[ProcessId], deadline_s: float) -> set[ProcessId]:
    """Wait for the ends of these processes; return those that still run after ``deadline_s`` seconds."""
    poller = select.poll()
    left: dict[int, ProcessId] = {}
    for process in processes:
        fd = _open_pidfd(process)
        if fd is not None:
            left[fd] = process
            poller.register(fd, select.POLLIN)
    end = time.monotonic() + deadline_s
    try:
        while left and (remaining := end - time.monotonic()) > 0:
            for fd, _ in poller.poll(remaining * 1000):
                poller.unregister(fd)
                os.close(fd)
                del left[fd]
        return set(left.values())
    finally:
        for fd in left:
            os.close(fd)


def _open_pidfd(process: ProcessId) -> int | None:
    try:
        fd = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return None
    if not is_alive(process):  # checked after the opening, so the pidfd cannot belong to another process
        os.close(fd)
        return None
    return fd


def _table() -> dict[int, _Row]:
    found = (_row(int(name)) for name in os.listdir("/proc") if name.isdigit())
    return {row.identity.pid: row for row in found if row is not None}


def _row(pid: int) -> _Row | None:
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = text.rpartition(")")[2].split()  # the name before ")" may contain anything, also blanks and brackets
    return _Row(ProcessId(pid, int(fields[19])), int(fields[1]), int(fields[3]), int(fields[4]), fields[0])


def _is_marked(row: _Row, directory: Path) -> bool:
    pid = row.identity.pid
    try:
        cwd = os.readlink(f"/proc/{pid}/cwd")
        environ = Path(f"/proc/{pid}/environ").read_bytes()
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return False
    text = os.fsencode(directory)
    # valkey and gunicorn overwrite their environment with their title, so their working directory identifies them.
    # A person's shell in that directory has a terminal.
    works_here = row.tty == 0 and (cwd + "/").startswith(f"{directory}/")
    # A zygote's environment is bare, so that no credential is forked.  A `tail -f` of a log must not match.
    is_zygote = b"thaw_runtime" in command and text + b"/" in command
    return works_here or is_zygote or text + b"\0" in environ or text + b"/" in environ
