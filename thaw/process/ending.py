"""Ends a process when an operator sends SIGTERM or SIGINT.  The main thread waits for the signal.

A container's process exits at once instead (thaw_runtime/process/signals.py): the image of a Python function does not
hold this file, and the container has nothing to finish.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Callable


class Ending:
    """Make it on the main thread, before other threads.  Only for a process that does not fork without exec.

    A handler that sets an event is not enough.  If the signal arrives after the interpreter has checked for signals and
    before it sleeps on the event's lock, the main thread is not woken; on a busy machine this moment lasts
    milliseconds.  A descriptor keeps the signal until the thread reads it.
    """

    def __init__(self) -> None:
        self._read, self._write = socket.socketpair()
        self._write.setblocking(False)
        signal.set_wakeup_fd(self._write.fileno(), warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: None)

    def wait(self) -> None:
        """Wait until the first signal, which may have come already."""
        self._read.recv(1)


def end_within(seconds: float, log_it: Callable[[], None] = lambda: None) -> None:
    """End this process after ``seconds`` at the latest, even if its threads still wait.

    Nothing depends on the messages that an ending process sends to the state server, because leases run out by
    themselves.  If the server's host is shutting down too, it does not answer, and each look-up of its name takes ten
    seconds.
    """
    threading.Thread(target=_end_after, args=(seconds, log_it), name="end-within", daemon=True).start()


def _end_after(seconds: float, log_it: Callable[[], None]) -> None:
    threading.Event().wait(seconds)
    log_it()
    os._exit(os.EX_OK)
