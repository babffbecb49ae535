"""Holds requests until their answers are news.

::

    look ──news──▶ answer
     │ no news
     ▼                                            time over, worker drains ──▶ answer what was found last
    sleep until the bell rings ──▶ pause ──▶ look
                                                  client gone ──▶ ClientGone

However often the bell rings, and however many requests look at the same thing, it is read at most once in ``LOOK_S``
(Looks).
"""

from __future__ import annotations

import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Final, Generic, TypeVar

from gateway.processor import waiting
from gateway.serving.hangup import Hangup
from gateway.serving.routing.throttle import Throttle
from thaw.errors import PlatformError
from thaw.ids import Namespace
from thaw.process.bell import Bell

T = TypeVar("T")

LOOK_S: Final = 0.25
_LOOKS_KEPT: Final = 256
_NEVER: Final = float("-inf")
_PLACES: Final = 2
"""One in this many threads may be held: requests that are answered at once need the others."""


class _Look(Generic[T]):
    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.began_s = _NEVER
        self.found: T | None = None
        self.error: PlatformError | None = None

    @property
    def is_read(self) -> bool:
        return self.began_s != _NEVER


class Looks(Generic[T]):
    """Values that several requests look at, each read once for all of them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._looks: OrderedDict[Hashable, _Look[T]] = OrderedDict()

    def recent(self, key: Hashable, read: Callable[[], T], since_s: float = _NEVER) -> tuple[float, T]:
        """Return a result of ``read`` that is at most ``LOOK_S`` old and not from before ``since_s``, and when that
        read began.  Raises its PlatformError."""
        with self._lock:
            look = self._looks.setdefault(key, _Look())
            self._looks.move_to_end(key)
            self._forget_old()
        with look.lock:
            if time.monotonic() - look.began_s >= LOOK_S or look.began_s < since_s:
                began_s = time.monotonic()
                look.found, look.error = None, None
                try:
                    look.found = read()
                except PlatformError as e:
                    look.error = e
                look.began_s = began_s if look.error is None else time.monotonic()  # requests that waited get its error
            if look.error is not None:
                raise look.error
            return look.began_s, look.found  # type: ignore[return-value]

    def _forget_old(self) -> None:
        """Drop looks that are over or beyond ``_LOOKS_KEPT``.  A caller that has one of them goes on with it."""
        while len(self._looks) > 1:
            oldest = next(iter(self._looks.values()))
            is_over = oldest.is_read and time.monotonic() - oldest.began_s >= LOOK_S
            if not is_over and len(self._looks) <= _LOOKS_KEPT:
                return
            self._looks.popitem(last=False)


class Held:
    """The requests that this gateway holds.  ``threads``: how many requests of all kinds it can have at once."""

    def __init__(self, threads: int) -> None:
        self._places = Throttle(sys.maxsize, sys.maxsize, places=max(1, threads // _PLACES))
        self._lock = threading.Lock()
        self._events: set[threading.Event] = set()
        self.is_over = False

    def end_all(self) -> None:
        """The worker is about to end: held requests are answered now, and no request is held any more."""
        with self._lock:
            self.is_over = True
            events = list(self._events)
        for event in events:
            event.set()

    @contextmanager
    def held(self, namespace: Namespace, hangup: Hangup) -> Iterator[threading.Event]:
        """The event is set when the client hangs up, and when the worker is about to end.  Raises Throttled when too
        many requests are held."""
        event = threading.Event()
        with self._places.counted(namespace), hangup.waking(event.set):
            with self._lock:
                self._events.add(event)
            try:
                yield event
            finally:
                with self._lock:
                    self._events.discard(event)

    def until_news(
        self,
        namespace: Namespace,
        hangup: Hangup,
        longest_s: float,
        listening: Callable[[], AbstractContextManager[Bell]],
        look: Callable[[], tuple[float, T]],
        is_news: Callable[[T], bool],
    ) -> T:
        """``look`` returns its finding and the time at which it began.  Return these as soon as they are news, or after
        ``longest_s``.  The bell that ``listening`` gives rings when there may be news.  Raises Throttled, Unavailable,
        ClientGone."""
        began_s, found = look()
        if not longest_s or is_news(found):
            return found
        until_s = time.monotonic() + longest_s
        with self.held(namespace, hangup) as event, listening() as bell:
            while not is_news(found) and self._is_told(bell, event, began_s, until_s):
                self._pause(event, min(until_s, began_s + LOOK_S))
                hangup.check()
                began_s, found = look()
            hangup.check()
        return found

    def _is_told(self, bell: Bell, event: threading.Event, began_s: float, until_s: float) -> bool:
        """Sleep until the bell has rung since ``began_s``; False: the time is over, or the request is to end."""
        if self.is_over or time.monotonic() >= until_s:
            return False
        bell.listen(event, began_s)
        with waiting():
            is_set = event.wait(max(0.0, until_s - time.monotonic()))
        bell.forget(event)
        return is_set and not self.is_over

    def _pause(self, event: threading.Event, until_s: float) -> None:
        """Sleep until then.  Only a client that hangs up, and the worker's end, end the sleep earlier."""
        event.clear()
        if not self.is_over:
            with waiting():
                event.wait(max(0.0, until_s - time.monotonic()))
