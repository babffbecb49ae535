"""Repeats a call until the API server takes it: a start outlasts a control plane that is being replaced."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final, TypeVar

from invoker.drivers.kubernetes.container import Container
from invoker.drivers.kubernetes.watch import PodWatch
from thaw.errors import Unavailable, WorkerLost

T = TypeVar("T")
_FIRST_PAUSE_S: Final = 0.2
_LONGEST_PAUSE_S: Final = 5.0


class Patience:
    def __init__(self, watch: PodWatch) -> None:
        self._watch = watch

    def call(self, call: Callable[[], T], deadline: float, container: Container) -> T:
        """``deadline`` is of the monotonic clock.  Raises Unavailable when the API server is still away then, and
        WorkerLost once the container is cancelled."""
        pause_s = _FIRST_PAUSE_S
        while True:
            contacts = self._watch.contacts
            try:
                return call()
            except Unavailable:
                if time.monotonic() >= deadline:
                    raise
            self._watch.wait_contact(contacts, min(pause_s, deadline - time.monotonic()), lambda: container.cancelled)
            if container.cancelled:
                raise WorkerLost("the start was given up")
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
