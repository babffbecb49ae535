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
                self._event(fd)

    def _event(self, fd: int) -> None:
        with self._lock:
            gone = fd in self._callbacks and has_hung_up(fd)
            callback = self._callbacks.pop(fd) if gone else None
        if callback is not None:
            callback()


def has_hung_up(fd: int) -> bool:
    """An event may be of a connection that has been closed since, and whose number a new one has."""
    poll = select.poll()
    poll.register(fd, select.POLLRDHUP)
    return bool(poll.poll(0))
