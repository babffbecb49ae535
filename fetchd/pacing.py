"""The order of reads: a :class:`NetworkLink` for the host, a :class:`Pacer` per fetch; a reader asks before each read.

Ranks, best first; within a rank bytes are shared by weight (start-time fair queueing)::

    0  fetches with a deadline that has not passed: the earliest first (``edf``), or all alike (``equal``)
    1  fetches without a deadline, or whose deadline has passed
    2  background fetches, and the later part of any fetch: they get what is left over

The link is a token bucket.  Its rate is the configured one.  Without a configured rate it is unlimited while all
fetches have the same rank.  While ranks compete, the best rank is not paced.  The others get the rest of KEPT of the
measured rate: a pace above what the network carries would leave the sharing to TCP, which knows no ranks.  A fetch that
ends stops asking, so its tokens go to the others.

Nothing polls: the best waiter sleeps until its tokens exist, the others until they are the best.  A changed rate, a
changed rank, an end or a cancel wakes the waiters concerned.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final, Literal

from fetchd.meter import KEPT, Meter

Discipline = Literal["edf", "equal"]
Key = tuple[int, float]

QUANTUM_BYTES: Final = 256 * 1024
"""The most that is read at once under a rate, so that four connections share a link smoothly."""
_MIN_QUANTUM_BYTES: Final = 4096
_QUANTUM_S: Final = 0.05
"""At low rates a quantum is the bytes of this time: the rate stays smooth and a new rate is obeyed soon."""

_DUE, _PLAIN, _BACKGROUND = 0, 1, 2
_LAST: Final[Key] = (3, 0.0)
_SETTLE_S: Final = 1.5
"""When a fetch of a better rank joins, the others stop for this long.  Bytes for which the kernel has room still arrive
for them (a second of a slow link), and then the newcomer's connections have to grow."""
_FILLED: Final = 0.7
"""If the best rank reads this part of the measured rate, it wants all of it: only TCP's sharing keeps it from the
remaining part, so that part is not free for others."""
_RECENT_S: Final = 0.5
_SILENT_S: Final = 1.0
"""On a link that is not measured yet, a fetch without any read for this long no longer delays others: its store may be
gone."""


class TokenBucket:
    """``rate`` is in bytes per second; None is unlimited.  The owner holds a lock around every call.

    The bucket holds at most two quanta, so a pause earns no burst and a late wake-up costs no rate.
    """

    def __init__(self, rate: float | None) -> None:
        self.rate = rate
        self._tokens = 0.0
        self._filled_at = time.monotonic()

    def set_rate(self, rate: float | None) -> None:
        self._fill()
        self.rate = rate

    def quantum(self) -> int | None:
        """How many bytes to take at once; None means any number."""
        rate = self.rate
        return None if rate is None else max(_MIN_QUANTUM_BYTES, min(QUANTUM_BYTES, int(rate * _QUANTUM_S)))

    def take(self, n_bytes: int) -> float:
        """Take the tokens and return 0.0, or return the seconds until there can be enough."""
        if self.rate is None:
            return 0.0
        self._fill()
        needed = min(n_bytes, self.quantum() or n_bytes)
        if self._tokens >= needed:
            self._tokens -= n_bytes
            return 0.0
        return max((needed - self._tokens) / self.rate, 0.001)

    def charge(self, n_bytes: int) -> None:
        """Take tokens without waiting.  The debt is at most two quanta, so that waiting fetches go on soon after."""
        if self.rate is not None:
            self._fill()
            self._tokens = max(self._tokens - n_bytes, -2.0 * (self.quantum() or 0))

    def _fill(self) -> None:
        now = time.monotonic()
        if self.rate is not None:
            room = 2.0 * (self.quantum() or 0)
            self._tokens = min(room, self._tokens + (now - self._filled_at) * self.rate)
        self._filled_at = now


@dataclass(eq=False, slots=True)
class Share:
    """One fetch's place on the link.  Changed under the link's lock only."""

    deadline: float = math.inf  # monotonic
    background: bool = False
    weight: float = 1.0
    paced: bool = False  # does not use all that the link would give it
    remote: bool = True  # its bytes cross the network: they measure it
    later: bool = False  # only its later part is left
    served: float = 0.0  # bytes over weight, on the scale of the competing fetches
    read_at: float = 0.0
    lent: list[Share] = field(default_factory=list)
    """Fetches that wait for bytes that this one is reading.  This one reads with their rank if that is better."""


