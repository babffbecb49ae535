"""The end that an operator asks for: SIGTERM or SIGINT, waited for by the main thread.

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
    """Made on the main thread, before others; for a process that does not fork without exec.

    A handler that sets an event can come to nothing: a signal that arrives after the interpreter has looked for signals
    and before it sleeps on the event's lock wakes nobody, and a busy machine draws that moment out to milliseconds.  A
    descriptor keeps it.
    """

    def __init__(self) -> None:
        self._read, self._write = socket.socketpair()
        self._write.setblocking(False)
        signal.set_wakeup_fd(self._write.fileno(), warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: None)

    def wait(self) -> None:
        """Until the first signal, which may have come already."""
        self._read.recv(1)


def end_within(seconds: float, log_it: Callable[[], None] = lambda: None) -> None:
    """Bound what is left of this process: it ends after ``seconds``, whatever its threads wait for.

    Nothing depends on what a process tells the state server when it ends, because leases run out by themselves.  A
    server whose host is shutting down too does not answer, and each look for its name takes ten seconds.
    """
    threading.Thread(target=_end_after, args=(seconds, log_it), name="end-within", daemon=True).start()


def _end_after(seconds: float, log_it: Callable[[], None]) -> None:
    threading.Event().wait(seconds)
    log_it()
    os._exit(os.EX_OK)
