"""How many inspections and fetches one namespace may have at once in fetchd, so that it does not lock out others."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final

from thaw.errors import Throttled

INSPECTIONS: Final = 8
"""A namespace has at most so many at once.  One that a store answers takes some tens of milliseconds."""
INSPECTIONS_OF_ALL: Final = 256
FETCHES: Final = 64
"""A namespace has at most so many stages whose bytes have not come yet.  Each has a conversation that waits."""
FETCHES_OF_ALL: Final = 512
"""fetchd has 1,024 conversations: the others are for questions that are answered at once."""


class Places:
    """Counts the running inspections or fetches of each namespace.  Thread-safe."""

    def __init__(self, most: int, most_of_all: int, what: str) -> None:
        self._most, self._most_of_all, self._what = most, most_of_all, what
        self._lock = threading.Lock()
        self._taken: Counter[str] = Counter()

    @contextmanager
    def one_of(self, namespaces: Sequence[str]) -> Iterator[None]:
        """Take a place of the namespace with the most free places.  Without a namespace (an older peer) all share one
        name.

        Several namespaces may have an action of the same model: one of them cannot lock the others out of it.  Raises
        Throttled at once when none has a place.
        """
        with self._lock:
            owner = min(namespaces or ("",), key=lambda name: self._taken[name])
            check(self._taken[owner], self._taken.total(), owner, self._most, self._most_of_all, self._what)
            self._taken[owner] += 1
        try:
            yield
        finally:
            with self._lock:
                self._taken[owner] -= 1
                if not self._taken[owner]:
                    del self._taken[owner]


def check_fetches(n_own: int, n_all: int, namespace: str) -> None:
    """Raises Throttled when the namespace, or all together, have as many fetches as they may."""
    check(n_own, n_all, namespace, FETCHES, FETCHES_OF_ALL, "fetches")


def check(n_own: int, n_all: int, namespace: str, most: int, most_of_all: int, what: str) -> None:
    """Raises Throttled."""
    whose = f"namespace {namespace:.200}" if namespace else "the callers without a namespace"
    if n_own >= most or n_all >= most_of_all:
        who, n = (f"{whose} has", n_own) if n_own >= most else ("all namespaces together have", n_all)
        raise Throttled(
            f"too many {what} on this host: {who} {n} that have not ended",
            hint="wait until some have ended; are their stores slow?",
        )