class NetworkLink:
    """``rate`` is the configured rate or None.  ``yields``: no queue in the network lets inference pass fetches, so
    even a lone fetch keeps to KEPT of the measured rate."""

    def __init__(self, rate: float | None, discipline: Discipline = "edf", *, yields: bool = False) -> None:
        self._lock = threading.Lock()
        self._bucket = TokenBucket(rate)
        self._configured = rate
        self._discipline = discipline
        self._yields = yields
        self._shares: list[Share] = []
        self._waiters: list[_Waiter] = []
        self._meter = Meter()
        self._best_rank: Key = _LAST
        self._settled_at = 0.0
        self._recent = _Recent()

    @property
    def bytes_per_s(self) -> float:
        """Configured or measured; 0 while unknown."""
        return self._configured or self._meter.bytes_per_s

    @property
    def yields(self) -> bool:
        return self._yields

    def set_yields(self) -> None:
        with self._lock:
            self._yields = True
            self._changed()

    def quantum(self) -> int | None:
        return self._bucket.quantum()

    def join(self, share: Share) -> None:
        with self._lock:
            if self._shares:
                self._meter.end()
            else:
                self._meter.begin(time.monotonic(), clean=True)
            share.served = min((s.served for s in self._shares), default=0.0)  # a newcomer has no claim on the past
            share.read_at = time.monotonic()
            self._shares.append(share)
            self._changed()

    def leave(self, share: Share) -> None:
        with self._lock:
            self._shares.remove(share)
            if not self._shares:
                self._meter.end()
            self._changed()

    @contextmanager
    def joined(self, share: Share) -> Iterator[None]:
        self.join(share)
        try:
            yield
        finally:
            self.leave(share)

    @contextmanager
    def change(self) -> Iterator[None]:
        """Hold the lock around any change of a share that may have joined."""
        with self._lock:
            yield
            self._changed()

    def wake(self) -> None:
        """Let every sleeper check its ``cancelled`` again."""
        with self._lock:
            for waiter in self._waiters:
                waiter.woken.notify()

    def count(self, share: Share, n_bytes: int, *, paced: bool) -> None:
        """Record a read.  ``paced``: the fetch has a pace of its own, so the read says nothing about the link."""
        with self._lock:
            share.read_at = now = time.monotonic()
            if self._key(share, share.later) <= self._best_rank:
                self._recent.count(n_bytes, now)
            if not share.remote:
                return
            rate = self._bucket.rate
            if paced or self._configured is not None or (rate is not None and self._compete()):
                self._meter.begin(now, clean=False)
            elif self._meter.count(n_bytes, now) if rate is None else self._meter.count_held(n_bytes, now, rate):
                self._changed()

    def take(self, share: Share, n_bytes: int, cancelled: Callable[[], bool], *, later: bool = False) -> None:
        """Return once ``n_bytes`` may be read, or at once when ``cancelled``."""
        with self._lock:
            waiter = _Waiter(share, later, threading.Condition(self._lock))
            self._waiters.append(waiter)
            try:
                while not cancelled():
                    if waiter is not self._best():
                        self._wake_best()  # a deadline that passes lowers a sleeper's rank without waking any thread
                        waiter.woken.wait()
                        continue
                    seconds = self._held_back(waiter) or self._pay(waiter, n_bytes)
                    if not seconds:
                        share.served += n_bytes / share.weight
                        return
                    waiter.woken.wait(seconds)
            finally:
                self._waiters.remove(waiter)
                self._wake_best()

    def _pay(self, waiter: _Waiter, n_bytes: int) -> float:
        """Return 0.0 if the waiter may read now, else the seconds to wait for tokens."""
        if self._configured is not None or self._bucket.rate is None:
            return self._bucket.take(n_bytes)
        if self._key(waiter.share, waiter.later) > self._best_of_all():
            return self._leftover_in() or self._bucket.take(n_bytes)
        if self._yields:
            return self._bucket.take(n_bytes)
        self._bucket.charge(n_bytes)
        return 0.0

    def _changed(self) -> None:
        """Call when the competing fetches, their ranks or the estimate of the link's rate have changed."""
        self._bucket.set_rate(self._rate())
        best, before = self._best_of_all(), self._best_rank
        self._best_rank = best
        if best != before:
            self._recent = _Recent()
            self._settled_at = time.monotonic() + _SETTLE_S if best < before else 0.0
        self._wake_best()

    def _leftover_in(self) -> float:
        """Return 0.0 if the best rank leaves a part of the measured rate, else the seconds until the next check."""
        now = time.monotonic()
        if now < self._settled_at:
            return self._settled_at - now
        filled = self._recent.rate(now) >= _FILLED * self._meter.bytes_per_s
        return self._recent.next_s(now) if filled else 0.0

    def _best_of_all(self) -> Key:
        return min((self._key(s, s.later) for s in self._shares), default=_LAST)

    def _rate(self) -> float | None:
        measured = self._meter.bytes_per_s
        if self._configured is not None or not measured:
            return self._configured
        return KEPT * measured if self._yields or self._compete() else None

    def _compete(self) -> bool:
        return len({self._key(s, s.later) for s in self._shares}) > 1

    def _held_back(self, waiter: _Waiter) -> float:
        """Seconds to wait for better ranks on a link that is not measured yet; 0.0 to go ahead."""
        if self._bucket.rate is not None:
            return 0.0
        mine, now = self._key(waiter.share, waiter.later), time.monotonic()
        others = (s for s in self._shares if s is not waiter.share and not s.paced and self._key(s, s.later) < mine)
        return max(0.0, *(s.read_at + _SILENT_S - now for s in others), 0.0)

    def _best(self) -> _Waiter | None:
        return min(self._waiters, key=lambda w: (self._key(w.share, w.later), w.share.served), default=None)

    def _wake_best(self) -> None:
        best = self._best()
        if best is not None:
            best.woken.notify()

    def _key(self, share: Share, later: bool) -> Key:
        own = self._own_key(share, later)
        return min([own, *(self._own_key(s, s.later) for s in share.lent)]) if share.lent else own

    def _own_key(self, share: Share, later: bool) -> Key:
        if later or share.background:
            return _BACKGROUND, 0.0
        if math.isinf(share.deadline) or share.deadline < time.monotonic():
            return _PLAIN, 0.0  # a fetch that missed its deadline must not make others miss theirs
        return _DUE, share.deadline if self._discipline == "edf" else 0.0


