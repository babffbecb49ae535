"""The images that this invoker pulled for functions, and their removal when they need too much of the disk.

The engine may have other images, which are nobody's business here.  So the names that a pull brought to the engine are
noted, a file for each in the run directory, where a restarted invoker finds them.  An image is ours if each of its
names is noted: one that the operator pulled before, or gave another name, stays.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import threading
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from invoker.drivers.docker.client import Engine, ImageSeen
from thaw.errors import BadRequest, NotFound, PlatformError
from thaw.image_name import ImageName
from thaw.logs import Log

_FRESH_NS: Final = 60 * 10**9
"""An image that was pulled or used a minute ago stays, because its container may be in the making."""
_NOBODYS: Final = "<none>"
"""What engines write in the place of a name that an image does not have."""


@dataclass(frozen=True, slots=True)
class _Ours:
    image: ImageSeen
    used_ns: int


class PulledImages:
    def __init__(self, engine: Engine, directory: Path, most_bytes: int, log: Log) -> None:
        self._engine, self._directory, self._most_bytes, self._log = engine, directory, most_bytes, log
        self._lock = threading.Lock()

    def pull(self, image: str, deadline_s: float) -> None:
        """Pull it and make room for it.  Raises what Engine.pull() raises; a pull that ends later is noted, too."""
        before = frozenset(name for one in self._engine.images() for name in _names(one))
        self._engine.pull(image, deadline_s, lambda: self._arrived(image, before))

    def used(self, image: str) -> None:
        """Note that a function uses it now."""
        with contextlib.suppress(FileNotFoundError):  # it is not ours
            os.utime(self._note(_full(image)))

    def _arrived(self, image: str, before: Collection[str]) -> None:
        """The image is there.  It stays there if this fails."""
        try:
            with self._lock:
                seen = self._engine.image(image)
                self._directory.mkdir(mode=0o700, exist_ok=True)
                for name in set(_names(seen)).difference(before):
                    self._note(name).write_text(name)
                self._make_room()
        except (PlatformError, NotFound, OSError) as e:
            self._log.event("images_not_removed", error=str(e))

    def _make_room(self) -> None:
        """Remove the images used longest ago until the others fit.  Those of containers stay."""
        in_use, ours = self._engine.images_of_containers(), self._ours()
        n_bytes = sum(one.image.n_bytes for one in ours)
        fresh_ns = time.time_ns() - _FRESH_NS
        for one in sorted(ours, key=lambda one: one.used_ns):
            if n_bytes <= self._most_bytes or one.used_ns > fresh_ns:
                return
            if one.image.id not in in_use and self._removed(one.image):
                n_bytes -= one.image.n_bytes

    def _ours(self) -> list[_Ours]:
        noted, here = self._noted(), [(image, _names(image)) for image in self._engine.images()]
        for name in noted.keys() - {name for _, names in here for name in names}:
            self._note(name).unlink(missing_ok=True)  # somebody else removed it, and may bring it back
        return [
            _Ours(image, max(noted[name] for name in names))
            for image, names in here
            if names and all(name in noted for name in names)
        ]

    def _noted(self) -> Mapping[str, int]:
        """The names, and when a function used each."""
        paths = list(self._directory.iterdir()) if self._directory.is_dir() else []
        return {path.read_text(): path.stat().st_mtime_ns for path in paths}

    def _removed(self, image: ImageSeen) -> bool:
        """False if the engine refuses it, because a container was made meanwhile."""
        for name in _names(image):
            try:
                self._engine.remove_image(name)
            except NotFound:
                pass  # its last tag took its digests along
            except PlatformError:
                return False
            self._note(name).unlink(missing_ok=True)
        self._log.event("image_removed", image=_names(image)[-1], n_bytes=image.n_bytes)
        return True

    def _note(self, name: str) -> Path:
        return self._directory / hashlib.sha256(name.encode()).hexdigest()


def _names(image: ImageSeen) -> tuple[str, ...]:
    return tuple(_full(name) for name in (*image.tags, *image.digests) if _NOBODYS not in name)


def _full(name: str) -> str:
    """With its registry: engines leave out the one of Docker."""
    try:
        return str(ImageName.parse(name))
    except BadRequest:
        return name
