"""Signals in a container: SIGTERM ends its process at once, whatever its main thread waits for.

This is not process/ending.py, which lets a component finish its work first: a Python function's image holds
thaw_runtime and the standard library alone, and a container has nothing to finish.
"""

from __future__ import annotations

import os
import signal
import threading


def exit_on_sigterm() -> None:
    """Must be called on the main thread, before other threads exist, and after forking the processes that handle
    SIGTERM themselves.

    Process 1 of a container needs more than the default action, which the kernel leaves out for it.  The main thread
    would run a handler, and a signal that comes just before it begins to wait does not wake it.  So another thread
    waits for the signal.
    """
    signals = {signal.SIGTERM}
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    threading.Thread(target=_exit_on, args=(signals,), name="sigterm", daemon=True).start()


def _exit_on(signals: set[signal.Signals]) -> None:
    signal.sigwait(signals)
    os._exit(0)


def signal_name(number: int) -> str:
    """The name of a signal: SIGKILL for 9.  A real-time signal has no name of its own."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