@dataclass(eq=False, slots=True)
class _Waiter:
    share: Share
    later: bool
    woken: threading.Condition


class _Recent:
    """The best rank's rate in the last whole window; infinite before there was one."""

    def __init__(self) -> None:
        self._began, self._bytes, self._rate = time.monotonic(), 0, math.inf

    def count(self, n_bytes: int, now: float) -> None:
        self.rate(now)
        self._bytes += n_bytes

    def rate(self, now: float) -> float:
        if now - self._began >= _RECENT_S:
            self._rate = self._bytes / (now - self._began)
            self._began, self._bytes = now, 0
        return self._rate

    def next_s(self, now: float) -> float:
        """Seconds until the next window ends."""
        return max(self._began + _RECENT_S - now, 0.001)


class Pacer:
    """The readers of one fetch ask it before each read; it applies the fetch's own pace, then the link's."""

    def __init__(self, link: NetworkLink, pace: float | None = None, share: Share | None = None) -> None:
        self.link, self.share = link, share or Share()
        self._own = TokenBucket(pace)
        self._woken = threading.Condition()

    def quantum(self, most: int) -> int:
        return min(most, *(q for q in (self.link.quantum(), self._own.quantum()) if q is not None), most)

    def take(self, n_bytes: int, cancelled: Callable[[], bool], *, later: bool = False) -> None:
        with self._woken:
            while not cancelled() and not self.share.lent and (seconds := self._own.take(n_bytes)):
                self._woken.wait(seconds)
        self.link.take(self.share, n_bytes, cancelled, later=later)

    def count(self, n_bytes: int) -> None:
        self.link.count(self.share, n_bytes, paced=self._own.rate is not None)

    def set(self, *, pace: float | None, deadline: float, background: bool, weight: float) -> None:
        with self._woken:
            self._own.set_rate(pace)
            self._woken.notify_all()
        with self.link.change():
            share = self.share
            share.deadline, share.background, share.weight = deadline, background, weight
            share.paced = pace is not None

    def only_later(self) -> None:
        """The part that the stages wait for has arrived; only the later part is left."""
        with self.link.change():
            self.share.later = True

    @contextmanager
    def waiting_for(self, others: list[Pacer]) -> Iterator[None]:
        """Inside the block ``others`` read bytes that we need: they do it with our rank and without their pace."""
        self._lend(others, list.append)
        try:
            yield
        finally:
            self._lend(others, list.remove)

    def _lend(self, others: list[Pacer], change: Callable[[list[Share], Share], None]) -> None:
        for other in others:
            with self.link.change():
                change(other.share.lent, self.share)
            other.wake()

    def wake(self) -> None:
        with self._woken:
            self._woken.notify_all()
        self.link.wake()
