"""When connections are due, soonest first.  Pure.

A deadline that moves back costs nothing: the entry is looked at again when its old time has come.  So the hundred
requests of a kept-alive connection make one entry, not a hundred.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator
from typing import Final

from gateway.front.connection import Connection

_SPARE: Final = 1024


class Deadlines:
    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Connection]] = []
        self._number = itertools.count()

    def set(self, connection: Connection, deadline_s: float) -> None:
        connection.deadline_s = deadline_s
        if deadline_s < connection.due_s:
            connection.due_s = deadline_s
            heapq.heappush(self._heap, (deadline_s, next(self._number), connection))

    def due(self, now_s: float) -> Iterator[Connection]:
        """Yield the open connections whose deadline has come.  The caller closes each, or sets another deadline."""
        while self._heap and self._heap[0][0] <= now_s:
            due_s, _, connection = heapq.heappop(self._heap)
            if connection.is_closed or due_s != connection.due_s:
                continue  # an entry that an earlier deadline has replaced
            connection.due_s = float("inf")
            if connection.deadline_s <= now_s:
                yield connection
            elif connection.deadline_s != float("inf"):
                self.set(connection, connection.deadline_s)

    def forget_closed(self, n_open: int) -> None:
        """Connections that come and go would fill the memory until their entries were due."""
        if len(self._heap) > 2 * n_open + _SPARE:
            self._heap = [e for e in self._heap if not e[2].is_closed and e[0] == e[2].due_s]
            heapq.heapify(self._heap)
