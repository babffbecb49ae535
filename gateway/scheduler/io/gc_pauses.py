"""When Python collects garbage: between heartbeats and never inside a decision.

A view of a thousand hosts and ten thousand functions is a million objects that live long.  Each heartbeat replaces
thousands of them, which the interpreter would collect at some later allocation: a decision would then wait 3 to 60 ms.
The objects of a rebuilt view are therefore set aside (they are no garbage), and young objects are collected after
heartbeats.
"""

from __future__ import annotations

import gc
from typing import Final

_YOUNG: Final = 200_000
"""If there are more new objects than this between two heartbeats, they are collected at once after all."""
_ALL_EVERY: Final = 600
"""Heartbeats between two collections of all objects: ten minutes.  A collection takes some 60 ms."""


class Pauses:
    def __init__(self) -> None:
        self._n = 0

    def after_rebuild(self) -> None:
        gc.set_threshold(_YOUNG, 10, 10)
        gc.unfreeze()  # the view before this one may be collected
        gc.collect()
        gc.freeze()

    def after_heartbeats(self) -> None:
        self._n += 1
        gc.collect(2 if self._n % _ALL_EVERY == 0 else 1)
