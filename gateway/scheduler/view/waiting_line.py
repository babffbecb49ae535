"""The order in which actions get memory that comes free: namespaces take turns, and in a namespace's turn it is the
action whose oldest request is due first.

Deadlines are moments (arrival + objective), so an action that waits comes nearer to the front with every second.  A
newcomer with a tighter objective overtakes it only as long as it is really due earlier, and no action starves behind
others of its size.

Between namespaces deadlines do not decide: a namespace that asks for much, early, would be first for ever.  A start
takes a part of its namespace's share, by the memory that it holds (gateway/fair.py), so a namespace with one waiting
action waits for at most one start of each other namespace.  If two have had the same, the one that is due first is
first.  A start that found room without waiting takes from that share too, but the turns of waiting namespaces stay as
they are.

No action starves behind smaller ones either.  If the first action finds no room, it keeps the device that lacks least,
so that the memory that comes free there adds up and is not taken, piece by piece, by others.
"""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Callable, Iterator
from typing import NamedTuple

from gateway.fair import VirtualTime
from thaw.ids import ActionName, Namespace


class Turn(NamedTuple):
    due_s: float
    name: ActionName
    need_bytes: int


class _Head(NamedTuple):
    """The first action of a namespace, and when the namespace's next turn begins."""

    begins: float
    turn: Turn


class Turns:
    """Actions that wait for room, in order.  An action that only lacks instances of its minimum is never due and comes
    last in its namespace."""

    def __init__(
        self,
        weight_of: Callable[[Namespace], float] = lambda _: 1.0,
        may_start: Callable[[ActionName], bool] = lambda _: True,
    ) -> None:
        """``may_start``: False for the actions of a namespace that may start nothing now.  They keep their places."""
        self._weight_of, self._may_start = weight_of, may_start
        self._time = VirtualTime[Namespace](weight_of)
        self._order: dict[Namespace, list[Turn]] = {}
        self._heads: list[_Head] = []  # in order
        self._head_of: dict[Namespace, _Head] = {}
        self._of: dict[ActionName, Turn] = {}
        self._lifted: ActionName | None = None
        self._n_needing: dict[int, int] = {}

    def __contains__(self, name: object) -> bool:
        return name in self._of

    def __len__(self) -> int:
        return len(self._of)

    def __iter__(self) -> Iterator[Turn]:
        """Iterate over a copy of the present order: as if each action had its turn."""
        if len(self._order) == 1:
            return iter(next(iter(self._order.values())).copy())
        return self._in_turn([(head, 0, self._order[_owner(head.turn.name)].copy()) for head in self._heads])

    def _in_turn(self, heap: list[tuple[_Head, int, list[Turn]]]) -> Iterator[Turn]:
        """``heap``: each namespace's actions, and how many of them have been yielded."""
        while heap:
            head, n, turns = heap[0]
            if n + 1 < len(turns):
                begins = head.begins + head.turn.need_bytes / self._weight_of(_owner(head.turn.name))
                heapq.heapreplace(heap, (_Head(begins, turns[n + 1]), n + 1, turns))
            else:
                heapq.heappop(heap)
            yield head.turn

    @property
    def first(self) -> ActionName | None:
        """The first action that may start."""
        return next((head.turn.name for head in self._heads if self._may_start(head.turn.name)), None)

    @property
    def least_need(self) -> int:
        """The fewest bytes that any of the actions waits for.  Raises ValueError when no action waits."""
        return min(self._n_needing)

    def put(self, turn: Turn) -> None:
        if self._of.get(turn.name) != turn:
            self._take_out(turn.name)
            self._of[turn.name] = turn
            self._n_needing[turn.need_bytes] = self._n_needing.get(turn.need_bytes, 0) + 1
            owner = _owner(turn.name)
            if owner not in self._time:
                self._time.join(owner)
            bisect.insort(self._order.setdefault(owner, []), turn)
            self._stand(owner)

    def drop(self, name: ActionName) -> None:
        self._take_out(name)
        self._leave(_owner(name))

    def lift(self, name: ActionName) -> bool:
        """Take the action out to examine it, until settle().  Its namespace's turn stays meanwhile, and a start is
        counted as one that had waited.  Return False when the action does not wait."""
        if name not in self._of:
            return False
        self._lifted = name
        self._take_out(name)
        return True

    def settle(self, name: ActionName) -> None:
        """The action that was lifted was put again, or waits no more."""
        self._lifted = None
        self._leave(_owner(name))

    def started(self, name: ActionName, n_bytes: int) -> None:
        """A start of the action got this much memory, whether the action stands here or not."""
        owner = _owner(name)
        if owner in self._time and (name in self._of or name == self._lifted):
            self._time.had_turn(owner, n_bytes)
        else:
            self._time.had_beside(owner, n_bytes)
        self._stand(owner)

    def _take_out(self, name: ActionName) -> None:
        if (turn := self._of.pop(name, None)) is not None:
            owner = _owner(name)
            order = self._order[owner]
            del order[bisect.bisect_left(order, turn)]
            if not order:
                del self._order[owner]
            self._stand(owner)
            self._n_needing[turn.need_bytes] -= 1
            if not self._n_needing[turn.need_bytes]:
                del self._n_needing[turn.need_bytes]

    def _leave(self, owner: Namespace) -> None:
        if owner in self._time and owner not in self._order:
            self._time.leave(owner)

    def _stand(self, owner: Namespace) -> None:
        """Put the namespace's head where it belongs now."""
        before, order = self._head_of.get(owner), self._order.get(owner)
        now = _Head(self._time.begins(owner), order[0]) if order else None
        if now == before:
            return
        if before is not None:
            del self._heads[bisect.bisect_left(self._heads, before)]
            del self._head_of[owner]
        if now is not None:
            bisect.insort(self._heads, now)
            self._head_of[owner] = now


def _owner(name: ActionName) -> Namespace:
    return Namespace(name.partition("/")[0])
