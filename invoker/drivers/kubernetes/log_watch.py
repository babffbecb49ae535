"""Which directories of output have changed: one inotify instance for all containers of a node.

A user has 128 instances by default, and a node runs more containers than that.
"""

from __future__ import annotations

import ctypes
import os
import select
import struct
import threading
from pathlib import Path
from typing import Final

from thaw.process.lasting import LastingThread

_IN_MODIFY, _IN_CREATE, _IN_MOVED_TO = 0x2, 0x100, 0x80
_EVENT: Final = struct.Struct("iIII")  # watch, mask, cookie, bytes of the name that follows
_LOST: Final = -1  # the watch of an event that says that others were dropped
_JOIN_S: Final = 5.0

_libc = ctypes.CDLL(None, use_errno=True)


class LogWatch:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inotify = -1  # until it is needed
        self._closing = os.eventfd(0, os.EFD_CLOEXEC)
        self._changed: dict[int, int] = {}
        self._thread = LastingThread(self._run, "log-watch")

    def watch(self, directory: Path, changed: int) -> int:
        """From now on the eventfd ``changed`` is written to when a file in there grows or appears.  Returns what
        :meth:`forget` takes.  Raises OSError."""
        with self._lock:
            if self._inotify < 0:
                self._inotify = _checked(_libc.inotify_init1(os.O_CLOEXEC | os.O_NONBLOCK), "an inotify instance")
                self._thread.start()
            mask = _IN_MODIFY | _IN_CREATE | _IN_MOVED_TO
            watch = _checked(_libc.inotify_add_watch(self._inotify, os.fsencode(directory), mask), str(directory))
            self._changed[watch] = changed
        return watch

    def forget(self, watch: int) -> None:
        """Its eventfd is written to no more."""
        with self._lock:
            self._changed.pop(watch, None)
            _libc.inotify_rm_watch(self._inotify, watch)  # it fails when the directory is gone, and so is the watch

    def close(self) -> None:
        os.eventfd_write(self._closing, 1)
        with self._lock:
            was_used = self._inotify >= 0
        if was_used:
            self._thread.join(_JOIN_S)
            os.close(self._inotify)
        os.close(self._closing)

    def _run(self) -> None:
        poll = select.poll()
        for fd in (self._inotify, self._closing):
            poll.register(fd, select.POLLIN)
        while self._closing not in [fd for fd, _ in poll.poll()]:
            seen = _watches(os.read(self._inotify, 65536))
            with self._lock:
                for watch in self._changed if _LOST in seen else seen & self._changed.keys():
                    os.eventfd_write(self._changed[watch], 1)


def _watches(events: bytes) -> set[int]:
    found, at = set(), 0
    while at < len(events):
        watch, _, _, length = _EVENT.unpack_from(events, at)
        found.add(watch)
        at += _EVENT.size + length
    return found


def _checked(result: int, what: str) -> int:
    if result < 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error), what)
    return result
