"""``file:///dir``: bulk preads past the page cache.

O_DIRECT costs a quarter of a buffered read's CPU and leaves the page cache to others; it needs offset, length and
address at multiples of a block, which ranges from a file's start have.  What is not aligned, and a file system that
refuses O_DIRECT, is read buffered.
"""

from __future__ import annotations

import ctypes
import errno
import os
from pathlib import Path
from typing import Final
from urllib.parse import unquote, urlsplit

from fetchd.sources.base import ObjectInfo, Target, Throttle
from thaw.errors import ModelCorrupt, ModelNotFound, StoreUnavailable

_BLOCK_BYTES: Final = 4096
_MAX_READ_BYTES: Final = 16 * 1024 * 1024
_GONE: Final = (errno.ENOENT, errno.ENOTDIR, errno.EACCES, errno.EISDIR, errno.ELOOP)


def _translate(path: Path, e: OSError) -> ModelNotFound | StoreUnavailable:
    if e.errno in _GONE:
        return ModelNotFound(f"{path} cannot be read: {e.strerror}", hint="check the model's uri and permissions")
    return StoreUnavailable(f"{path} cannot be read: {e.strerror}")


def _etag(status: os.stat_result) -> str:
    return f"{status.st_size:x}-{status.st_mtime_ns:x}-{status.st_ino:x}"


class FileSource:
    kind = "file"

    def __init__(self, uri: str) -> None:
        self._root = Path(unquote(urlsplit(uri).path))
        if not self._root.is_dir():
            raise ModelNotFound(f"{uri}: no such directory on this host", hint="every host needs the same directory")

    def connect(self) -> FileConnection:
        return FileConnection(self._root)


class FileConnection:
    """Keeps the descriptors of the file it read last: chunks of one file follow one another."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._name = ""
        self._buffered = self._direct = -1

    def stat(self, name: str) -> ObjectInfo:
        path = self._root / name
        try:
            status = path.stat()
        except OSError as e:
            raise _translate(path, e) from e
        return ObjectInfo(status.st_size, _etag(status))

    def read_into(self, name: str, offset: int, target: Target, throttle: Throttle, etag: str) -> str:
        path = self._root / name
        try:
            self._open(name, path)
            found = _etag(os.fstat(self._buffered))
            if etag and found != etag:
                raise ModelCorrupt(f"{path} has changed since it was inspected", hint="deploy the model again")
            while target.left:
                piece = target.next(throttle.quantum(_MAX_READ_BYTES))
                throttle.before_read(len(piece))
                count = self._read(piece, offset + target.done)
                if count == 0:
                    raise ModelCorrupt(f"{path} ends at byte {offset + target.done}, {target.left} bytes too early",
                                       hint="the file is truncated: push the model again")  # fmt: skip
                target.advance(count)
                throttle.after_read(count)
        except OSError as e:
            raise _translate(path, e) from e
        return found

    def interrupt(self) -> None:
        """A disk read ends by itself."""

    def close(self) -> None:
        for fd in (self._buffered, self._direct):
            if fd >= 0:
                os.close(fd)
        self._buffered = self._direct = -1
        self._name = ""

    def _open(self, name: str, path: Path) -> None:
        if self._name == name:
            return
        self.close()
        self._buffered = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self._name = name
        try:
            self._direct = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)
        except OSError:
            self._direct = -1  # some file systems have no O_DIRECT

    def _read(self, piece: memoryview, offset: int) -> int:
        whole = len(piece) - len(piece) % _BLOCK_BYTES
        if self._direct >= 0 and whole and offset % _BLOCK_BYTES == 0 and _address(piece) % _BLOCK_BYTES == 0:
            try:
                return os.preadv(self._direct, [piece[:whole]], offset)
            except OSError as e:
                if e.errno != errno.EINVAL:  # a device with larger blocks
                    raise
        return os.preadv(self._buffered, [piece], offset)


def _address(piece: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(piece))
