"""``file://dir``: a directory that both ends have mounted.  A frame is a file, renamed into place when it is whole.

inotify wakes a reader where the kernel sees every change.  A network filesystem does not tell one host of another's
files, so there a reader lists the directory again and again: often after a frame came, then less and less often.
"""

from __future__ import annotations

import ctypes
import os
import secrets
import select
import shutil
import struct
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from relay.transports.object import Entry
from thaw.errors import PlatformError, ProtocolError, StoreUnavailable
from thaw.ids import GroupId

_IN_CHANGES: Final = 0x80 | 0x200 | 0x400  # IN_MOVED_TO, IN_DELETE, IN_DELETE_SELF of linux/inotify.h
_IN_FLAGS: Final = os.O_NONBLOCK | os.O_CLOEXEC  # IN_NONBLOCK and IN_CLOEXEC are these
_EVENT_BYTES: Final = 64 * 1024
_REMOTE: Final = frozenset({0x6969, 0xFF534D42, 0xFE534D42, 0x65735546, 0x01021997, 0x5346414F, 0x00C36400, 0x0BD00BD0})
"""statfs types that do not notify of changes by other hosts: NFS, CIFS, SMB2, FUSE, 9p, AFS, Ceph, Lustre."""
POLL_S: Final = (0.001, 0.1)
"""First and longest pause between two listings.  A frame takes about the first; an idle stage lists ten times a
second."""

_libc: Final = ctypes.CDLL(None, use_errno=True)


class DirStore:
    """``notify`` None means inotify where the filesystem is local."""

    def __init__(self, root: Path, *, notify: bool | None = None) -> None:
        self._root = root
        if not root.is_dir():
            raise StoreUnavailable(f"{root}: no such directory", hint="is it mounted here?")
        self._notify = (_filesystem(root) not in _REMOTE) if notify is None else notify

    def session(self) -> DirSession:
        return DirSession(self._root, self._notify)

    def drop_group(self, group_id: GroupId) -> None:
        shutil.rmtree(self._root / group_id, ignore_errors=True)


class DirSession:
    """See object.Session."""

    def __init__(self, root: Path, notify: bool) -> None:
        self._root = root
        self._made: set[str] = set()
        self._waker = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._inotify = _checked(_libc.inotify_init1(_IN_FLAGS), "inotify") if notify else -1
        self._watched: set[str] = set()
        self._pause_s = POLL_S[0]

    def put(self, folder: str, name: str, parts: Sequence[bytes | memoryview]) -> None:
        directory = self._directory(folder)
        made = directory / f".{name}.{secrets.token_hex(4)}"
        try:
            with made.open("xb", buffering=0) as file:
                for part in parts:
                    _write_all(file.fileno(), part)
            made.rename(directory / name)
        except OSError as e:
            self._made.discard(folder)
            made.unlink(missing_ok=True)
            raise StoreUnavailable(f"{directory}: {e}", hint="is the shared directory mounted, with room?") from e

    def get(self, folder: str, name: str, most_bytes: int) -> bytes | None:
        try:
            with (self._root / folder / name).open("rb", buffering=0) as file:
                n_bytes = os.fstat(file.fileno()).st_size
                if n_bytes > most_bytes:
                    raise ProtocolError(f"{name}: {n_bytes} bytes; the limit is {most_bytes}")
                return file.read(n_bytes)
        except FileNotFoundError:
            return None
        except OSError as e:
            raise StoreUnavailable(f"{self._root / folder}: {e}") from e

    def delete(self, folder: str, name: str) -> None:
        try:
            (self._root / folder / name).unlink(missing_ok=True)
        except OSError as e:
            raise StoreUnavailable(f"{self._root / folder}: {e}") from e

    def list(self, folder: str, prefix: str = "") -> list[Entry]:
        directory, now, found = self._directory(folder), time.time(), []
        self._watch(folder, directory)  # before the listing: later changes wake the reader
        try:
            with os.scandir(directory) as entries:
                for entry in entries:
                    if entry.name.startswith(prefix or ("0", "1", "2")):
                        try:
                            stat = entry.stat()
                        except FileNotFoundError:
                            continue  # it was read meanwhile
                        found.append(Entry(entry.name, stat.st_size, now - stat.st_mtime))
        except OSError as e:
            self._made.discard(folder)
            raise StoreUnavailable(f"{directory}: {e}") from e
        return sorted(found, key=lambda e: e.name)

    def wait(self, folder: str, timeout_s: float, *, eager: bool) -> None:
        self._pause_s = POLL_S[0] if eager else min(2 * self._pause_s, POLL_S[1])
        waiter = select.poll()
        waiter.register(self._waker, select.POLLIN)
        if self._inotify >= 0:
            waiter.register(self._inotify, select.POLLIN)
        patience_s = timeout_s if self._inotify >= 0 else min(timeout_s, self._pause_s)
        waiter.poll(max(1, int(patience_s * 1000 + 0.999)))
        if self._inotify >= 0:
            try:
                os.read(self._inotify, _EVENT_BYTES)  # the next listing shows what has changed
            except BlockingIOError:
                pass  # nothing has changed

    def interrupt(self) -> None:
        os.eventfd_write(self._waker, 1)

    def close(self) -> None:
        os.close(self._waker)
        if self._inotify >= 0:
            os.close(self._inotify)

    def _directory(self, folder: str) -> Path:
        directory = self._root / folder
        if folder not in self._made:
            try:
                directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            except OSError as e:
                raise StoreUnavailable(f"{directory}: {e}", hint="is the shared directory writable?") from e
            self._made.add(folder)
        return directory

    def _watch(self, folder: str, directory: Path) -> None:
        if self._inotify < 0 or folder in self._watched:
            return
        path = os.fsencode(directory)
        _checked(_libc.inotify_add_watch(self._inotify, path, _IN_CHANGES), str(directory))
        self._watched.add(folder)


def _write_all(fd: int, part: bytes | memoryview) -> None:
    rest = memoryview(part)
    while rest:
        rest = rest[os.write(fd, rest) :]


def _checked(result: int, what: str) -> int:
    if result < 0:
        error = ctypes.get_errno()
        raise PlatformError(f"{what}: {os.strerror(error)}", hint="see fs.inotify.max_user_instances and …_watches")
    return result


def _filesystem(path: Path) -> int:
    """f_type of statfs(2), the first word of the struct."""
    found = ctypes.create_string_buffer(256)
    _checked(_libc.statfs(os.fsencode(path), found), str(path))
    return int(struct.unpack_from("l", found)[0]) & 0xFFFFFFFF
