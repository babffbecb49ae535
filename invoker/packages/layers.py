"""The layers of a host: folders with installed packages, one for each set of packages, named by their content.

::

    packages/                    0711: nobody else can list it
        secret, boot
        work-XXXX/               an installation that runs, or that was killed
        <name>/                  a layer; the name is a keyed hash of its lines, so nobody can guess it

A layer is renamed into its place when it is complete.  A layer of an earlier boot is deleted, because a machine that
lost its power may have lost a part of it.  When the layers need more than their bound, the least recently used are
deleted, except those of functions that have a container.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from invoker.packages.installer import LAYER_BYTES, Installer, usage
from thaw.errors import BadRequest, InitFailed, PlatformError, Unavailable
from thaw.logs import Log
from thaw.requirements import are_locked

AT_ONCE: Final = 2
"""Installations at the same time, one of a namespace: each takes a core and the link."""
_ABANDONED_S: Final = 3600.0
"""No installation takes that long, so a folder of one that is older belongs to an invoker that was killed."""
_WORK: Final = "work-"
_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")


class Layers:
    def __init__(
        self,
        directory: Path,
        installer: Installer,
        most_bytes: int,
        in_use: Callable[[], Collection[tuple[str, ...]]],
        log: Log,
    ) -> None:
        """``in_use``: the packages of functions that have a container.  Raises PlatformError."""
        self._directory, self._installer, self._most_bytes = directory, installer, most_bytes
        self._in_use, self._log = in_use, log
        self._changed = threading.Condition(threading.Lock())
        self._making: set[str] = set()
        self._namespaces: set[str] = set()
        try:
            self._secret = _kept(directory / "secret", secrets.token_hex(32))
            self._forget_other_boots()
        except OSError as e:
            raise PlatformError(f"cannot use {directory}: {e.strerror}", hint="look at THAW_RUN_DIR") from e

    def lock(self, asked: tuple[str, ...], namespace: str, *, deadline_s: float) -> tuple[str, ...]:
        """Find the versions of the packages that are asked for and install them.  Raises BadRequest, which names a
        package that cannot be installed, Unavailable, PlatformError."""
        ends_s = time.monotonic() + deadline_s
        self._enter(namespace, ends_s)
        try:
            found = asked if are_locked(asked) else self._resolved(asked, ends_s)
            self._ensured(found, ends_s)
        finally:
            self._leave(namespace)
        return found

    def ensure(self, packages: tuple[str, ...], *, deadline_s: float) -> str:
        """The name of the layer with these packages, which is installed if it is not there; empty for none.  Raises
        InitFailed, Unavailable, PlatformError."""
        if not packages:
            return ""
        try:
            return self._ensured(packages, time.monotonic() + deadline_s)
        except BadRequest as e:
            raise InitFailed(e.message, hint=e.hint) from e

    def name(self, packages: Sequence[str]) -> str:
        return hmac.new(self._secret.encode(), "\n".join(packages).encode(), hashlib.sha256).hexdigest()

    def _enter(self, namespace: str, ends_s: float) -> None:
        def has_room() -> bool:
            return namespace not in self._namespaces and len(self._namespaces) < AT_ONCE

        with self._changed:
            if not self._changed.wait_for(has_room, max(0.0, ends_s - time.monotonic())):
                raise Unavailable("The host is busy with other packages.", hint="try again")
            self._namespaces.add(namespace)

    def _leave(self, namespace: str) -> None:
        with self._changed:
            self._namespaces.remove(namespace)
            self._changed.notify_all()

    def _resolved(self, asked: Sequence[str], ends_s: float) -> tuple[str, ...]:
        with self._work() as work:
            return self._installer.resolve(asked, work, deadline_s=ends_s - time.monotonic())

    def _ensured(self, packages: Sequence[str], ends_s: float) -> str:
        name = self.name(packages)
        with self._only_one(name, ends_s):
            layer = self._directory / name
            if not layer.is_dir():
                self._install(packages, layer, ends_s)
            os.utime(layer)
        return name

    @contextmanager
    def _only_one(self, name: str, ends_s: float) -> Iterator[None]:
        with self._changed:
            if not self._changed.wait_for(lambda: name not in self._making, max(0.0, ends_s - time.monotonic())):
                raise Unavailable("The packages are still being installed.", hint="try again")
            self._making.add(name)
        try:
            yield
        finally:
            with self._changed:
                self._making.remove(name)
                self._changed.notify_all()

    def _install(self, packages: Sequence[str], layer: Path, ends_s: float) -> None:
        self._make_room()
        with self._work() as work:
            made = self._installer.install(packages, work, deadline_s=ends_s - time.monotonic())
            try:
                os.rename(made, layer)
            except OSError as e:
                if not layer.is_dir():  # an invoker that replaces this one was first
                    raise PlatformError(f"cannot keep packages: {e.strerror}", hint="look at THAW_RUN_DIR") from e
        self._log.event("packages_installed", layer=layer.name[:12], n_packages=len(packages))

    @contextmanager
    def _work(self) -> Iterator[Path]:
        try:
            work = Path(tempfile.mkdtemp(prefix=_WORK, dir=self._directory))
            work.chmod(0o700)
        except OSError as e:
            raise Unavailable(f"The host's disk cannot be written: {e.strerror}", hint="look at THAW_RUN_DIR") from e
        try:
            yield work
        finally:
            shutil.rmtree(work, ignore_errors=True)

    # room on the disk ----------------------------------------------------------------------------------------------

    def _make_room(self) -> None:
        """Raises Unavailable when the disk, or the layers in use, leave too little room."""
        self._remove_abandoned()
        in_use = {self.name(packages) for packages in self._in_use() if packages}
        with self._changed:
            in_use |= self._making
        layers = [(path, usage(path)[0]) for path in self._layers()]
        taken = sum(n_bytes for _, n_bytes in layers)
        for path, n_bytes in layers:
            if taken + LAYER_BYTES <= self._most_bytes:
                break
            if path.name not in in_use:
                doomed = path.with_name(f"{_WORK}{path.name}")
                os.rename(path, doomed)  # nobody sees half a layer
                shutil.rmtree(doomed, ignore_errors=True)
                taken -= n_bytes
        if taken >= self._most_bytes:
            raise Unavailable("The packages of functions in use fill their space.", hint="raise THAW_PACKAGES_MB")
        if shutil.disk_usage(self._directory).free < LAYER_BYTES // 4:
            raise Unavailable("The host's disk is full.", hint="free space below THAW_RUN_DIR")

    def _layers(self) -> list[Path]:
        """Those that were used least recently come first."""
        found = [path for path in self._directory.iterdir() if path.is_dir() and not path.name.startswith(_WORK)]
        return sorted(found, key=lambda path: path.stat().st_mtime)

    def _remove_abandoned(self) -> None:
        oldest = time.time() - _ABANDONED_S
        for path in self._directory.glob(f"{_WORK}*"):
            try:
                if path.stat().st_mtime < oldest:
                    shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink()
            except FileNotFoundError:
                continue

    def _forget_other_boots(self) -> None:
        boot, noted = _BOOT_ID.read_text().strip(), self._directory / "boot"
        if _kept(noted, boot) != boot:
            for path in self._layers():
                shutil.rmtree(path)
            noted.write_text(boot)


def _kept(path: Path, value: str) -> str:
    """Return the file's content.  If the file does not exist, write ``value`` into it and return that."""
    try:
        with os.fdopen(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "w") as file:
            file.write(value)
    except FileExistsError:
        found = path.read_text()
        if found:
            return found
        path.write_text(value)  # its writer was killed in between
    return value
