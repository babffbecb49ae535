"""Tells an engine that was killed from one that failed by itself, and says how it ended."""

from __future__ import annotations

import os
import signal

from thaw.errors import InitFailed, ThawError, WorkerLost
from thaw_runtime.process.signals import signal_name


def start_error(how: str, signal_number: int) -> ThawError:
    """Return WorkerLost for a start that was killed, which may be tried again elsewhere, and InitFailed for an engine
    that gave up by itself, because it would do so again.
    """
    said = f"the engine process {how} while it started"
    if signal_number:
        return WorkerLost(said, hint="out of memory, or killed from outside")
    return InitFailed(said, hint="see the container's log")


def reap(pid: int, damaged: str = "") -> tuple[int, str]:
    """Reap the engine.  Returns the signal that killed it, or 0, and how it ended in words.

    Its socket is closed, so it has ended or is ending.  An engine that sent a damaged message is ended here, which is
    no kill from outside: ``damaged`` says what was wrong with the message.
    """
    try:
        os.kill(pid, signal.SIGKILL)  # changes nothing for a process that is ending
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    except (ChildProcessError, ProcessLookupError):
        return 0, "has gone"
    if damaged:
        return 0, f"sent a damaged message ({damaged})"
    if code < 0:
        return -code, f"was killed by {signal_name(-code)}"
    return 0, f"ended with status {code}"
