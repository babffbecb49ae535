"""Follow growing files with inotify, so that no code has to poll them."""

from __future__ import annotations

import ctypes
import os
import select
import time
from collections.abc import Iterator
from pathlib import Path

_IN_MODIFY = 0x2
_IN_CREATE = 0x100
_IN_NONBLOCK = 0o4000
_IN_CLOEXEC = 0o2000000
_libc = ctypes.CDLL(None, use_errno=True)


class DirectoryWatch:
    """Becomes readable when a file in the directory is created or written.  Select on it, then :meth:`drain` it."""

    def __init__(self, directory: Path) -> None:
        self._fd = _checked(_libc.inotify_init1(_IN_NONBLOCK | _IN_CLOEXEC))
        _checked(_libc.inotify_add_watch(self._fd, os.fsencode(directory), _IN_MODIFY | _IN_CREATE))

    def fileno(self) -> int:
        return self._fd

    def drain(self) -> None:
        try:
            while os.read(self._fd, 65536):
                pass
        except BlockingIOError:
            return

    def wait(self, timeout_s: float | None) -> bool:
        waiting = select.poll()
        waiting.register(self._fd, select.POLLIN)
        ready = waiting.poll(None if timeout_s is None else max(0.0, timeout_s * 1000))
        self.drain()
        return bool(ready)

    def close(self) -> None:
        os.close(self._fd)


class LineReader:
    """Reads the complete lines that were added to a file since the last call.  The file need not exist yet."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self._rest = b""

    def skip_to(self, offset: int) -> None:
        self._offset = offset

    def lines(self) -> list[str]:
        try:
            with self._path.open("rb") as f:
                if os.fstat(f.fileno()).st_size < self._offset:
                    self._offset, self._rest = 0, b""  # the file was truncated or replaced: read it from its start
                f.seek(self._offset)
                data = f.read()
        except FileNotFoundError:
            return []
        self._offset += len(data)
        *whole, self._rest = (self._rest + data).split(b"\n")
        return [line.decode(errors="replace") for line in whole]


def follow(paths: list[Path], n_last: int, *, forever: bool) -> Iterator[tuple[Path, str]]:
    """Yield the last lines of each file, then (if ``forever``) every line that is added to any of them."""
    readers = {path: LineReader(path) for path in paths}
    watches = [DirectoryWatch(directory) for directory in {p.parent for p in paths if p.parent.is_dir()}]
    try:
        for path, reader in readers.items():
            for line in reader.lines()[-n_last:]:
                yield path, line
        waiting = select.poll()
        for watch in watches:
            waiting.register(watch, select.POLLIN)
        while forever and watches:
            waiting.poll()
            for watch in watches:
                watch.drain()
            for path, reader in readers.items():
                for line in reader.lines():
                    yield path, line
    finally:
        for watch in watches:
            watch.close()


def wait_for_line(path: Path, needle: str, deadline_s: float) -> bool:
    """Whether a line that contains ``needle`` is in the file by the deadline."""
    reader = LineReader(path)
    watch = DirectoryWatch(path.parent)
    end = time.monotonic() + deadline_s
    try:
        while True:
            if any(needle in line for line in reader.lines()):
                return True
            remaining = end - time.monotonic()
            if remaining <= 0:
                return False
            watch.wait(remaining)
    finally:
        watch.close()


def _checked(result: int) -> int:
    if result < 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error), "inotify")
    return result
