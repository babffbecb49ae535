"""An estimate of the network's rate, learnt from the reads of fetches."""

from __future__ import annotations

import time
from collections import deque
from typing import Final

KEPT: Final = 0.95
"""The part of the measured rate that paced fetches use.  The measurement may be 3 % too high (a shaper's burst), and a
queue drains only below the link's rate."""
_WINDOW_S: Final = 2.0
_WINDOW_BYTES: Final = 128 * 1024 * 1024
_MEASURABLE_BYTES: Final = 16 * 1024 * 1024
"""Shorter fetches say more about round trips than about the link."""
_RUN_S: Final = 10.0
_RUNS: Final = 16
_FOLLOWED: Final = 0.97
"""Fetches that read at least this part of what was allowed might have read more."""
_TRY_FACTOR: Final = 1.25
_TRY_AGAIN_S: Final = 60.0
"""The pause between tries.  A try above the link's rate fills the link for a window, and inference waits meanwhile."""


class Meter:
    """The network's rate when nothing else bounds the reads: the best of the last _RUNS runs.

    A run is a time of unpaced reading; its rate is its mean, which settles as the run goes on.  Single windows would
    include bytes that the kernel had buffered while this process was not scheduled: a fifth more than the link carries.
    """

    def __init__(self) -> None:
        self._samples: deque[float] = deque(maxlen=_RUNS)
        self._try_at, self._before_try = 0.0, 0.0
        self.begin(time.monotonic(), clean=True)

    @property
    def bytes_per_s(self) -> float:
        return max(self._samples, default=0.0)

    def begin(self, now: float, *, clean: bool) -> None:
        """Begin a new run.  If it is not ``clean``, bytes that arrived earlier may be buffered: skip a window."""
        self._bytes, self._recorded = 0, False
        self._began = now + (0.0 if clean else _WINDOW_S)
        self._next_s, self._next_bytes = self._began + _WINDOW_S, _WINDOW_BYTES
        self._held_since, self._held_bytes = now, 0

    def count(self, n_bytes: int, now: float) -> bool:
        """Count bytes of an unpaced read.  Returns True when the estimate may have changed."""
        self._held_since, self._held_bytes = now, 0
        if now <= self._began:
            return False
        self._bytes += n_bytes
        if self._bytes < _MEASURABLE_BYTES // 4 or (now < self._next_s and self._bytes < self._next_bytes):
            return False
        self._record(now)
        self._next_s, self._next_bytes = now + _WINDOW_S, self._bytes + _WINDOW_BYTES
        if now - self._began >= _RUN_S:
            self.begin(now, clean=True)
        return True

    def count_held(self, n_bytes: int, now: float, allowed: float) -> bool:
        """Count bytes while reads are limited to ``allowed``, so that they show only a lower bound of the link's rate.

        If fetches take all that is allowed, the link may carry more: the estimate grows by steps until the link does
        not follow, and is tried again after a while.  Without this, one slow store would lower the estimate for ever.
        """
        self._held_bytes += n_bytes
        took_s = now - self._held_since
        if took_s < _WINDOW_S:
            return False
        rate = self._held_bytes / took_s
        self._held_since, self._held_bytes = now, 0
        if rate >= _FOLLOWED * allowed:
            if now < self._try_at:
                return False
            self._before_try = self.bytes_per_s
            self._samples.append(_TRY_FACTOR * self._before_try)
            return True
        self._try_at = now + _TRY_AGAIN_S
        if not self._before_try:
            return False  # no higher rate was tried: the store may be slow, and not the link
        # The link did not follow: its rate is what arrived, unless it has carried more than that before.
        carried = KEPT * _FOLLOWED * self._before_try
        self._samples.clear()
        self._samples.append(rate if rate >= carried else self._before_try)
        self._before_try = 0.0
        return True

    def end(self) -> None:
        """End the run; it counts if it was long enough."""
        now = time.monotonic()
        if self._bytes >= _MEASURABLE_BYTES and now > self._began:
            self._record(now)
        self.begin(now, clean=False)

    def _record(self, now: float) -> None:
        rate = self._bytes / max(now - self._began, 1e-6)
        if self._recorded:
            self._samples[-1] = rate
        else:
            self._samples.append(rate)
        self._recorded = True
