"""Notices at once that a client hangs up: one thread waits in epoll for the sockets of all clients.

A server that writes nothing while it waits for an answer does not notice this by itself.  EPOLLRDHUP fires when the
client closes its connection, and also when the client only shuts down its sending side.  Both count as a hang-up.
"""

from __future__ import annotations

import os
import select
import socket
import threading
from collections.abc import Callable
from typing import Final

from thaw.process.lasting import LastingThread

_END_S: Final = 5.0


class HangupWatcher:
    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._callbacks: dict[int, Callable[[], None]] = {}
        self._lock = threading.Lock()
        self._end_read, self._end_write = os.pipe()
        self._epoll.register(self._end_read, select.EPOLLIN)
        self._ended = False
        self._thread = LastingThread(self._run, "hangup")

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End the thread.  Nothing is watched any more."""
        with self._lock:
            if self._ended:
                return
            os.write(self._end_write, b"x")
        if self._thread.is_alive():
            self._thread.join(_END_S)
        with self._lock:
            if self._ended or self._thread.is_alive():  # a callback takes its time; this process ends without it
                return
            self._ended = True
            self._callbacks.clear()
            self._epoll.close()
            os.close(self._end_read)
            os.close(self._end_write)

    def watch(self, sock: socket.socket, on_hangup: Callable[[], None]) -> Callable[[], None]:
        """Call ``on_hangup`` once, on the watcher's thread, when the peer of ``sock`` hangs up.

        The returned function ends the watch.  Call it before the socket is closed or serves its next request.
        """
        fd = sock.fileno()
        with self._lock:
            if not self._ended:
                self._callbacks[fd] = on_hangup
                self._epoll.register(fd, select.EPOLLRDHUP)
        return lambda: self._unwatch(fd, on_hangup)

    def _unwatch(self, fd: int, on_hangup: Callable[[], None]) -> None:
        with self._lock:
            if self._callbacks.get(fd) is not on_hangup:
                return  # the peer has hung up
            del self._callbacks[fd]
            try:
                self._epoll.unregister(fd)
            except OSError:
                pass  # the socket is closed, so epoll has dropped it

    def _run(self) -> None:
        while True:
            for fd, _ in self._epoll.poll():
                if fd == self._end_read:
                    return
                self._event(fd)

    def _event(self, fd: int) -> None:
        """Handle an event of ``fd``.  It may belong to a connection that was closed meanwhile, and another connection
        may have the same number by now, so this checks the socket again.

        It holds the lock until epoll has dropped the number: no other thread can end the watch and close the socket
        meanwhile.
        """
        with self._lock:
            if fd not in self._callbacks or not _has_hung_up(fd):
                return
            on_hangup = self._callbacks.pop(fd)
            self._epoll.unregister(fd)
        on_hangup()


def _has_hung_up(fd: int) -> bool:
    poll = select.poll()
    poll.register(fd, select.POLLRDHUP)
    return bool(poll.poll(0))
