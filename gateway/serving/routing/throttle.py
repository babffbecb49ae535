"""Requests that a gateway refuses with a 429: OpenWhisk's two throttles per namespace, and full queues.

OpenWhisk's throttles, with its messages, limit invocations per minute and concurrent invocations.  A second pair limits
all requests with a key.  Thaw limits how many
requests may wait for an instance of one action, and of all actions of a namespace.  Its refusal says when a request
that came now would be served.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from gateway.fair import may_have_more
from gateway.serving.routing.expected_wait import Expectation
from gateway.serving.routing.waiting_room import Queue, WaitingRoom
from thaw.action import Action
from thaw.errors import Throttled
from thaw.ids import Namespace
from thaw.quotas import who_raises

WINDOW_S = 60.0


@dataclass(slots=True)
class _Use:
    window: int = -1
    count: int = 0
    concurrent: int = 0
    away: int = 0  # how many of these have no request's thread

    @property
    def places(self) -> int:
        return self.concurrent - self.away


class Place:
    """An invocation that is counted in, until close().  Threads may use it."""

    def __init__(self, throttle: Throttle, namespace: Namespace) -> None:
        """Raises Throttled."""
        self._throttle, self._namespace = throttle, namespace
        self._lock = threading.Lock()
        self._away = self._closed = False
        throttle.enter(namespace)

    def leave_thread(self) -> None:
        """The request is answered, and the invocation goes on."""
        with self._lock:
            if not (self._away or self._closed):
                self._away = self._throttle.leave_thread(self._namespace)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._throttle.leave(self._namespace, away=self._away)


class Throttle:
    """Counts this gateway's requests; with several gateways, each allows the settings' values (OpenWhisk's controllers
    divide them)."""

    def __init__(
        self,
        per_minute: int,
        concurrent: int,
        now_s: Callable[[], float] = time.monotonic,
        places: int | None = None,
    ) -> None:
        """``places``: the threads that invocations of all namespaces may hold at once, and as many may go on without
        one.  A namespace has at most seven times as many as are free."""
        self._per_minute, self._concurrent, self._now_s = per_minute, concurrent, now_s
        self._free = self._free_away = places
        self._lock = threading.Lock()
        self._uses: dict[Namespace, _Use] = {}

    def enter(self, namespace: Namespace) -> None:
        """Count an invocation in; leave() counts it out.  Raises Throttled."""
        with self._lock:
            use = self._use_now(namespace)
            if use.concurrent >= self._concurrent:
                raise Throttled(
                    f"Too many concurrent requests in flight (count: {use.concurrent + 1}, "
                    f"allowed: {self._concurrent}).",
                )
            self._check_places(use)
            use.count += 1
            use.concurrent += 1
            self._take_places(1)

    def enter_again(self, namespace: Namespace, n: int = 1) -> None:
        """Count ``n`` requests that go on with an invocation which is counted in, or that nobody waits for.  Raises
        Throttled, and counts none then."""
        with self._lock:
            self._use_now(namespace, n).count += n

    def leave(self, namespace: Namespace, *, away: bool = False) -> None:
        """``away``: it has left its thread."""
        with self._lock:
            use = self._uses[namespace]
            if away:
                self._come_back(use)
            use.concurrent -= 1
            self._take_places(-1)

    def leave_thread(self, namespace: Namespace) -> bool:
        """An invocation that is counted in goes on without a request, which gives its place to another one.  False when
        too many do so already: then it has its place to its end, so that the number of such invocations is bounded,
        too."""
        with self._lock:
            use = self._uses[namespace]
            if self._free_away is None or not may_have_more(use.away, self._free_away):
                return False
            use.away += 1
            self._free_away -= 1
            self._take_places(-1)
            return True

    def return_to_thread(self, namespace: Namespace) -> None:
        """A request goes on with an invocation that has left its thread.  Raises Throttled."""
        with self._lock:
            use = self._uses[namespace]
            self._check_places(use)
            self._come_back(use)

    def _come_back(self, use: _Use) -> None:
        use.away -= 1
        if self._free_away is not None:
            self._free_away += 1
        self._take_places(1)

    def _take_places(self, n: int) -> None:
        if self._free is not None:
            self._free -= n

    def _check_places(self, use: _Use) -> None:
        """Raises Throttled when the namespace may not have one place more."""
        if self._free is not None and not may_have_more(use.places, self._free):
            raise Throttled(
                f"Too many concurrent requests in flight (count: {use.places + 1}, allowed now: {use.places}): "
                f"{self._free} of this gateway's threads are free, and are for namespaces that have fewer. An operator "
                "gives it more with THAW_GATEWAY_THREADS.",
            )

    def _use_now(self, namespace: Namespace, n: int = 1) -> _Use:
        """Raises Throttled when there were too many requests in this minute."""
        now_s = self._now_s()
        window = int(now_s // WINDOW_S)
        use = self._uses.setdefault(namespace, _Use())
        if use.window != window:
            use.window, use.count = window, 0
        if use.count + n > self._per_minute:
            raise Throttled(
                f"Too many requests in the last minute (count: {use.count + n}, allowed: {self._per_minute}).",
                retry_after_s=(window + 1) * WINDOW_S - now_s,
            )
        return use

    @contextmanager
    def counted(self, namespace: Namespace) -> Iterator[Place]:
        place = Place(self, namespace)
        try:
            yield place
        finally:
            place.close()


class QueueCaps:
    """Limits this gateway's queues, as the throttle limits this gateway's requests.  It is asked before a request is
    accepted, so an accepted one (a 202, a request that lost its worker) is never refused afterwards."""

    def __init__(
        self,
        per_action: int,
        per_namespace: int,
        room: WaitingRoom,
        expected: Expectation,
        n_held: Callable[[Namespace], int] = lambda _: 0,
        most_held: Callable[[Namespace], int] = lambda _: sys.maxsize,
    ) -> None:
        """``n_held``: how many requests of the namespace wait at all gateways; ``most_held``: how many may."""
        self._per_action, self._per_namespace = per_action, per_namespace
        self._room, self._expected = room, expected
        self._n_held, self._most_held = n_held, most_held

    def check(self, action: Action, n: int = 1, *, is_held: bool = True) -> None:
        """Whether ``n`` more may wait for the action.  A request that finds a free instance costs no question to the
        state server.  ``is_held``: False for a 202, which has a quota of its own.  Raises Throttled, Unavailable."""
        queue = self._room.queue(action.served_by)
        full = queue.n_waiting + n > self._per_action
        at_once = n == 1 and bool(queue.serving) and not queue.n_waiting  # the request most likely finds a slot
        if not full and (queue.n_in_namespace + n <= self._per_namespace or at_once):
            if is_held and not at_once:
                self._check_all_gateways(action, queue, n)
            return
        of, n, allowed = (
            (_whose_queue(action), queue.n_waiting, self._per_action)
            if full
            else (f"namespace {action.namespace}", queue.n_in_namespace, self._per_namespace)
        )
        raise Throttled(
            f"Too many requests wait for {of} (count: {n}, allowed: {allowed}).",
            retry_after_s=self._expected.wait_s(action.served_by, queue),
            hint="Retry-After says when one would be served",
        )

    def _check_all_gateways(self, action: Action, queue: Queue, n: int) -> None:
        namespace = action.namespace
        held, allowed = self._n_held(namespace), self._most_held(namespace)
        if held + n > allowed:
            raise Throttled(
                f"Too many requests wait for namespace {namespace} (count: {held}, allowed: {allowed}). "
                f"{who_raises('held', namespace)}.",
                retry_after_s=self._expected.wait_s(action.served_by, queue),
                hint="Retry-After says when one would be served",
            )


def _whose_queue(action: Action) -> str:
    """In words of those who deployed it: nobody has deployed a pool."""
    return action.name if action.served_by == action.name else f"{action.name} and what shares its instances"
