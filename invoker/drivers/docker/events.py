"""The engine's events about our containers, for as long as there is an engine: one thread, one stream.

The stream breaks when the engine is restarted.  It is resumed where it ended, and ``again`` finds the containers that
the new engine no longer knows or runs.  If we run in a container and hold a former engine's socket, we cannot reach the
new engine (``cut_off``).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Final

from invoker.drivers.docker.client import Engine, EngineEvent
from invoker.drivers.docker.paths import is_replaced
from thaw.errors import PlatformError
from thaw.logs import Log
from thaw.process.lasting import LastingThread

_FIRST_PAUSE_S: Final = 0.1
_JOIN_S: Final = 5.0
_LONGEST_PAUSE_S: Final = 2.0  # an engine takes a second or two to come back


class EngineEvents:
    def __init__(
        self,
        engine: Engine,
        label: str,
        take: Callable[[EngineEvent], None],
        again: Callable[[], None],
        cut_off: Callable[[], None],
        log: Log,
    ) -> None:
        self._engine, self._label, self._take, self._again, self._log = engine, label, take, again, log
        self._cut_off = cut_off
        self._since_ns = time.time_ns()
        self._stop = threading.Event()
        self._changed = threading.Condition()
        self._lives = 0  # how many times the engine was (back) there
        self._away = False
        self._thread = LastingThread(self._run, "engine-events")
        self._thread.start()

    def wait_back(self, deadline_s: float, given_up: Callable[[], bool]) -> bool:
        """Wait until the engine answers again; False at the deadline, at ``stop``, or once ``given_up`` says so (it is
        checked again after ``look_up``)."""
        with self._changed:
            seen = self._lives
            self._changed.wait_for(lambda: self._stop.is_set() or given_up() or self._lives > seen, deadline_s)
            return not self._stop.is_set() and (self._lives > seen or not self._away)

    def look_up(self) -> None:
        """Make every waiting thread check its ``given_up`` again."""
        with self._changed:
            self._changed.notify_all()

    def stop(self) -> None:
        self._stop.set()
        with self._changed:
            self._changed.notify_all()
        self._engine.end_events()
        self._thread.join(_JOIN_S)

    def _run(self) -> None:
        pause_s = _FIRST_PAUSE_S
        while not self._stop.is_set():
            try:
                if self._away:
                    self._engine.check()
                    self._came_back()
                pause_s = _FIRST_PAUSE_S
                for event in self._engine.events(self._label, self._since_ns):
                    if self._stop.is_set():
                        return
                    self._since_ns = event.at_ns + 1
                    self._take(event)
            except PlatformError as e:
                if not self._away and not self._stop.is_set():
                    self._log.event("engine_away", error=e.message)
            self._away = True
            if is_replaced(self._engine.socket_path):
                self._log.event("engine_replaced", socket=self._engine.socket_path)
                self._cut_off()
                return
            self._stop.wait(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _came_back(self) -> None:
        self._again()
        self._away = False
        self._log.event("engine_back")
        with self._changed:
            self._lives += 1
            self._changed.notify_all()
