"""SIGTERM ends a container's process at once, whatever its main thread waits for.  Standard library only."""

from __future__ import annotations

import os
import signal
import threading


def end_when_asked() -> None:
    """On the main thread, before there are others and after the processes that are to have their own SIGTERM.

    Process 1 of a container needs more than the default action, which the kernel leaves out for it.  A handler would be
    run by the main thread, which a signal just before it begins to wait does not wake; a thread that waits for the
    signal is.
    """
    signals = {signal.SIGTERM}
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    threading.Thread(target=_end, args=(signals,), name="ending", daemon=True).start()


def _end(signals: set[signal.Signals]) -> None:
    signal.sigwait(signals)
    os._exit(0)


def signal_name(number: int) -> str:
    """SIGKILL for 9.  A real-time signal has no name of its own."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
