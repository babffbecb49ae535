"""Tells who waits for a namespace's records that one was written, by whatever gateway.

Whoever writes records publishes on a channel of their namespace.  Nobody listens there but requests that are held for a
record, each while it is held, so a platform on which nobody waits pays for one command in a batch that is written
anyway.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import redis

from relay.state import keys, redis_link
from thaw.errors import Throttled
from thaw.ids import Namespace

_MOST: Final = 64
"""Requests held at once by one process.  Each has a connection of its own."""
_MOST_OF_ONE: Final = 16
"""Those of one namespace, so that one leaves some to others."""
_LOOK_S: Final = 0.25
"""Whoever waits looks at the records at most once in this time: each look reads them, and a namespace may write
thousands a second."""


class Endings:
    def __init__(self, url: str, most: int = _MOST, most_of_one: int = _MOST_OF_ONE) -> None:
        self._url, self._most, self._most_of_one = url, most, most_of_one
        self._lock = threading.Lock()
        self._held: Counter[Namespace] = Counter()

    @contextmanager
    def heard(self, namespace: Namespace) -> Iterator[Callable[[float], bool]]:
        """Listen.  The function that is given waits up to so many seconds, and returns True when a record was written
        since the last call, or since the listening began.  Raises Throttled when too many listen, Unavailable."""
        with self._lock:
            if self._held[namespace] >= self._most_of_one or self._held.total() >= self._most:
                raise Throttled("Too many requests wait for records at this gateway.", hint="ask without wait_s")
            self._held[namespace] += 1
        try:
            with (
                redis_link.translated("listen for records"),
                redis_link.connect_blocking(self._url) as client,
                client.pubsub() as channel,
            ):
                channel.subscribe(keys.ended(namespace))
                _next(channel, redis_link.CALL_TIMEOUT_S, "subscribe")
                yield lambda wait_s: _wait(channel, wait_s)
        finally:
            with self._lock:
                self._held[namespace] -= 1
                self._held += Counter()  # leaves those out that hold nothing


def _wait(channel: Any, wait_s: float) -> bool:
    """Take everything that is said within ``_LOOK_S`` of the first message for one."""
    with redis_link.translated("listen for records"):
        if not _next(channel, wait_s, "message"):
            return False
        until_s = time.monotonic() + _LOOK_S
        while (left_s := until_s - time.monotonic()) > 0:
            _next(channel, left_s, "message")
        return True


def _next(channel: redis.client.PubSub, wait_s: float, kind: str) -> bool:
    """False: there was no message of the ``kind`` within the time."""
    until_s = time.monotonic() + wait_s
    while True:
        message = channel.get_message(timeout=max(0.0, until_s - time.monotonic()))
        if message is not None and message["type"] == kind:
            return True
        if time.monotonic() >= until_s:
            return False
