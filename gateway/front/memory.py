"""The memory for long bodies, and for answers that carry code, which namespaces share.  Pure.

A namespace gets at most as much as is free (the dynamic threshold of Choudhury and Hahne, 1998): alone it gets half,
and however many fill what they can get, the next one still gets something.
"""

from __future__ import annotations

import threading
from collections import Counter

from thaw.ids import Namespace


class SharedMemory:
    """Threads may use it."""

    def __init__(self, n_bytes: int) -> None:
        self._n_bytes = self._free = n_bytes
        self._taken: Counter[Namespace] = Counter()
        self._lock = threading.Lock()

    def take(self, namespace: Namespace, n_bytes: int) -> bool:
        """Return False when there is no room for so much now.  A namespace's first body may have all that is free."""
        with self._lock:
            taken = self._taken.get(namespace, 0)
            if n_bytes > self._free or (taken and taken + n_bytes > self._free):
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
