"""The order in which actions get memory that comes free: first the action whose oldest request is due first.

Deadlines are moments (arrival + objective), so an action that waits comes nearer to the front with every second.  A
newcomer with a tighter objective overtakes it only as long as it is really due earlier, and no action starves behind
others of its size.

No action starves behind smaller ones either.  If the first action finds no room, it keeps the device that lacks least,
so that the memory that comes free there adds up and is not taken, piece by piece, by others.
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
    """Actions that wait for room, in order.  An action that only lacks instances of its minimum is never due and comes
    last."""

    def __init__(self) -> None:
        self._order: list[Turn] = []
        self._of: dict[ActionName, Turn] = {}
        self._n_needing: dict[int, int] = {}

    def __contains__(self, name: object) -> bool:
        return name in self._of

    def __len__(self) -> int:
        return len(self._order)

    def __iter__(self) -> Iterator[Turn]:
        """Iterate over the actions as they stand now, whatever changes on the way."""
        return iter(self._order.copy())

    @property
    def first(self) -> ActionName | None:
        return self._order[0].name if self._order else None

    @property
    def least_need(self) -> int:
        """The fewest bytes that any of the actions waits for.  Raises ValueError when no action waits."""
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
