"""The places for adapters in one instance: which adapter is where, and which one makes room for the next.

::

    pin: there ──────────────────────────────▶ pinned ──unpin──▶ the one used last
         absent ──a free place, or one that no run uses──▶ loading ──loaded──▶ pinned
                                                              └──forget──▶ absent

An adapter that a run uses is pinned, and stays.  Of the others, the one goes that was used longest ago.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

from thaw.errors import TimeLimitExceeded


@dataclass(slots=True, eq=False)
class Held:
    """``name``: the URI and the version, which the container knows; empty while it loads."""

    uri: str
    name: str = ""
    pins: int = 0


class AdapterSlots:
    """Thread-safe."""

    def __init__(self, n_slots: int, loaded: Sequence[str] = ()) -> None:
        """``loaded``: the names of what the container has already."""
        self._n_slots = n_slots
        self._changed = threading.Condition()
        self._held = {name.rpartition("#")[0]: Held(name.rpartition("#")[0], name) for name in loaded}

    def pin(self, uri: str, deadline: float) -> tuple[Held, str | None]:
        """Return the adapter, which stays until unpin().  With a name (or an empty one) beside it, the caller must
        load it in the place of that one, and call loaded() or forget().  ``deadline`` is monotonic.

        Raises TimeLimitExceeded when all places are used until then, or another caller's load takes so long.
        """
        with self._changed:
            while True:
                held = self._held.pop(uri, None)
                if held is not None:
                    self._held[uri] = held  # the last of the dict is the one used last
                    if held.name:
                        held.pins += 1
                        return held, None
                elif (replaced := self._room()) is not None:
                    held = self._held[uri] = Held(uri, pins=1)
                    return held, replaced
                if not self._changed.wait(max(0.0, deadline - time.monotonic())) and time.monotonic() >= deadline:
                    raise TimeLimitExceeded("the adapter was not loaded within the action's time limit")

    def loaded(self, held: Held, name: str) -> None:
        with self._changed:
            held.name = name
            self._changed.notify_all()

    def forget(self, held: Held) -> None:
        """The container does not have it."""
        with self._changed:
            if self._held.get(held.uri) is held:
                del self._held[held.uri]
            self._changed.notify_all()

    def take_over(self, names: Sequence[str]) -> None:
        """The container has these.  Those that nobody knew of are the first to go."""
        with self._changed:
            found = {name.rpartition("#")[0]: name for name in names}
            unknown = {uri: Held(uri, name) for uri, name in found.items() if uri not in self._held}
            self._held = unknown | self._held

    def unpin(self, held: Held) -> None:
        with self._changed:
            held.pins -= 1
            if not held.pins:
                self._changed.notify_all()

    def _room(self) -> str | None:
        """Free a place; return the name of what was there, empty for a free place, None when there is none."""
        if len(self._held) < self._n_slots:
            return ""
        for uri, held in self._held.items():
            if held.name and not held.pins:
                del self._held[uri]
                return held.name
        return None
