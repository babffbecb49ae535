"""Turns of namespaces at an operation of which each may run a few at once: a caller without a turn waits."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from invoker.containers.adapter_slots import left_s


class Turns:
    """Thread-safe."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._changed = threading.Condition()
        self._taken: Counter[str] = Counter()

    @contextmanager
    def one_of(self, namespace: str, deadline: float) -> Iterator[None]:
        """``deadline`` is monotonic.  Raises TimeLimitExceeded when no turn is free until then."""
        with self._changed:
            while self._taken[namespace] >= self._most:
                self._changed.wait(left_s(deadline))
            self._taken[namespace] += 1
        try:
            yield
        finally:
            with self._changed:
                self._taken[namespace] -= 1
                if not self._taken[namespace]:
                    del self._taken[namespace]
                self._changed.notify_all()
