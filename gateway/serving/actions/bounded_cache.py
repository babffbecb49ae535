"""Values of namespaces that a gateway remembers, in bounded memory.

JSON of a tenant takes up to thirty times as much memory as objects, so what counts is what the objects take.  When the
values have more than they may, the namespace with most of them loses the one that it used least recently: a tenant with
many actions makes its own ones be read again, and no other's.
"""

from __future__ import annotations

import dataclasses
import sys
import threading
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, Final, Generic, TypeVar

from thaw.ids import Namespace

MOST_BYTES: Final = 64 << 20

K = TypeVar("K")
V = TypeVar("V")


class BoundedCache(Generic[K, V]):
    """Thread-safe."""

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        self._most_bytes = most_bytes
        self._lock = threading.Lock()
        self._of: dict[Namespace, OrderedDict[K, tuple[V, int]]] = {}
        self._taken: dict[Namespace, int] = {}
        self._changes = 0

    @property
    def changes(self) -> int:
        """How often something was forgotten.  Read this before a value that is to be kept."""
        return self._changes

    @property
    def n_bytes(self) -> int:
        return sum(self._taken.values())

    def get(self, namespace: Namespace, key: K) -> V | None:
        with self._lock:
            known = self._of.get(namespace, OrderedDict[K, tuple[V, int]]())
            if (found := known.get(key)) is None:
                return None
            known.move_to_end(key)
            return found[0]

    def keep(self, namespace: Namespace, key: K, value: V, changes: int) -> None:
        """``changes``: as it was before the value was read; else it may have changed since."""
        n_bytes = memory_of(value)
        with self._lock:
            if changes != self._changes or n_bytes > self._most_bytes:
                return
            self._drop(namespace, key)
            self._of.setdefault(namespace, OrderedDict())[key] = value, n_bytes
            self._taken[namespace] = self._taken.get(namespace, 0) + n_bytes
            while sum(self._taken.values()) > self._most_bytes:
                largest = max(self._taken, key=self._taken.__getitem__)
                self._drop(largest, next(iter(self._of[largest])))

    def forget(self, namespace: Namespace, key: K) -> None:
        with self._lock:
            self._changes += 1
            self._drop(namespace, key)

    def clear(self) -> None:
        with self._lock:
            self._changes += 1
            self._of.clear()
            self._taken.clear()

    def _drop(self, namespace: Namespace, key: K) -> None:
        known = self._of.get(namespace)
        if known is None or key not in known:
            return
        self._taken[namespace] -= known.pop(key)[1]
        if not known:
            del self._of[namespace], self._taken[namespace]


def memory_of(value: Any) -> int:
    """The bytes of the value's objects; what several places share counts for each."""
    n_bytes = 0
    left = [value]
    while left:
        one = left.pop()
        n_bytes += sys.getsizeof(one)
        if isinstance(one, Mapping):
            left.extend(one.keys())
            left.extend(one.values())
        elif isinstance(one, list | tuple):
            left.extend(one)
        elif dataclasses.is_dataclass(one):
            left.extend(getattr(one, field.name) for field in dataclasses.fields(one))
    return n_bytes
