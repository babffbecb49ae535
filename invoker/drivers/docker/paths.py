"""The engine's name of a path of ours: the same if we run on its machine, another if we run in one of its containers.

An invoker in a container talks to the engine that runs it, and asks for mounts of the engine's machine.  The path that
it sees as ``/run/thaw`` is a volume or a directory there; the engine itself says which.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Final

from invoker.drivers.docker.client import Engine
from thaw.errors import NotFound, PlatformError

_MOUNTED_BY_DOCKER: Final = re.compile(r"/containers/([0-9a-f]{64})/(?:hostname|resolv\.conf|hosts)")
"""Docker bind-mounts these three into each of its containers, from a directory named by the container's id."""


def own_container_id(mountinfo: str = "/proc/self/mountinfo") -> str:
    """The id of the Docker container of this process; empty if there is none."""
    found = _MOUNTED_BY_DOCKER.search(Path(mountinfo).read_text())
    return found[1] if found else ""


def is_replaced(path: str, mountinfo: str = "/proc/self/mountinfo") -> bool:
    """Whether the file that is mounted at ``path`` was deleted where it was mounted from.  A mount keeps the old file:
    an engine that was restarted listens on a new socket, which only a new mount shows."""
    mounted_at = os.path.join(os.path.realpath(os.path.dirname(path)), os.path.basename(path))
    for line in Path(mountinfo).read_text().splitlines():
        source, target = line.split()[3:5]
        if target == mounted_at and source.endswith("//deleted"):
            return True
    return False


class EnginePaths:
    def __init__(self, mounts: Mapping[str, str] | None) -> None:
        """``mounts`` {path here: path there}; None when both are the same machine."""
        self._mounts = mounts

    @classmethod
    def find(cls, engine: Engine) -> EnginePaths:
        """Raises Unavailable."""
        container_id = own_container_id()
        if not container_id:
            return cls(None)
        try:
            return cls(engine.mounts(container_id))
        except NotFound:
            return cls(None)  # a container of another engine: the paths are as its operator arranged them

    def there(self, path: str) -> str:
        """The path on the engine's machine.  Raises PlatformError for a path that is in no mount."""
        if self._mounts is None:
            return path
        for mounted in sorted(self._mounts, key=len, reverse=True):
            if PurePosixPath(path).is_relative_to(mounted):
                return str(PurePosixPath(self._mounts[mounted]) / PurePosixPath(path).relative_to(mounted))
        raise PlatformError(
            f"{path} is not mounted from the engine's machine",
            hint="give the invoker's container a volume for THAW_RUN_DIR",
        )
