"""Follows changes of objects of one kind as long as there is a cluster: one thread, one stream, nothing is read twice.

::

    list ──▶ version ──▶ watch from there ──▶ events, bookmarks ──▶ a newer version
      ▲                        ▲ │
      │   the version is       │ └── the stream ends, or is cut: go on at the newest version
      └── forgotten, refused   └──── the API server is away: wait, twice as long each time

Running work goes on while the API server is away; only requests to it wait.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence
from typing import Final, Generic, TypeVar

from thaw.errors import ThawError, Unavailable
from thaw.kubernetes.api import EXPIRED, Collection, Event
from thaw.logs import Log
from thaw.process.lasting import LastingThread

T = TypeVar("T")

_FIRST_PAUSE_S: Final = 0.1
_LONGEST_PAUSE_S: Final = 5.0
_LASTED_S: Final = 1.0
"""A stream that ended sooner is no sign that the next one will last."""

_JOIN_S: Final = 5.0


class Watch(Generic[T]):
    """``take`` is called for each event, ``again`` with all objects when the events before it are unknown, ``back``
    each time that the API server answers again.  All run on the watch's thread."""

    def __init__(
        self,
        collection: Collection[T],
        selector: str,
        take: Callable[[Event[T]], None],
        again: Callable[[Sequence[T]], None],
        back: Callable[[], None],
        log: Log,
    ) -> None:
        self._collection, self._selector, self._log = collection, selector, log
        self._take, self._again, self._back = take, again, back
        self._version = ""
        self._stop = threading.Event()
        self._changed = threading.Condition()
        self._contacts = 0  # how many streams have begun
        self.away = False
        self._thread = LastingThread(self._run, "watch")
        self._thread.start()

    @property
    def contacts(self) -> int:
        return self._contacts

    def wait_contact(self, seen: int, deadline_s: float, given_up: Callable[[], bool]) -> None:
        """Wait until the API server has answered more often than ``seen``, or for ``deadline_s``, or until
        ``given_up`` says so (it is checked again after :meth:`look_up`)."""
        with self._changed:
            self._changed.wait_for(lambda: self._stop.is_set() or given_up() or self._contacts > seen, deadline_s)

    def look_up(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def stop(self) -> None:
        self._stop.set()
        self.look_up()
        self._collection.end_watch()
        self._thread.join(_JOIN_S)

    def _run(self) -> None:
        pause_s = _FIRST_PAUSE_S
        while not self._stop.is_set():
            began = time.monotonic()
            try:
                self._follow()
            except ThawError as e:
                if not isinstance(e, Unavailable):
                    self._version = ""  # it is refused: the same request would be refused for ever
                if not self.away and not self._stop.is_set():
                    self.away = True
                    self._log.event("cluster_away", error=e.message)
            if time.monotonic() - began > _LASTED_S:
                pause_s = _FIRST_PAUSE_S
            self._stop.wait(pause_s * random.uniform(0.5, 1.0))  # noqa: S311  so that nodes do not come back at once
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _follow(self) -> None:
        """Returns when the stream ends."""
        if not self._version:
            objects, version = self._collection.list(self._selector)
            self._again(objects)
            self._version = version  # not before: if _again did not finish, it is read again
        events = self._collection.watch(self._selector, self._version)
        if self._stop.is_set():
            self._collection.end_watch()  # stop() was earlier than the stream
        self._answered()
        for event in events:
            if event.kind == EXPIRED:
                self._version = ""
                return
            self._version = event.version
            if event.what is not None:
                self._take(event)

    def _answered(self) -> None:
        if self.away:
            self.away = False
            self._log.event("cluster_back")
            self._back()
        with self._changed:
            self._contacts += 1
            self._changed.notify_all()
