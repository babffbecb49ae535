"""The one deadline of an inspection.  It also ends reads from a store that sends a byte now and then."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final, Protocol

from thaw.errors import StoreUnavailable

CallLater = Callable[[float, Callable[[], None]], None]
"""(delay in seconds, call): Janitor.call_later."""

_PATIENCE_S: Final = 20.0
"""The longest sum of all pauses of one inspection.  Its callers wait half a minute, so a store that asks for a longer
pause has failed."""


class _Interruptible(Protocol):
    def interrupt(self) -> None: ...


class Deadline:
    """``call_later`` runs the function that interrupts the connections at the deadline; without it reads end by their
    own limits."""

    def __init__(self, seconds: float = math.inf, call_later: CallLater | None = None) -> None:
        self._seconds, self._call_later = seconds, call_later
        self._end_s = time.monotonic() + seconds
        self._lock = threading.Lock()
        self._guarded: set[_Interruptible] = set()
        self._is_watched = False
        self._patience_s = _PATIENCE_S

    @property
    def left_s(self) -> float:
        return self._end_s - time.monotonic()

    def check(self, uri: str) -> None:
        """Raise StoreUnavailable when the deadline has passed."""
        if self.left_s <= 0:
            raise self._passed(uri)

    def allows(self, pause_s: float) -> bool:
        """Count a pause before the next request; False when the pauses together would be too long."""
        self._patience_s -= pause_s
        return self._patience_s >= 0

    @contextmanager
    def guarding(self, connection: _Interruptible) -> Iterator[None]:
        """Interrupt the connection when the deadline passes; at once when it has passed."""
        with self._lock:
            self._guarded.add(connection)
            if self.left_s <= 0:  # _interrupt has run, and runs once
                connection.interrupt()
            watch = not self._is_watched and self._call_later is not None
            self._is_watched = True
        if watch and self._call_later is not None:
            self._call_later(max(self.left_s, 0.0), self._interrupt)
        try:
            yield
        finally:
            with self._lock:
                self._guarded.discard(connection)

    @contextmanager
    def holding(self, lock: threading.Lock, uri: str) -> Iterator[None]:
        """Hold a lock for which others may wait as well.  Raises StoreUnavailable when it does not become free."""
        if not lock.acquire(timeout=-1 if math.isinf(self._seconds) else max(self.left_s, 0.0)):
            raise self._passed(uri)
        try:
            yield
        finally:
            lock.release()

    def _passed(self, uri: str) -> StoreUnavailable:
        return StoreUnavailable(
            f"{uri:.300}: the description of the model did not come within {self._seconds:g} s",
            hint="is the store slow?  Retry later",
        )

    def _interrupt(self) -> None:
        with self._lock:
            for connection in self._guarded:
                connection.interrupt()
