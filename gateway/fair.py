"""Turns between namespaces: start-time fair queueing (Goyal, Vin and Cheng, 1996).  Pure.

::

    virtual time     0         1         2         3
    a (weight 1)     [ 1st ]   [ 2nd ]   [ 3rd ]   …            each item begins where the last of its owner ended
    b (weight 2)     [1st][2nd][3rd][4th] …                     a weight of two makes an item half as long
    c                               ▲ comes now: begins at the virtual time, so every other owner has one item before it

The item that begins first is next.  So an owner with one item waits for at most one item of each other owner, however
many they have, and owners that always wait get shares in proportion to their weights.  An owner that comes back has
nothing saved and owes nothing beyond what it has just had.
"""

from __future__ import annotations

import heapq
import itertools
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from typing import Generic, TypeVar

from thaw.ids import Namespace

K = TypeVar("K", bound=Hashable)
T = TypeVar("T", bound=Hashable)
Owner = Namespace | None
"""None: all whose keys are not known."""


_OF_THE_FREE = 7
_ENDED_KEPT = 1_000
"""Above so many, owners that owe nothing any more are forgotten."""


def may_have_more(n_own: int, n_free: int) -> bool:
    """Whether an owner that has ``n_own`` places may have one of ``n_free``: while it has fewer than seven times as
    many as are free (a dynamic threshold; Choudhury and Hahne, 1998).  Of 64 places it gets 56 alone, two that compete
    get 30 each, and so on.  Where some came one after the other and nothing is free, a place that one of them gives
    back goes to an owner that has fewer.  Fewer than eight places are not kept free for others."""
    return n_own < _OF_THE_FREE * n_free


class VirtualTime(Generic[K]):
    """When the next item of each owner that waits begins.  ``weight_of`` is asked at each turn; it returns a number
    above 0.

    Only owners that wait move the time: it is the earliest of their next begins, and never goes back.  So an owner that
    joins begins no later than all others' next items but one each, no matter how much was given to owners that did not
    wait."""

    def __init__(self, weight_of: Callable[[K], float] = lambda _: 1.0) -> None:
        self._weight_of = weight_of
        self._now = 0.0
        self._begins: dict[K, float] = {}  # only owners that wait
        self._ended: dict[K, float] = {}  # owners that no longer wait, and have had more than others since

    def __contains__(self, owner: object) -> bool:
        return owner in self._begins

    def begins(self, owner: K) -> float:
        return self._begins[owner]

    def join(self, owner: K) -> None:
        """The owner has something that waits; until leave()."""
        self._advance()
        self._begins[owner] = max(self._now, self._ended.pop(owner, 0.0))

    def had_turn(self, owner: K, cost: float = 1.0) -> None:
        """One of the items with which the owner waits had its turn."""
        self._begins[owner] += cost / self._weight_of(owner)

    def had_beside(self, owner: K, cost: float) -> None:
        """The owner got something for which it did not have to wait.  While others wait, its next turn comes after one
        of theirs.  However often this happens, it owes no more than the largest."""
        if self._begins:
            self._advance()
            of = self._begins if owner in self._begins else self._ended
            of[owner] = max(of.get(owner, 0.0), self._now + cost / self._weight_of(owner))

    def leave(self, owner: K) -> None:
        ended = self._begins.pop(owner)
        self._advance()
        if not self._begins:
            self._now = 0.0
            self._ended.clear()  # nobody waits, so no owner has had more than a waiting one
        elif ended > self._now:
            self._ended[owner] = ended

    def _advance(self) -> None:
        now = min(self._begins.values(), default=self._now)
        if now > self._now:
            self._now = now
            if len(self._ended) > _ENDED_KEPT:
                self._ended = {owner: ended for owner, ended in self._ended.items() if ended > now}


class FairQueue(Generic[K, T]):
    """Items of owners that take turns; an owner's own items keep their order.  An item is in the queue once.  The cost
    of a call depends on the number of owners only."""

    def __init__(self, weight_of: Callable[[K], float] = lambda _: 1.0) -> None:
        self._time = VirtualTime[K](weight_of)
        self._items: dict[K, OrderedDict[T, None]] = {}
        self._heads: list[tuple[float, int, K]] = []  # when the owner's first item begins
        self._order = itertools.count()
        self._n = 0

    def __len__(self) -> int:
        return self._n

    def __iter__(self) -> Iterator[T]:
        return itertools.chain.from_iterable(self._items.values())

    def n_of(self, owner: K) -> int:
        return len(self._items.get(owner, ()))

    def put(self, owner: K, item: T) -> None:
        items = self._items.get(owner)
        if items is None:
            items = self._items[owner] = OrderedDict()
            self._time.join(owner)
            self._stand(owner)
        self._n += item not in items
        items[item] = None

    def take(self, may: Callable[[K], bool] = lambda _: True, *, cost: float = 1.0) -> T | None:
        """Return the next item of an owner that may have a turn; None when there is none.  ``cost``: as much of the
        item's cost as is known; charge() adds the rest."""
        passed = []
        found: T | None = None
        while self._heads:
            head = heapq.heappop(self._heads)
            owner = head[2]
            if head[0] < self._time.begins(owner):  # it was charged meanwhile
                self._stand(owner)
                continue
            if not may(owner):
                passed.append(head)
                continue
            found, _ = self._items[owner].popitem(last=False)
            self._n -= 1
            self._time.had_turn(owner, cost)
            self._stand_again(owner)
            break
        for head in passed:
            heapq.heappush(self._heads, head)
        return found

    def charge(self, owner: K, cost: float) -> None:
        """An item that was taken has cost so much more than take() counted."""
        if owner in self._time:
            self._time.had_turn(owner, cost)
        else:
            self._time.had_beside(owner, cost)

    def remove(self, owner: K, item: T) -> bool:
        """Take an item out that waits no more.  Return False when it is not there."""
        if item not in self._items.get(owner, ()):
            return False
        del self._items[owner][item]
        self._n -= 1
        if not self._items[owner]:
            self._heads = [head for head in self._heads if head[2] != owner]
            heapq.heapify(self._heads)
            self._stand_again(owner)
        return True

    def _stand(self, owner: K) -> None:
        heapq.heappush(self._heads, (self._time.begins(owner), next(self._order), owner))

    def _stand_again(self, owner: K) -> None:
        if self._items[owner]:
            self._stand(owner)
        else:
            del self._items[owner]
            self._time.leave(owner)
