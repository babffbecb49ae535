"""How many workers, in which groups, and how many stay: the sliding window of ParaServe 6.1."""

from __future__ import annotations

import bisect
import math
from collections import deque
from dataclasses import dataclass


class Window:
    """Arrivals of the last ``window_s`` seconds: ``t - W < a <= t``."""

    def __init__(self, window_s: float) -> None:
        self.window_s = window_s
        self._arrivals: deque[float] = deque()

    def add(self, at_s: float) -> None:
        """Add an arrival.  They may come in any order: a request that comes back is older than the last one."""
        if self._arrivals and at_s < self._arrivals[-1]:
            bisect.insort(self._arrivals, at_s)
        else:
            self._arrivals.append(at_s)

    @property
    def newest_s(self) -> float:
        """When the last of them came; minus infinity without one."""
        return self._arrivals[-1] if self._arrivals else -math.inf

    def count(self, now_s: float) -> int:
        while self._arrivals and self._arrivals[0] <= now_s - self.window_s:
            self._arrivals.popleft()
        return len(self._arrivals)


def new_workers(waiting: int, arrivals: int, supply: int, slots: int) -> int:
    """``max(0, ceil((Q + P - supply) / B))``; the queue and the window are added though they may overlap (the
    paper's "combined with": a burst that queues now is a sign of more to come)."""
    return max(0, math.ceil((waiting + arrivals - supply) / slots))


def groups(n_workers: int, largest: int = 4) -> list[int]:
    """As many groups of ``largest`` as fit, then one of the rest."""
    whole, rest = divmod(n_workers, largest)
    return [largest] * whole + [rest] * (rest > 0)


@dataclass(frozen=True, slots=True)
class Lacking:
    """The shortage of an action.  ``workers`` are missing to hold its requests, ``instances`` to reach its
    ``min_instances``; ``max_instances`` allows ``room`` more instances."""

    workers: int
    instances: int
    room: int

    @property
    def is_nothing(self) -> bool:
        return self.room <= 0 or (self.workers <= 0 and self.instances <= 0)

    def sizes(self, largest: int) -> list[int]:
        """Workers of each group to start.  A group answers as one endpoint and counts as one instance, whatever its
        number of workers: the minimum asks for groups of one worker each, and only demand asks for larger ones."""
        by_demand = groups(max(0, self.workers), largest)
        by_minimum = [1] * (self.instances - len(by_demand))
        return [*by_demand, *by_minimum][: max(0, self.room)]


def keep(inflight: int, waiting: int, arrivals: int, other_free_slots: int, slots: int, n_full: int) -> int:
    """How many workers of a group outlive consolidation: 1 scales down, more scale up, never more than are full."""
    needed = math.ceil((inflight + waiting + arrivals - other_free_slots) / slots)
    return min(n_full, max(1, needed))
