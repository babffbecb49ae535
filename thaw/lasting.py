"""Threads that must last as long as their process, and what happens when one of them dies.

Such a thread does what nobody else does: it beats, reads events, writes records.  A process that goes on without it
accepts work and never does it.  So a process calls :func:`guard` at its start, and then the exception that ends a
lasting thread ends the process too; its supervisor starts another::

    loop raises ──▶ "thread_died" in the log ──▶ GRACE_S: /health says so, answers on their way end ──▶ exit status 70

Without the guard (in tests) such an exception goes where that of any thread goes.
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
"""Enough for an answer that is on its way and for a look at /health; what the process accepts meanwhile it may lose."""

_dead: list[str] = []


class LastingThread(threading.Thread):
    """``loop`` returns only when its owner asks it to."""

    def __init__(self, loop: Callable[[], None], name: str) -> None:
        super().__init__(target=loop, name=name, daemon=True)


def dead() -> tuple[str, ...]:
    """One sentence for each lasting thread of this process that has died; empty where all is well."""
    return tuple(_dead)


def health(*more_problems: str, **facts: object) -> tuple[int, dict[str, object]]:
    """HTTP status and JSON object of this process's answer to /health; ``facts`` are further fields of the object."""
    problems = [*_dead, *more_problems]
    if problems:
        return 503, {"status": "failing", **facts, "problems": problems}
    return 200, {"status": "ok", **facts}


def guard(log: Log, end: Callable[[int], None] = os._exit) -> None:
    """From now on the death of a lasting thread ends this process.  That of any other thread is written down."""

    def died(args: threading.ExceptHookArgs) -> None:
        lasts, name = isinstance(args.thread, LastingThread), "" if args.thread is None else args.thread.name
        if not lasts and issubclass(args.exc_type, SystemExit):
            return  # how a short-lived thread may end itself
        lines = traceback.format_exception(args.exc_type, args.exc_value, args.exc_traceback)
        error = lines[-1].strip()
        if lasts:
            _dead.append(f"the thread {name} has died: {error}")
        log.event("thread_died" if lasts else "thread_failed", thread=name, error=error, traceback="".join(lines))
        if lasts:
            threading.Event().wait(GRACE_S)
            end(EXIT_THREAD_DIED)

    threading.excepthook = died
