"""Pacing: one token bucket for the link, one per fetch; a reader takes tokens before it reads.

Nothing polls: a reader sleeps until its tokens exist, and a changed rate or a cancel wakes it.  Background fetches
take from the link only while no other fetch waits for it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Final

QUANTUM_BYTES: Final = 256 * 1024
"""The most that is read at once under a rate, so that four connections share a link smoothly."""
_MIN_QUANTUM_BYTES: Final = 4096
_QUANTUM_S: Final = 0.05
"""At low rates a quantum is what arrives in this time: the rate stays smooth and a new rate is obeyed soon."""


class TokenBucket:
    """``rate`` bytes per second; None is unlimited.

    Holds at most two quanta: a pause earns no burst, and a late wake-up costs no rate.
    """

    def __init__(self, rate: float | None) -> None:
        self._changed = threading.Condition()
        self._rate = rate
        self._tokens = 0.0
        self._filled_at = time.monotonic()
        self._urgent = 0  # foreground readers that wait

    @property
    def rate(self) -> float | None:
        return self._rate

    def set_rate(self, rate: float | None) -> None:
        with self._changed:
            self._fill()
            self._rate = rate
            self._changed.notify_all()

    def wake(self) -> None:
        """Let sleepers look at their ``cancelled`` again."""
        with self._changed:
            self._changed.notify_all()

    def quantum(self) -> int | None:
        """How much to take at once; None: as much as you like."""
        rate = self._rate
        return None if rate is None else max(_MIN_QUANTUM_BYTES, min(QUANTUM_BYTES, int(rate * _QUANTUM_S)))

    def take(self, n_bytes: int, cancelled: Callable[[], bool], *, background: bool = False) -> None:
        """Return once ``n_bytes`` may be read, or at once when ``cancelled`` or unlimited."""
        with self._changed:
            self._urgent += not background
            try:
                while self._rate is not None and not cancelled():
                    self._fill()
                    if self._tokens >= min(n_bytes, self.quantum() or n_bytes) and not (background and self._urgent):
                        self._tokens -= n_bytes
                        return
                    yields = background and self._urgent > 0  # until the last urgent reader has been served
                    self._changed.wait(None if yields else self._seconds_until(n_bytes))
            finally:
                self._urgent -= not background
                if not self._urgent:
                    self._changed.notify_all()

    def _fill(self) -> None:
        now = time.monotonic()
        if self._rate is not None:
            room = 2.0 * (self.quantum() or 0)
            self._tokens = min(room, self._tokens + (now - self._filled_at) * self._rate)
        self._filled_at = now

    def _seconds_until(self, n_bytes: int) -> float:
        rate = self._rate or 1.0
        return max((min(n_bytes, self.quantum() or n_bytes) - self._tokens) / rate, 0.001)


class Pacer:
    """What one fetch's readers ask before each read: its own pace, then the link's."""

    def __init__(self, link: TokenBucket, pace: float | None, *, background: bool = False) -> None:
        self._link, self._own = link, TokenBucket(pace)
        self.background = background

    def quantum(self, most: int) -> int:
        return min(most, *(q for q in (self._link.quantum(), self._own.quantum()) if q is not None), most)

    def take(self, n_bytes: int, cancelled: Callable[[], bool]) -> None:
        self._own.take(n_bytes, cancelled)
        self._link.take(n_bytes, cancelled, background=self.background)

    def set_pace(self, pace: float | None) -> None:
        self._own.set_rate(pace)

    def wake(self) -> None:
        self._own.wake()
        self._link.wake()
