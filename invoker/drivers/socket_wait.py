"""Wait for a unix socket to take connections: with inotify and descriptors instead of repeated tries."""

from __future__ import annotations

import ctypes
import errno
import os
import select
import socket
import time
from pathlib import Path

from thaw.errors import PlatformError, WorkerLost

_IN_CREATE, _IN_MOVED_TO = 0x100, 0x80
_IN_DELETE_SELF = 0x400
_BIND_TO_LISTEN_S = 0.005
"""A server that binds in place needs a moment between the file's appearance and listen; no event announces its end."""

_libc = ctypes.CDLL(None, use_errno=True)


def wait_socket(path: str, pid: int, deadline_s: float, cancelled: int) -> socket.socket:
    """A connection to ``path``, as soon as it takes one.  ``cancelled`` is an eventfd that ends the wait.

    Raises WorkerLost when the process ends first or the wait is cancelled, PlatformError at the deadline.
    """
    deadline = time.monotonic() + deadline_s
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        raise WorkerLost("the container ended before it answered") from None
    try:
        return wait_socket_until(path, pidfd, deadline - time.monotonic(), cancelled)
    finally:
        os.close(pidfd)


def wait_socket_until(path: str, ended: int, deadline_s: float, cancelled: int) -> socket.socket:
    """The same for a server whose end makes the descriptor ``ended`` readable."""
    deadline = time.monotonic() + deadline_s
    watch = _inotify(os.path.dirname(path))
    try:
        return _wait(path, watch, ended, cancelled, deadline)
    finally:
        os.close(watch)


def listens(path: str) -> bool:
    sock = _connected(path)
    if sock is not None:
        sock.close()
    return sock is not None


def wait_listens(path: str, cancelled: int | None = None, *, deadline_s: float | None = None) -> bool:
    """Wait until a server listens; False when ``cancelled`` became readable, or the deadline passed, first.  The server
    must listen before its socket gets its name (fetchd does).  Raises PlatformError when there is no such directory."""
    until = None if deadline_s is None else time.monotonic() + deadline_s
    watch = _inotify(os.path.dirname(path))
    poll = select.poll()
    for fd in (watch, cancelled):
        if fd is not None:
            poll.register(fd, select.POLLIN)
    try:
        while not listens(path):
            ready = [fd for fd, _ in poll.poll(None if until is None else 1000 * max(0.0, until - time.monotonic()))]
            if not ready or cancelled in ready:
                return False
            os.read(watch, 65536)
    finally:
        os.close(watch)
    return True


def watch_end(path: str) -> int:
    """A descriptor that is readable once the socket's file is deleted and its server has closed it; the caller closes
    the descriptor.  Raises PlatformError when there is no such file."""
    return _inotify(path, _IN_DELETE_SELF)


def _wait(path: str, watch: int, ended: int, cancelled: int, deadline: float) -> socket.socket:
    poll = select.poll()
    for fd in (watch, ended, cancelled):
        poll.register(fd, select.POLLIN)
    while (sock := _connected(path)) is None:
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            raise PlatformError("the container did not answer in time", hint="see its stderr log")
        bound = Path(path).exists()
        ready = {fd for fd, _ in poll.poll(1000 * min(left_s, _BIND_TO_LISTEN_S if bound else left_s))}
        if ended in ready:
            raise WorkerLost("the container ended before it answered")
        if cancelled in ready:
            raise WorkerLost("the start was given up")
        if watch in ready:
            os.read(watch, 65536)
    return sock


def _connected(path: str) -> socket.socket | None:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.connect(path)
    except OSError:
        sock.close()
        return None
    return sock


def _inotify(path: str, mask: int = _IN_CREATE | _IN_MOVED_TO) -> int:
    fd: int = _libc.inotify_init1(os.O_CLOEXEC | os.O_NONBLOCK)
    if fd < 0 or _libc.inotify_add_watch(fd, os.fsencode(path), mask) < 0:
        error = ctypes.get_errno()
        if fd >= 0:
            os.close(fd)
        hint = "raise fs.inotify.max_user_instances" if error == errno.EMFILE else ""
        raise PlatformError(f"cannot watch {path}: {os.strerror(error)}", hint=hint)
    return fd
