"""Background work: one thread expires holds and scrubs slabs, another writes heartbeats while fetches run."""

from __future__ import annotations

import heapq
import itertools
import threading
import time
from collections.abc import Callable

from fetchd.segments import Segment
from fetchd.standstill import Standstill, Stop
from relay.protocol.segment import HEARTBEAT_S
from thaw.process.lasting import LastingThread


class Janitor:
    """Runs callables at their time, one after the other.  Sleeps without a timeout when nothing is due."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._stopped = False
        self._thread = LastingThread(self._run, "janitor")
        self._thread.start()

    def call_later(self, delay_s: float, call: Callable[[], None]) -> None:
        with self._changed:
            heapq.heappush(self._due, (time.monotonic() + delay_s, next(self._order), call))
            self._changed.notify()

    def stop(self) -> None:
        with self._changed:
            self._stopped = True
            self._changed.notify()
        self._thread.join(timeout=5)

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._stopped and (not self._due or self._due[0][0] > time.monotonic()):
                    self._changed.wait(max(0.0, self._due[0][0] - time.monotonic()) if self._due else None)
                if self._stopped:
                    return
                _, _, call = heapq.heappop(self._due)
            call()


class Heart:
    """Writes heartbeats to the control page of every segment that is being filled, and sleeps when there is none.

    A late heartbeat shows that this process stood still, and for how long."""

    def __init__(self) -> None:
        self._standstill = Standstill()
        self._changed = threading.Condition()
        self._filling: set[Segment] = set()
        self._stopped = False
        self._thread = LastingThread(self._run, "heart")
        self._thread.start()

    def add(self, segment: Segment) -> None:
        with self._changed:
            self._filling.add(segment)
            self._changed.notify()

    def remove(self, segment: Segment) -> None:
        """After this call the page is not touched any more: it may be unmapped."""
        with self._changed:
            self._filling.discard(segment)

    def stops_since(self, mono_ns: int) -> tuple[Stop, ...]:
        """Return the times in which nothing of this process ran and that ended after ``mono_ns`` (monotonic clock)."""
        with self._changed:
            self._standstill.look()  # the late heartbeat may not have come yet
            return self._standstill.since(mono_ns)

    def stop(self) -> None:
        with self._changed:
            self._stopped = True
            self._changed.notify()
        self._thread.join(timeout=5)

    def _run(self) -> None:
        with self._changed:
            while not self._stopped:
                for segment in self._filling:
                    segment.beat()
                if self._filling:
                    self._standstill.expect(HEARTBEAT_S)
                self._changed.wait(HEARTBEAT_S if self._filling else None)
                self._standstill.look()
                self._standstill.expect_nothing()
