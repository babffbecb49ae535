"""Estimates how long a request that came now would wait, for the Retry-After of a 429.

The first of these that is known gives the answer:

a queue that moves     its length over the pace at which slots were handed to it of late; while no instance is ready,
                       no less than the next line says
a start in progress    the request it was made for came at *t*, and its plan predicts its first token at *t* + TTFT
neither                the queue waits for room somewhere: as long again as its head has waited already
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Final

from gateway.serving.routing.waiting_room import Queue
from relay.state.registry import Registry
from thaw.errors import PlatformError
from thaw.ids import ActionName
from thaw.plan import Plan

_PLANS_KEPT_S: Final = 1.0
"""Plans are read at most once in this time: a crowd of refused requests must not read every plan once for each of
them."""


class Expectation:
    def __init__(self, registry: Registry, now_s: Callable[[], float] = time.monotonic) -> None:
        self._registry, self._now_s = registry, now_s
        self._lock = threading.Lock()
        self._plans: Sequence[Plan] = ()
        self._read_s = -_PLANS_KEPT_S

    def wait_s(self, action: ActionName, queue: Queue) -> float:
        """Return seconds.  Never raises: without a state server nothing is known of starts."""
        now_s = self._now_s()
        age_s = 0.0 if queue.oldest_s is None else now_s - queue.oldest_s
        starts = [s for p in self._starting(action, queue) if (s := left_s(p, age_s)) is not None]
        pace = _pace(queue.handed_s, now_s)
        if pace is not None:
            return max(queue.n_waiting / pace, min(starts, default=0.0) if not queue.serving else 0.0)
        return min(starts) if starts else age_s

    def _starting(self, action: ActionName, queue: Queue) -> list[Plan]:
        return [p for p in self._recent_plans() if p.action == action and p.group_id not in queue.serving]

    def _recent_plans(self) -> Sequence[Plan]:
        with self._lock:
            if self._now_s() - self._read_s >= _PLANS_KEPT_S:
                self._read_s = self._now_s()
                try:
                    self._plans = self._registry.plans()
                except PlatformError:
                    self._plans = ()
            return self._plans


def left_s(plan: Plan, oldest_age_s: float) -> float | None:
    """Return the seconds until the first token of the request that the plan was made for.  This is the oldest request
    that waits, or, if that one is younger than the plan, a request of another gateway."""
    if plan.predicted_ttft_s is None:
        return None
    age_s = max(oldest_age_s, time.time() - plan.created_wall_ns / 1e9)
    return max(0.0, plan.predicted_ttft_s - age_s)


def _pace(handed_s: Sequence[float], now_s: float) -> float | None:
    """Requests a second, up to now: a queue that stopped moving becomes slower with every second."""
    if len(handed_s) < 2 or now_s <= handed_s[0]:
        return None
    return len(handed_s) / (now_s - handed_s[0])
