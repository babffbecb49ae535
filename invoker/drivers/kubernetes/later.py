"""Repeats requests that the cluster refused or could not serve; the pause doubles each time.

A running watch does not report that a webhook works again, so this has a timer of its own.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final

from thaw.errors import ThawError
from thaw.logs import Log
from thaw.process.lasting import LastingThread

_FIRST_PAUSE_S: Final = 0.5
_LONGEST_PAUSE_S: Final = 60.0
_JOIN_S: Final = 5.0

Job = Callable[[], bool]
"""Return whether it is done.  A ThawError means the same as False, and says why."""


class Later:
    def __init__(self, log: Log) -> None:
        self._log = log
        self._jobs: dict[str, Job] = {}
        self._changed = threading.Condition()
        self._now = self._stopped = False
        self._thread = LastingThread(self._run, "pods-later")
        self._thread.start()

    def add(self, name: str, job: Job) -> None:
        """``job`` is for the pod ``name``; an earlier one for the same pod is forgotten."""
        with self._changed:
            self._jobs[name] = job
            self._changed.notify_all()

    def try_now(self) -> None:
        with self._changed:
            self._now = True
            self._changed.notify_all()

    def stop(self) -> None:
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        self._thread.join(_JOIN_S)

    def _run(self) -> None:
        pause_s = _FIRST_PAUSE_S
        while jobs := self._due(pause_s):
            done = {name for name, job in jobs.items() if self._is_done(name, job)}
            with self._changed:
                self._jobs = {n: j for n, j in self._jobs.items() if n not in done or j is not jobs[n]}
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S) if self._jobs else _FIRST_PAUSE_S

    def _due(self, pause_s: float) -> dict[str, Job]:
        """Wait for ``pause_s``, and return the jobs to do then: none when this was stopped."""
        with self._changed:
            self._changed.wait_for(lambda: self._stopped or bool(self._jobs))
            self._changed.wait_for(lambda: self._stopped or self._now, pause_s)
            self._now = False
            return {} if self._stopped else dict(self._jobs)

    def _is_done(self, name: str, job: Job) -> bool:
        try:
            return job()
        except ThawError as e:
            self._log.event("removal_postponed", pod=name, error=e.message)
            return False
