"""Turns of namespaces to compute: one interpreter runs one thread at a time, and one namespace may have many threads.

::

    computing() ─▶ has a turn ── waiting() ─▶ waits, without a turn ──┐
                      ▲                                               │
                      └──── in line for a turn, by namespace ◀────────┘   while others have all turns

Without turns, a request beside 32 of another namespace has a 33rd of the interpreter.  With them it waits for a turn of
that namespace each time that it goes on.  A request that waits for something has no turn, so there is no limit to how
many wait.

Nobody takes turns while only one namespace computes: handing the interpreter on in order costs more than leaving it to
chance.  A turn that takes longer than ``longest_s`` counts no more, so a request that computes for long, or waits in a
place that says nothing of it, holds up others no longer than that.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Final

from gateway.fair import FairQueue, Owner
from thaw.process.lasting import LastingThread

N_TURNS: Final = 2
"""While one of two is in a system call, the other one computes.  Of more, each would have less of the interpreter."""
_LONGEST_S: Final = 0.025
"""Some times as long as a function's request computes."""
_SHARED_S: Final = 1.0
"""For so long after two namespaces have computed, one after the other, requests take turns."""
_here = threading.local()


class Processor:
    def __init__(
        self,
        n_turns: int = N_TURNS,
        longest_s: float = _LONGEST_S,
        now_s: Callable[[], float] = time.monotonic,
        *,
        shared_s: float = _SHARED_S,
    ) -> None:
        self._longest_s, self._shared_s, self._now_s = longest_s, shared_s, now_s
        self._lock = threading.Lock()
        self._joined = threading.Condition(self._lock)
        self._stops = self._is_unwatched = False
        self._watch_thread = LastingThread(self._watch, "processor")
        self.n_free = n_turns
        self._since_s: dict[Computing, float] = {}  # of those that have turns, the oldest turn first
        self._line = FairQueue[Owner, Computing]()
        self._latest: Owner | object = self  # who computed last; at first, nobody
        self._shared_until_s = float("-inf")

    def start(self) -> None:
        """From now on turns that take too long end."""
        self._watch_thread.start()

    def stop(self) -> None:
        with self._joined:
            self._stops = True
            self._joined.notify()

    def computing(self, owner: Owner) -> Computing:
        """The block is a request of ``owner`` on this thread.  It begins when the request has a turn."""
        return Computing(self, owner)

    @property
    def n_in_line(self) -> int:
        return len(self._line)

    def take(self, request: Computing) -> None:
        now_s = self._now_s()
        if not self._is_shared(request.owner, now_s):
            return
        with self._lock:
            if self.n_free:
                self.n_free -= 1
                self._since_s[request] = now_s
                return
            self._line.put(request.owner, request)
            if self._is_unwatched:
                self._joined.notify()
        request.turn.acquire()

    def give(self, request: Computing) -> None:
        if request not in self._since_s:  # it took none, or its turn counts no more
            return
        with self._lock:
            self._pass_on(request)

    def _is_shared(self, owner: Owner, now_s: float) -> bool:
        """Whether several namespaces compute.  Threads need no lock here: a mistake is over with the next request."""
        if owner != self._latest:
            if self._latest is not self:
                self._shared_until_s = now_s + self._shared_s
            self._latest = owner
        return now_s < self._shared_until_s

    def _watch(self) -> None:
        """End turns that take too long.  One thread does so, because hundreds may be in line."""
        with self._joined:
            while True:
                self._is_unwatched = True
                self._joined.wait_for(lambda: self._line or self._stops)
                self._is_unwatched = False
                if self._stops:
                    return
                longest, since_s = next(iter(self._since_s.items()))
                left_s = since_s + self._longest_s - self._now_s()
                if left_s > 0:
                    self._joined.wait(left_s)
                else:
                    self._pass_on(longest)

    def _pass_on(self, request: Computing) -> None:
        """End the request's turn, if it has one: the next in line has it now."""
        since_s = self._since_s.pop(request, None)
        if since_s is None:
            return
        now_s = self._now_s()
        if self._line:
            self._line.charge(request.owner, now_s - since_s)
        following = self._line.take(cost=0.0)
        if following is None:
            self.n_free += 1
        else:
            self._since_s[following] = now_s
            following.turn.release()


class Computing:
    """A request on its thread.  ``turn`` is released when it gets one for which it is in line."""

    __slots__ = ("_n_waits", "_processor", "owner", "turn")

    def __init__(self, processor: Processor, owner: Owner) -> None:
        self._processor, self.owner = processor, owner
        self._n_waits = 0
        self.turn = threading.Lock()
        self.turn.acquire()

    def __enter__(self) -> None:
        self._processor.take(self)
        _here.request = self

    def __exit__(self, *_: object) -> None:
        _here.request = None
        self._processor.give(self)

    def wait(self) -> None:
        self._n_waits += 1
        if self._n_waits == 1:
            self._processor.give(self)

    def go_on(self) -> None:
        self._n_waits -= 1
        if not self._n_waits:
            self._processor.take(self)

    def another(self) -> Computing:
        return Computing(self._processor, self.owner)


class Waiting:
    """A block in which the thread waits.  It has no state of its own, so there is one for all."""

    def __enter__(self) -> None:
        request = _request()
        if request is not None:
            request.wait()

    def __exit__(self, *_: object) -> None:
        request = _request()
        if request is not None:
            request.go_on()


_WAITING: Final = Waiting()


def waiting() -> Waiting:
    """The block waits for something, without a turn.  A thread that serves no request goes through."""
    return _WAITING


def computes_freely() -> None:
    """From here on this thread's request needs no turns: it waits again and again, and computes little each time."""
    request = _request()
    if request is not None:
        request.__exit__()


def another_thread() -> Computing | None:
    """The block on another thread is a part of this thread's request.  None: this thread serves none by turns."""
    request = _request()
    return None if request is None else request.another()


def _request() -> Computing | None:
    return getattr(_here, "request", None)
