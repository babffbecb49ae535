"""The mounted directory in which a confined container makes its socket."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from invoker.drivers.base import Handle
from thaw.errors import WorkerLost


def of(handle: Handle) -> Path:
    return handle.directory / "io"


def make(handle: Handle) -> None:
    """Let the container's user make its socket in there.  No other user gets that far: the parent is ours alone."""
    io = of(handle)
    io.mkdir(exist_ok=True)
    io.chmod(0o777)
    handle.directory.chmod(0o700)


def close(handle: Handle) -> None:
    """From now on the container can make no file there, which would be on the host's disk, nor put a link in its
    socket's place, which we would follow.  Raises WorkerLost when there is something else than a socket."""
    of(handle).chmod(0o555)
    if not stat.S_ISSOCK(os.lstat(handle.socket_path).st_mode):
        raise WorkerLost("the container put something else in its socket's place")
