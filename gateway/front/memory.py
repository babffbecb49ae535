"""The memory for long bodies, and for actions of which answers are made, which namespaces share; and the line in which
bodies wait for it.

A namespace gets at most as much as is free (the dynamic threshold of Choudhury and Hahne, 1998): alone it gets half,
and however many fill what they can get, the next one still gets something.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Iterator
from typing import Final

from gateway.front.connection import Connection
from thaw.ids import Namespace

LINE_PER_NAMESPACE: Final = 64
"""Each holds up to 128 KiB already: its head, and the part of its body that came with it."""


class SharedMemory:
    """Threads may use it."""

    def __init__(self, n_bytes: int) -> None:
        self._free = n_bytes
        self._taken: Counter[Namespace] = Counter()
        self._lock = threading.Lock()

    def take(self, namespace: Namespace, n_bytes: int, own: int = 0) -> bool:
        """Return False when there is no room for so much now.  A namespace's first body may have all that is free;
        ``own`` is the memory that this body has already."""
        with self._lock:
            taken = self._taken.get(namespace, 0)
            if n_bytes > self._free or (taken > own and taken + n_bytes > self._free):
                return False
            self._taken[namespace] += n_bytes
            self._free -= n_bytes
            return True

    def give_back(self, namespace: Namespace, n_bytes: int) -> None:
        with self._lock:
            self._free += n_bytes
            self._taken[namespace] -= n_bytes
            if not self._taken[namespace]:
                del self._taken[namespace]


class Line:
    """Namespaces take turns.  Within one the order is kept: short bodies would else overtake a long one for ever."""

    def __init__(self, memory: SharedMemory) -> None:
        self._memory = memory
        self._of: dict[Namespace, deque[Connection]] = {}

    def take(self, connection: Connection, namespace: Namespace) -> bool:
        """Return whether there is memory for the connection, and no other connection waits that comes first."""
        may_try = namespace not in self._of or connection.reserved is not None
        return may_try and self._take(connection, namespace)

    def _take(self, connection: Connection, namespace: Namespace) -> bool:
        own = 0 if connection.reserved is None else connection.reserved[1]
        return self._memory.take(namespace, connection.wants, own)

    def join(self, connection: Connection, namespace: Namespace) -> bool:
        """Return False when too many of the namespace wait.  A request that has a part of its memory goes first in its
        namespace: otherwise it would wait for requests that wait for its memory."""
        waiting = self._of.setdefault(namespace, deque())
        if len(waiting) >= LINE_PER_NAMESPACE:
            return False
        if connection.reserved is None:
            waiting.append(connection)
        else:
            waiting.appendleft(connection)
        return True

    def leave(self, connection: Connection, namespace: Namespace) -> None:
        waiting = self._of[namespace]
        waiting.remove(connection)
        if not waiting:
            del self._of[namespace]

    def serve(self) -> Iterator[Connection]:
        """Yield the connections for which memory has been taken now.  They have left the line."""
        stuck: set[Namespace] = set()
        while len(stuck) < len(self._of):
            namespace = next(n for n in self._of if n not in stuck)
            waiting = self._of.pop(namespace)
            if self._take(waiting[0], namespace):
                served = waiting.popleft()
                if waiting:
                    self._of[namespace] = waiting  # behind the others
                yield served
            else:
                self._of[namespace] = waiting
                stuck.add(namespace)
