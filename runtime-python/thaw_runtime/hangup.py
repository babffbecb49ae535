"""Notice that a client has hung up while its answer is still being made."""

from __future__ import annotations

import select
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class HangupWatch:
    """One thread asleep in epoll for all connections; it wakes only when one is closed by its peer."""

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._lock = threading.Lock()
        self._callbacks: dict[int, Callable[[], None]] = {}
        threading.Thread(target=self._run, name="hangup", daemon=True).start()

    @contextmanager
    def watching(self, sock: socket.socket, on_hangup: Callable[[], None]) -> Iterator[None]:
        """Call ``on_hangup`` (on the watch's thread, once) if the peer closes while the block runs."""
        fd = sock.fileno()
        with self._lock:
            self._callbacks[fd] = on_hangup
        self._epoll.register(fd, select.EPOLLRDHUP | select.EPOLLONESHOT)
        try:
            yield
        finally:
            self._epoll.unregister(fd)
            with self._lock:
                self._callbacks.pop(fd, None)

    def _run(self) -> None:
        while True:
            for fd, _ in self._epoll.poll():
                with self._lock:
                    callback = self._callbacks.pop(fd, None)
                if callback is not None:
                    callback()
