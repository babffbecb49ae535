"""When Python looks for garbage: between heartbeats and never inside a decision.

A view of a thousand hosts and ten thousand functions is a million objects that live long.  Each heartbeat replaces
thousands of them, which the interpreter notices at some later allocation: a decision would then wait 3 to 60 ms.  So
what a rebuilt view consists of is set aside (it is no garbage), and the young are looked through after heartbeats.
"""

from __future__ import annotations

import gc
from typing import Final

_YOUNG: Final = 200_000
"""More new objects than that between two heartbeats are looked through at once after all."""
_ALL_EVERY: Final = 600
"""Heartbeats between two looks at everything: ten minutes, and some 60 ms."""


class Pauses:
    def __init__(self) -> None:
        self._n = 0

    def after_rebuild(self) -> None:
        gc.set_threshold(_YOUNG, 10, 10)
        gc.unfreeze()  # the view before this one may go
        gc.collect()
        gc.freeze()

    def after_heartbeats(self) -> None:
        self._n += 1
        gc.collect(2 if self._n % _ALL_EVERY == 0 else 1)
