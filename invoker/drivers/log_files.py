"""The two files with a container's output; they are the same for every driver.

With some drivers the container writes into them itself; others copy them from their engine's log (:func:`append`),
bounded, so that a container that prints without end costs a bounded part of a disk.
"""

from __future__ import annotations

import contextlib
import os
from io import FileIO
from pathlib import Path
from typing import Final

from invoker.drivers.activation_logs import SENTINEL
from invoker.drivers.base import Handle, LogChunk

_READ_BYTES: Final = 1 << 20
FILE_LIMIT_BYTES: Final = 32 << 20
"""A file that is never read (an LLM's) stops at this size; the collector empties the files it reads long before."""
SENTINELS_BYTES: Final = 1 << 20
"""Room beyond the limit for sentinels: the end of a run that printed more is still seen, so the next run gets its own
lines."""
_SENTINEL: Final = SENTINEL.encode()


def read(handle: Handle, stream: str, cursor: int) -> LogChunk:
    """Read ``stream`` (``stdout`` or ``stderr``) from byte ``cursor`` on, at most a MiB; no file is no output."""
    try:
        # os.open, because this runs after every run, and a file object costs four times as much
        fd = os.open(_path(handle, stream), os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return LogChunk(b"", cursor)
    try:
        data = os.pread(fd, _READ_BYTES, cursor)
    finally:
        os.close(fd)
    return LogChunk(data, cursor + len(data))


def empty(handle: Handle, stream: str) -> None:
    try:
        os.truncate(_path(handle, stream), 0)
    except FileNotFoundError:
        return


def append(file: FileIO, text: bytes) -> None:
    """Add output that was copied from the engine, as far as there is room."""
    if _has_room(file, FILE_LIMIT_BYTES):
        kept = text
    elif text.rstrip(b"\n").endswith(_SENTINEL) and _has_room(file, FILE_LIMIT_BYTES + SENTINELS_BYTES):
        kept = _SENTINEL + b"\n"
    else:
        return
    with contextlib.suppress(OSError):  # the disk is full: the line is lost, the next may have room
        file.write(kept)


def more_than(handle: Handle, cursors: tuple[int, int]) -> bool:
    """Whether the files hold more than was read up to ``cursors`` (stdout, stderr)."""
    paths = (handle.stdout, handle.stderr)
    return any(p.stat().st_size > cursor for p, cursor in zip(paths, cursors, strict=True) if p.exists())


def _has_room(file: FileIO, limit_bytes: int) -> bool:
    """Whether the file is below the limit; its reader may have emptied it."""
    return file.tell() < limit_bytes or file.seek(0, 2) < limit_bytes


def _path(handle: Handle, stream: str) -> Path:
    return handle.stdout if stream == "stdout" else handle.stderr
