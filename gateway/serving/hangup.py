"""Clients that hang up, noticed at once: one thread waits in epoll for every client's socket.

A WSGI server only notices on the next write, and a request that waits for a cold start writes nothing.  EPOLLRDHUP
fires when the client closes (or half-closes: a client that shuts its sending side down before the answer counts as
gone).
"""

from __future__ import annotations

import os
import select
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from thaw.errors import ThawError
from thaw.lasting import LastingThread

_GONE = select.EPOLLRDHUP | select.EPOLLHUP | select.EPOLLERR


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


class HangupWatcher:
    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._hangups: dict[int, Hangup] = {}
        self._lock = threading.Lock()
        self._wake_read, self._wake_write = os.pipe()
        self._epoll.register(self._wake_read, select.EPOLLIN)
        self._thread = LastingThread(self._run, "hangup")

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        os.write(self._wake_write, b"x")

    def watch(self, sock: socket.socket | None) -> tuple[Hangup, Callable[[], None]]:
        """Return the request's hangup, and a function that ends the watch.  The function must run before the socket
        serves its next request."""
        hangup = Hangup()
        fd = -1 if sock is None else sock.fileno()
        if fd < 0:  # a test client without a socket
            return hangup, lambda: None
        with self._lock:
            self._hangups[fd] = hangup
        self._epoll.register(fd, select.EPOLLRDHUP)
        return hangup, lambda: self._forget(fd)

    def _forget(self, fd: int) -> None:
        with self._lock:
            if self._hangups.pop(fd, None) is None:
                return
        try:
            self._epoll.unregister(fd)
        except OSError:
            pass  # closed already: the kernel forgot it with the socket

    def _run(self) -> None:
        while True:
            for fd, events in self._epoll.poll():
                if fd == self._wake_read:
                    return
                if events & _GONE:
                    with self._lock:
                        hangup = self._hangups.get(fd)
                        if hangup is None or not _is_gone(fd):  # the event is of an earlier socket of this number
                            continue
                    self._forget(fd)
                    hangup.set()


def _is_gone(fd: int) -> bool:
    poll = select.poll()
    poll.register(fd, select.POLLRDHUP)
    return bool(poll.poll(0))
