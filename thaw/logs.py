"""Logs: one JSON object per line on stderr, with a constant event name and values as fields.  A log line never holds a
prompt or a key.

Logging never raises.  Most lines are written after something has failed, often in a thread that must continue, and a
full disk or a closed pipe must not end that thread.  The first line that can be written again says how many lines were
lost.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from typing import Final

_UNWRITABLE: Final = (OSError, ValueError, AttributeError)
"""The disk is full (ENOSPC) or the pipe has no reader (EPIPE); stderr is closed; stderr was never open."""
_lock = threading.Lock()
_n_lost = 0


class Log:
    """``Log("fetchd").event("fetch_done", group_id=g, n_bytes=n)``."""

    def __init__(self, component: str, **fields: object) -> None:
        self._fields = {"component": component, **fields}

    def bind(self, **fields: object) -> Log:
        bound = Log("")
        bound._fields = {**self._fields, **fields}
        return bound

    def event(self, name: str, **fields: object) -> None:
        _write(_line({"ts": round(time.time(), 3), "event": name, **self._fields, **fields}), self._fields)


def print_traceback() -> None:
    """Print the traceback of the exception that is being handled, in Python's format.  Never raises."""
    with contextlib.suppress(*_UNWRITABLE):
        traceback.print_exc()


def flush_output() -> None:
    """Flush stdout and stderr before a fork, or before an exit that does not flush them itself.  Never raises."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(*_UNWRITABLE):
            stream.flush()


def _write(line: str, fields: Mapping[str, object]) -> None:
    """``fields`` are in every line of this log, also in the line that reports lost lines."""
    global _n_lost
    with _lock:
        if _n_lost:
            lost = _line({"ts": round(time.time(), 3), "event": "log_lines_lost", **fields, "n": _n_lost})
            line = f"\n{lost}\n{line}"  # the first line break ends a line that was written only in part
        _n_lost = 0 if _written(line) else _n_lost + 1


def _written(line: str) -> bool:
    try:
        sys.stderr.flush()
        fd = _descriptor()
        if fd is None:
            sys.stderr.write(line + "\n")
            sys.stderr.flush()
        else:
            _write_to(fd, line.encode() + b"\n")
    except _UNWRITABLE:
        return False
    return True


def _descriptor() -> int | None:
    """The file descriptor of stderr.

    The stream's buffer is not used: it would keep a line that could not be written, and write the line later although
    the line counts as lost.
    """
    try:
        return sys.stderr.fileno()
    except io.UnsupportedOperation:
        return None


def _write_to(fd: int, data: bytes) -> None:
    while data:
        data = data[os.write(fd, data) :]


def _line(fields: Mapping[str, object]) -> str:
    try:
        return json.dumps(fields, default=str)
    except Exception:  # noqa: BLE001  a value that cannot be written must not raise while a failure is reported
        return json.dumps({name: _text(value) for name, value in fields.items()})


def _text(value: object) -> str:
    try:
        return str(value)
    except Exception:  # noqa: BLE001  as above
        return f"a {type(value).__name__} that cannot be written"
