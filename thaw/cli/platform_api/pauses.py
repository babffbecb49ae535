"""The pause between two questions to a gateway that did not hold the first one."""

from __future__ import annotations

import threading
from typing import Final

REPEAT_S: Final = 2.0
"""A gateway answers at once if it holds too many requests, is about to end, or has a version that holds none."""


def pause(longest_s: float) -> None:
    threading.Event().wait(max(0.0, min(REPEAT_S, longest_s)))
