"""The instances of this host that may hold a part of fetchd's pool, or may still ask for one.

The scheduler counts a start from its decision on.  When the instance has ended, the scheduler must know when nothing of
the start is left in the pool, so the host reports which instances may still have something there::

    Start taken ──▶ user ──fetchd is asked──▶ holds ──released, and no question on its way──▶ no user
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from thaw.ids import InstanceId


class PoolUsers:
    """Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._entered: set[InstanceId] = set()
        self._asking: set[InstanceId] = set()

    def enter(self, instance_id: InstanceId) -> None:
        with self._lock:
            self._entered.add(instance_id)

    def leave(self, instance_id: InstanceId) -> bool:
        """The instance has released its part of the pool.  False when it had left before."""
        with self._lock:
            was_there = instance_id in self._entered
            self._entered.discard(instance_id)
            return was_there

    @contextmanager
    def asking(self, instance_id: InstanceId) -> Iterator[None]:
        """A request to fetchd is on its way.  An instance that leaves meanwhile stays listed until the block ends."""
        with self._lock:
            self._asking.add(instance_id)
        try:
            yield
        finally:
            with self._lock:
                self._asking.discard(instance_id)

    def names(self) -> tuple[InstanceId, ...]:
        with self._lock:
            return tuple(sorted(self._entered | self._asking))
