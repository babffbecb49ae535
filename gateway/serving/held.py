"""Holds a request until the records that it looks for are there."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from relay.state.endings import Endings
from thaw.ids import Namespace

T = TypeVar("T")


def until_news(
    endings: Endings, namespace: Namespace, longest_s: float, look: Callable[[], T], is_news: Callable[[T], bool]
) -> T:
    """What ``look`` finds, as soon as it is news or ``longest_s`` are over; it is asked again when a record of the
    namespace was written.  Raises Throttled, Unavailable."""
    found = look()
    if not longest_s or is_news(found):
        return found
    until_s = time.monotonic() + longest_s
    with endings.heard(namespace) as heard:
        found = look()  # it may have come before anybody listened
        while not is_news(found) and heard(max(0.0, until_s - time.monotonic())):
            found = look()
    return found
