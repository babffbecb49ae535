"""The places for adapters in one instance: which adapter is where, and which one makes room for the next.

::

    pin: there ──────────────────────────────▶ pinned ──unpin──▶ the one used last
         absent ──a free place, or one that no run uses──▶ loading ──loaded──▶ pinned
                                                              └──failed──▶ absent

An adapter that a run uses is pinned, and stays.  Among the others, an older version of one goes first, and then the
one that was used longest ago.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from thaw.errors import InstanceGone, ThawError, TimeLimitExceeded


@dataclass(slots=True, eq=False)
class Held:
    """``name``: the URI and the version, which the container knows; empty while it loads."""

    uri: str
    name: str = ""
    pins: int = 0
    error: ThawError | None = None  # why it was not loaded
    lost: bool = False  # the container does not have it after all


@dataclass(slots=True, eq=False)
class Wait:
    """A run's wait for its adapter, until ``deadline`` on the monotonic clock."""

    deadline: float
    hung_up: bool = False

    def left_s(self) -> float:
        """Raises ConnectionAbortedError when the client has hung up, and TimeLimitExceeded."""
        if self.hung_up:
            raise ConnectionAbortedError("the client has hung up")
        return left_s(self.deadline)


def left_s(deadline: float) -> float:
    """Raises TimeLimitExceeded."""
    remaining_s = deadline - time.monotonic()
    if remaining_s <= 0:
        raise TimeLimitExceeded("the adapter was not loaded within the action's time limit")
    return remaining_s


class AdapterSlots:
    """Thread-safe."""

    def __init__(self, n_slots: int, loaded: Sequence[str] = ()) -> None:
        """``loaded``: the names of the adapters that the container has already; the one loaded last is at the end."""
        self._n_slots = n_slots
        self._changed = threading.Condition()
        self._held: dict[str, Held] = {}  # by URI; the one used last is at the end
        self._old: dict[str, None] = {}  # the names of the other adapters in the container
        self._closed = False
        self.take_over(loaded, ())

    def pinned(self, uri: str) -> Held | None:
        """Return the adapter if it is there.  It stays until unpin()."""
        with self._changed:
            return self._pin(uri)

    def pin(self, uri: str, wait: Wait) -> tuple[Held, str | None]:
        """Return the adapter, which stays until unpin().  With a name (or an empty one) beside it, the caller must
        have it loaded in the place of that one, and loaded() or failed() called.

        Raises InstanceGone, and what ``wait`` raises: meanwhile all places are used, or another caller's load goes on.
        """
        with self._changed:
            while True:
                if (held := self._pin(uri)) is not None:
                    return held, None
                if uri not in self._held and (replaced := self._room()) is not None:
                    held = self._held[uri] = Held(uri, pins=1)
                    return held, replaced
                self._sleep(wait)

    def wait_loaded(self, held: Held, wait: Wait) -> None:
        """Raises what pin() raises, and the error of the load."""
        with self._changed:
            while not held.name:
                if held.error is not None:
                    raise held.error
                self._sleep(wait)

    def loaded(self, held: Held, name: str) -> None:
        with self._changed:
            held.name = name
            self._old.pop(name, None)
            self._changed.notify_all()

    def failed(self, held: Held, error: ThawError) -> None:
        held.error = error
        self.forget(held)

    def lose(self, held: Held) -> bool:
        """Note that the container does not have it: runs that want it wait for forget().  Return False when this is
        known already."""
        with self._changed:
            is_news = not held.lost and self._held.get(held.uri) is held
            held.lost = True
            return is_news

    def forget(self, held: Held) -> None:
        """The container does not have it."""
        with self._changed:
            if self._held.get(held.uri) is held:
                del self._held[held.uri]
            self._changed.notify_all()

    def names(self) -> list[str]:
        with self._changed:
            return [*self._old, *(held.name for held in self._held.values() if held.name)]

    def take_over(self, names: Sequence[str], known: Collection[str]) -> None:
        """Note that the container has these adapters.  Those that were unknown here are removed first, older versions
        before the others.  An adapter that was ``known`` before the container was asked, and is not among them, has
        gone."""
        with self._changed:
            there = {name: name.rpartition("#")[0] for name in names}
            for held in [h for h in self._held.values() if h.name in known and not h.pins]:
                if held.name not in there:
                    del self._held[held.uri]
            ours = {held.name for held in self._held.values()}
            found = {uri: name for name, uri in there.items() if name not in ours and uri not in self._held}
            self._old = {name: None for name in there if name not in ours and name not in found.values()}
            self._held = {uri: Held(uri, name) for uri, name in found.items()} | self._held
            self._changed.notify_all()

    def hang_up(self, wait: Wait) -> None:
        with self._changed:
            wait.hung_up = True
            self._changed.notify_all()

    def close(self) -> None:
        """The container has ended."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def unpin(self, held: Held) -> None:
        with self._changed:
            held.pins -= 1
            if not held.pins:
                self._changed.notify_all()

    def _pin(self, uri: str) -> Held | None:
        held = self._held.get(uri)
        if held is None or held.lost or not held.name:
            return None
        self._held[uri] = self._held.pop(uri)
        held.pins += 1
        return held

    def _sleep(self, wait: Wait) -> None:
        if self._closed:
            raise InstanceGone("the container has ended")
        self._changed.wait(wait.left_s())

    def _room(self) -> str | None:
        """Free a place; return the name of the adapter that was there.  The name is empty for a free place, and None
        when no place can be freed."""
        if len(self._held) + len(self._old) < self._n_slots:
            return ""
        if self._old:
            name = next(iter(self._old))
            del self._old[name]
            return name
        for uri, held in self._held.items():
            if held.name and not held.pins:
                del self._held[uri]
                return held.name
        return None
