"""Whose turn it is when memory comes free: the action whose oldest request is due first.

Deadlines are moments (arrival + objective), so whoever waits comes nearer to the front with every second: a newcomer
with a tighter objective overtakes only as long as it is really due earlier, and nobody starves behind equals.

Nor behind smaller ones: who is first and finds no room keeps the device that lacks least, so that what comes free there
adds up and is not taken, piece by piece, by others.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator
from typing import NamedTuple

from thaw.ids import ActionName


class Turn(NamedTuple):
    due_s: float
    name: ActionName
    need_bytes: int


class Turns:
    """Actions that wait for room, in order; those that only lack their minimum are due never and come last."""

    def __init__(self) -> None:
        self._order: list[Turn] = []
        self._of: dict[ActionName, Turn] = {}
        self._n_needing: dict[int, int] = {}

    def __contains__(self, name: object) -> bool:
        return name in self._of

    def __len__(self) -> int:
        return len(self._order)

    def __iter__(self) -> Iterator[Turn]:
        """As they stand now, whatever happens on the way."""
        return iter(self._order.copy())

    @property
    def first(self) -> ActionName | None:
        return self._order[0].name if self._order else None

    @property
    def least_need(self) -> int:
        """Bytes that the least of them waits for.  Raises ValueError where nobody waits."""
        return min(self._n_needing)

    def put(self, turn: Turn) -> None:
        if self._of.get(turn.name) != turn:
            self.drop(turn.name)
            self._of[turn.name] = turn
            self._n_needing[turn.need_bytes] = self._n_needing.get(turn.need_bytes, 0) + 1
            bisect.insort(self._order, turn)

    def drop(self, name: ActionName) -> None:
        if (turn := self._of.pop(name, None)) is not None:
            del self._order[bisect.bisect_left(self._order, turn)]
            self._n_needing[turn.need_bytes] -= 1
            if not self._n_needing[turn.need_bytes]:
                del self._n_needing[turn.need_bytes]
