"""Ends a request when its client hangs up: threads that wait for the request wake, and the answer is dropped."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from thaw.errors import ThawError
from thaw.process.hangup import HangupWatcher


class ClientGone(ThawError):
    """The client hung up and reads no answer (nginx calls it 499)."""

    http_status = 499


class Hangup:
    """One request's "the client is gone".  It is set once, and then calls every registered waker."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._wakers: list[Callable[[], None]] = []
        self.is_set = False

    def set(self) -> None:
        with self._lock:
            self.is_set = True
            wakers, self._wakers = self._wakers, []
        for wake in wakers:
            wake()

    @contextmanager
    def waking(self, wake: Callable[[], None]) -> Iterator[None]:
        """``wake`` runs (in another thread) when the client goes while the block runs.  Raises ClientGone at entry."""
        with self._lock:
            self.check()
            self._wakers.append(wake)
        try:
            yield
        finally:
            with self._lock:
                if wake in self._wakers:
                    self._wakers.remove(wake)

    def check(self) -> None:
        if self.is_set:
            raise ClientGone("The client closed the connection before the answer was complete.")


def watched(watcher: HangupWatcher, sock: socket.socket | None) -> tuple[Hangup, Callable[[], None]]:
    """The request's hangup, and the function that ends the watch (see HangupWatcher.watch).  A test client has no
    socket."""
    hangup = Hangup()
    if sock is None or sock.fileno() < 0:
        return hangup, lambda: None
    return hangup, watcher.watch(sock, hangup.set)
