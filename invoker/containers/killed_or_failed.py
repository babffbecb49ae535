"""Tells a container that was killed from one that failed by itself, and says how it ended and what it printed."""

from __future__ import annotations

from typing import Final

from invoker.containers.live import Live
from invoker.drivers.activation_logs import A_TRACEBACK, last_lines
from invoker.drivers.base import Exit
from thaw.action import KIND_LLM, KIND_PYTHON
from thaw.errors import InitFailed, ThawError, WorkerLost

_HINT_LINES: Final = 5


def start_error(live: Live, end: Exit) -> ThawError:
    """Return WorkerLost for a start that was killed from outside, which may be tried again elsewhere.  Return
    InitFailed for one that gave up by itself, because it would give up again.
    """
    error: ThawError
    if end.status is None or end.status < 0:
        error = WorkerLost(f"the container was killed while it started ({how(end)})", hint=hint(live))
    else:
        said = last_lines(live.handle) if live.handle is not None else ""
        text = f"the container ended while it started ({how(end)}): {said}".rstrip(": ")
        error = InitFailed(text, hint="see the end of its stderr")
    add_output(live, error)
    return error


def add_output(live: Live, error: ThawError) -> None:
    """Add the last lines that the container printed, unless ``error`` has its output already."""
    if live.handle is not None:
        error.printed = error.printed or last_lines(live.handle, *A_TRACEBACK)


def hint_of_start(live: Live, error: ThawError) -> str:
    """The hint of an error with which a start failed.  A function's stderr says why it did not load.  An engine prints
    more than a hint can hold."""
    if live.kind == KIND_PYTHON and isinstance(error, InitFailed):
        said = error.printed.strip().splitlines()[-_HINT_LINES:]
        return "\n".join(said) or (live.handle and last_lines(live.handle)) or error.hint
    return error.hint or ("thaw activation logs has what the engine printed" if live.kind == KIND_LLM else "")


def how(end: Exit) -> str:
    """Return the status with which a container ended, and the driver's reason if there is one."""
    return f"status {end.status}" + (f"; {end.reason}" if end.reason else "")


def hint(live: Live) -> str:
    """Return the last lines that a container printed, or the likely causes if it printed none."""
    said = last_lines(live.handle) if live.handle is not None else ""
    return f"its last words: {said}" if said else "out of memory, or killed from outside"
