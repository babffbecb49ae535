"""The supervisor's records of its components, which survive even a full disk.

``pids/COMPONENT`` says which process a component is, how often it was restarted and why.  The size of the file never
changes, so it can be overwritten when the disk is full.  ``supervisor.log`` has one line for each restart.  Lines that
cannot be written because the disk is full are kept in memory and written before the next line.
"""

from __future__ import annotations

import json
import os
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from thaw.dev.processes import ProcessId

AGAIN_AND_AGAIN: Final = 3
"""A component that has ended this many times in a row, each time soon after its start, will not recover by itself."""
STEADY_S: Final = 30.0
"""A component that lived longer than this was healthy: its next end counts as the first in a row."""
_PID_FILE_BYTES: Final = 160
_MOST_LINES: Final = 1_000


@dataclass(frozen=True, slots=True)
class Recorded:
    """``n_restarts`` counts the restarts since the platform was started, ``in_a_row`` the latest of them that each came
    soon after a start.  ``cause`` is the cause of the last restart.
    """

    process: ProcessId
    n_restarts: int = 0
    in_a_row: int = 0
    cause: str = ""


def write_pid_file(path: Path, recorded: Recorded) -> None:
    """Write or overwrite the file.  Raises OSError when the disk is full and the file is new."""
    text = f"{recorded.process.pid} {recorded.process.start_ticks} {recorded.n_restarts} {recorded.in_a_row} "
    data = (text + recorded.cause).encode()[: _PID_FILE_BYTES - 1].ljust(_PID_FILE_BYTES - 1) + b"\n"
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        os.pwrite(fd, data, 0)
    finally:
        os.close(fd)


def read_pid_file(path: Path) -> Recorded | None:
    """The record in the file; None if the file has no complete record, because the disk was full when it was made."""
    fields = path.read_text(errors="replace").split(maxsplit=4)
    if len(fields) < 4 or not all(field.isdigit() for field in fields[:4]):
        return None
    pid, ticks, n_restarts, in_a_row = map(int, fields[:4])
    return Recorded(ProcessId(pid, ticks), n_restarts, in_a_row, "".join(fields[4:]).strip())


class RestartLog:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._lines: deque[bytes] = deque(maxlen=_MOST_LINES)

    def event(self, name: str, **fields: object) -> None:
        line = {"ts": round(time.time(), 3), "event": name, **fields}
        self._lines.append(json.dumps(line).encode() + b"\n")
        self.flush()

    def flush(self) -> None:
        """Write the lines that could not be written before.  Never raises."""
        try:
            with self._path.open("ab", buffering=0) as f:
                while self._lines:
                    end = f.tell()
                    if f.write(self._lines[0]) < len(self._lines[0]):
                        f.truncate(end)  # keep whole lines only; a later flush writes this line
                        return
                    self._lines.popleft()
        except OSError:
            return  # a full disk: the lines stay in memory
