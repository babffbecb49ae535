"""Waiting for something that announces itself to nobody."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

WAIT_S = 20.0


def until(is_so: Callable[[], object], what: object = "it never happened", *, most_s: float = WAIT_S) -> None:
    """``what`` is said, or called for what is said, if it is not so in time."""
    end_s, tick = time.monotonic() + most_s, threading.Event()
    while not is_so():
        assert time.monotonic() < end_s, what() if callable(what) else what
        tick.wait(0.005)
