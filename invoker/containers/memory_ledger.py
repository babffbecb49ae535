"""How much of the host's declared memory each owner holds.  A wait for memory ends when an owner gives some back."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping


class Ledger:
    def __init__(self, total_bytes: int) -> None:
        self.total_bytes = total_bytes
        self._changed = threading.Condition()
        self._held: dict[str, int] = {}
        self._expected: dict[str, int] = {}  # by starts that have not taken it yet

    def expect(self, owner: str, n_bytes: int) -> None:
        """A start will take ``n_bytes`` as soon as they are free.  This ends with its ``take`` or ``give_back``."""
        with self._changed:
            if owner not in self._held:
                self._expected[owner] = n_bytes

    def take(self, owner: str, n_bytes: int, *, spare: bool = False) -> bool:
        """Hold ``n_bytes`` for ``owner`` if they are free (``spare``: and no start expects them).  A second take by
        the same owner changes nothing."""
        with self._changed:
            if owner in self._held:
                return True
            if n_bytes > self._free() - (sum(self._expected.values()) if spare else 0):
                return False
            self._expected.pop(owner, None)
            self._held[owner] = n_bytes
            return True

    def adopt(self, owner: str, n_bytes: int) -> None:
        """Hold memory that is already in use, even beyond the total (a restart with a smaller setting)."""
        with self._changed:
            self._held[owner] = n_bytes

    def give_back(self, owner: str) -> None:
        with self._changed:
            self._held.pop(owner, None)
            self._expected.pop(owner, None)
            self._changed.notify_all()

    def wait_change(self, ready: Callable[[], bool], deadline: float) -> bool:
        """Wait until ``ready`` holds after some memory came back, or until the monotonic ``deadline``."""
        with self._changed:
            while not ready():
                left_s = deadline - time.monotonic()
                if left_s <= 0 or not self._changed.wait(left_s):
                    return ready()
            return True

    def wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    @property
    def free_bytes(self) -> int:
        with self._changed:
            return self._free()

    def holders(self) -> Mapping[str, int]:
        with self._changed:
            return dict(self._held)

    def _free(self) -> int:
        return self.total_bytes - sum(self._held.values())
