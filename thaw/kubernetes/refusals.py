"""Remembers refusals, so that the operator does not ask for the same again for a while."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Set
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class Refusals(Generic[K, V]):
    """Only one thread may use it."""

    def __init__(self, for_s: float, now: Callable[[], float] = time.monotonic) -> None:
        self._for_s, self._now = for_s, now
        self._noted: dict[K, tuple[float, V]] = {}

    def note(self, key: K, said: V) -> None:
        self._noted[key] = (self._now() + self._for_s, said)

    def get(self, key: K) -> V | None:
        found = self._noted.get(key)
        return None if found is None else found[1]

    def forget(self, living: Set[K]) -> None:
        """Forget refusals whose time is over, and those of things that no longer exist."""
        now = self._now()
        self._noted = {k: (until, said) for k, (until, said) in self._noted.items() if until > now and k in living}

    def left_s(self) -> float | None:
        """Return the seconds until the next refusal's time is over; None when there is none."""
        return max(0.0, min(until for until, _ in self._noted.values()) - self._now()) if self._noted else None
