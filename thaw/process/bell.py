"""Wakes threads that sleep until something has changed.

Each sleeping thread is woken only once: the cost of a change depends on the number of threads that earlier changes have
not woken.  A bell remembers when it rang last, so a change between a look and the sleep is not missed.
"""

from __future__ import annotations

import threading
import time


class Bell:
    """A new bell counts as one that has just rung, because nobody was told of earlier changes."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._rung_s = time.monotonic()
        self._listening: set[threading.Event] = set()

    def ring(self) -> None:
        with self._lock:
            self._rung_s = time.monotonic()
            listening, self._listening = self._listening, set()
        for event in listening:
            event.set()

    def listen(self, event: threading.Event, since_s: float) -> None:
        """Set the event when the bell rings next, and at once if it has rung since that time (of the monotonic
        clock)."""
        with self._lock:
            if self._rung_s < since_s:
                self._listening.add(event)
                return
        event.set()

    def forget(self, event: threading.Event) -> None:
        with self._lock:
            self._listening.discard(event)
