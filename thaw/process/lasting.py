"""Threads that must last as long as their process, and the end of the process when one of them dies.

Such a thread does work that no other thread does: it sends heartbeats, reads events or writes records.  A process that
continues without the thread accepts work and never does it.  So a process calls :func:`guard` at its start.  Then an
exception that ends a lasting thread ends the process, too, and the supervisor starts another process::

    loop raises ──▶ "thread_died" in the log ──▶ GRACE_S: /health reports it, answers in progress end ──▶ exit status 70

Without the guard (in tests) Python handles such an exception like that of any thread.
"""

from __future__ import annotations

import os
import threading
import traceback
from collections.abc import Callable
from typing import Final

from thaw.logs import Log

EXIT_THREAD_DIED: Final = 70  # EX_SOFTWARE
GRACE_S: Final = 1.0
"""Long enough to finish an answer in progress and to read /health.  Work that the process accepts in this time may be
lost.
"""

_dead: list[str] = []


class LastingThread(threading.Thread):
    """A thread whose ``loop`` returns only when the owner of the thread asks it to."""

    def __init__(self, loop: Callable[[], None], name: str) -> None:
        super().__init__(target=loop, name=name, daemon=True)


def dead() -> tuple[str, ...]:
    """One sentence for each lasting thread of this process that has died; empty if none has died."""
    return tuple(_dead)


def health(*more_problems: str, **facts: object) -> tuple[int, dict[str, object]]:
    """HTTP status and JSON object of this process's answer to /health; ``facts`` are further fields of the object."""
    problems = [*_dead, *more_problems]
    if problems:
        return 503, {"status": "failing", **facts, "problems": problems}
    return 200, {"status": "ok", **facts}


def guard(log: Log, end: Callable[[int], None] = os._exit) -> None:
    """From now on, the death of a lasting thread ends this process.  The death of any other thread is only logged."""

    def died(args: threading.ExceptHookArgs) -> None:
        lasts, name = isinstance(args.thread, LastingThread), "" if args.thread is None else args.thread.name
        if not lasts and issubclass(args.exc_type, SystemExit):
            return  # a short-lived thread may end itself this way
        lines = traceback.format_exception(args.exc_type, args.exc_value, args.exc_traceback)
        error = lines[-1].strip()
        if lasts:
            _dead.append(f"the thread {name} has died: {error}")
        log.event("thread_died" if lasts else "thread_failed", thread=name, error=error, traceback="".join(lines))
        if lasts:
            threading.Event().wait(GRACE_S)
            end(EXIT_THREAD_DIED)

    threading.excepthook = died
