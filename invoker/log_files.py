"""The two files that a container's output is in, whichever driver runs it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from invoker.driver import Handle, LogChunk

_READ_BYTES: Final = 1 << 20


def read(handle: Handle, stream: str, cursor: int) -> LogChunk:
    """What ``stream`` (``stdout`` or ``stderr``) has from byte ``cursor`` on, at most a MiB; no file is no output."""
    try:
        with _path(handle, stream).open("rb") as file:
            file.seek(cursor)
            data = file.read(_READ_BYTES)
    except FileNotFoundError:
        return LogChunk(b"", cursor)
    return LogChunk(data, cursor + len(data))


def empty(handle: Handle, stream: str) -> None:
    try:
        os.truncate(_path(handle, stream), 0)
    except FileNotFoundError:
        return


def _path(handle: Handle, stream: str) -> Path:
    return handle.stdout if stream == "stdout" else handle.stderr
