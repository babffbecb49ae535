"""One thread that learns of ended processes through pidfds: no polling, children or not."""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Callable

from thaw.process.lasting import LastingThread


class ExitWatch:
    """Calls back once per watched process, with the status when it was our child, else None."""

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._lock = threading.Lock()
        self._watched: dict[int, tuple[int, Callable[[int | None], None]]] = {}
        self._wake = os.eventfd(0, os.EFD_CLOEXEC)
        self._closing = False
        self._epoll.register(self._wake, select.EPOLLIN)
        self._thread = LastingThread(self._run, "exits")
        self._thread.start()

    def watch(self, pid: int, callback: Callable[[int | None], None]) -> None:
        """``callback`` runs on the watch's thread (at once, on the caller's, if the process is gone already)."""
        try:
            fd = os.pidfd_open(pid)
        except ProcessLookupError:
            callback(None)
            return
        with self._lock:
            self._watched[fd] = (pid, callback)
        self._epoll.register(fd, select.EPOLLIN | select.EPOLLONESHOT)

    def close(self) -> None:
        self._closing = True
        os.eventfd_write(self._wake, 1)
        self._thread.join(5)
        self._epoll.close()
        for fd in (*self._watched, self._wake):
            os.close(fd)

    def _run(self) -> None:
        while not self._closing:
            for fd, _ in self._epoll.poll():
                with self._lock:
                    entry = self._watched.pop(fd, None)
                if entry is not None:
                    self._epoll.unregister(fd)
                    status = _reap(fd)
                    os.close(fd)
                    entry[1](status)


def _reap(pidfd: int) -> int | None:
    try:
        info = os.waitid(os.P_PIDFD, pidfd, os.WEXITED | os.WNOHANG)
    except ChildProcessError:
        return None  # not ours: adopted, or forked by a zygote, which reaps it
    if info is None:
        return None
    return info.si_status if info.si_code == os.CLD_EXITED else -info.si_status
