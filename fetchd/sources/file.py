"""``file:///dir``: bulk preads past the page cache.

A read with O_DIRECT costs a quarter of a buffered read's CPU and leaves the page cache to others.  The disk writes
straight into the slabs when those are huge pages.  Into pages of 4 KiB the disk is half as fast here (a request has a
limited number of pieces, docs/lab-log.md), so the bytes are read into a buffer of huge pages and copied, which is cheap
in comparison.  The same buffer serves reads whose offset, length or address is not a multiple of a block (a stage's
ranges), because O_DIRECT cannot do them.  Small pieces are read buffered, and so are all files of a file system that
refuses O_DIRECT.
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Final
from urllib.parse import unquote

from fetchd.settings import FetchdSettings
from fetchd.sources.base import ObjectInfo, Target, Throttle, fill
from relay.protocol.shared_memory import Region
from thaw.errors import ModelCorrupt, ModelNotFound, StoreUnavailable
from thaw.model_uri import ModelUri
from thaw.settings import SettingError

_BLOCK_BYTES: Final = 4096
_MAX_READ_BYTES: Final = 16 * 1024 * 1024
_BUFFER_BYTES: Final = 4 * 1024 * 1024
_WORTH_BYTES: Final = 128 * 1024
"""A shorter piece is read buffered: the disk is no faster, and the kernel copies it for us."""
_GONE: Final = (errno.ENOENT, errno.ENOTDIR, errno.EACCES, errno.EISDIR, errno.ELOOP)


def _translate(path: Path, e: OSError) -> ModelNotFound | StoreUnavailable:
    if e.errno in _GONE:
        return ModelNotFound(f"{path} cannot be read: {e.strerror}", hint="check the model's uri and permissions")
    return StoreUnavailable(f"{path} cannot be read: {e.strerror}")


def _etag(status: os.stat_result) -> str:
    return f"{status.st_size:x}-{status.st_mtime_ns:x}-{status.st_ino:x}"


def open_file(uri: ModelUri, settings: FetchdSettings, *, huge: bool) -> FileSource:
    return FileSource(Path(uri.directory), huge=huge, roots=roots_of(settings))


def roots_of(settings: FetchdSettings) -> tuple[Path, ...]:
    """The directories below which models may lie, with links resolved.  Raises SettingError."""
    named = [unquote(text) for text in settings.file_roots.split(":") if text]
    for text in named:
        if not text.startswith("/"):
            raise SettingError(
                f"THAW_FETCHD_FILE_ROOTS: {text!r} is no absolute path", hint="set it to /dir:/other/dir"
            )
    return tuple(Path(text).resolve() for text in named)


def _is_below(path: Path, roots: Sequence[Path]) -> bool:
    return any(path.is_relative_to(root) for root in roots)


def _outside(what: str) -> ModelNotFound:
    return ModelNotFound(
        f"{what}: this host serves no model there", hint="an operator names the directories: THAW_FETCHD_FILE_ROOTS"
    )


class FileSource:
    kind = "file"
    host = ""

    def __init__(self, root: Path, *, huge: bool = False, roots: Sequence[Path] = (Path("/"),)) -> None:
        """``huge``: the targets of reads are huge pages.  ``roots``: see :func:`roots_of`."""
        self._root, self._huge, self._roots = root, huge, roots
        if not _is_below(root.resolve(), roots):  # before looking for it: nobody learns which other files exist
            raise _outside(root.as_uri())
        if not root.is_dir():
            raise ModelNotFound(f"{root.as_uri()}: no such directory here", hint="every host needs the same directory")

    def connect(self) -> FileConnection:
        return FileConnection(self._root, huge=self._huge, roots=self._roots)


class FileConnection:
    """Keeps the descriptors of the file it read last: chunks of one file follow one another."""

    def __init__(self, root: Path, *, huge: bool = False, roots: Sequence[Path] = (Path("/"),)) -> None:
        self._root, self._huge, self._roots = root, huge, roots
        self._name = ""
        self._buffered = self._direct = -1
        self._buffer: Region | None = None

    def stat(self, name: str) -> ObjectInfo:
        path = self._root / name
        try:
            fd = self._opened(path, os.O_PATH)
            status = os.fstat(fd)
            os.close(fd)
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
            if not fill(target, throttle, _MAX_READ_BYTES, lambda piece: self._read(piece, offset + target.done)):
                raise ModelCorrupt(
                    f"{path} ends at byte {offset + target.done}, {target.left} bytes too early",
                    hint="the file is truncated: push the model again",
                )
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
        if self._buffer is not None:
            self._buffer.close()
        self._buffer = None

    def _open(self, name: str, path: Path) -> None:
        if self._name == name:
            return
        self.close()
        self._buffered = self._opened(path, os.O_RDONLY)
        self._name = name
        try:
            self._direct = self._opened(path, os.O_RDONLY | os.O_DIRECT)
        except OSError:
            self._direct = -1  # some file systems have no O_DIRECT

    def _opened(self, path: Path, flags: int) -> int:
        """The kernel says which file was opened: a link that is changed meanwhile makes no difference.  Raises OSError,
        and ModelNotFound for a file outside of the roots."""
        fd = os.open(path, flags | os.O_CLOEXEC)
        if not _is_below(Path(os.readlink(f"/proc/self/fd/{fd}")), self._roots):
            os.close(fd)
            raise _outside(str(path))
        return fd

    def _read(self, piece: memoryview, offset: int) -> int:
        if self._direct >= 0 and len(piece) >= _BLOCK_BYTES:
            aligned = offset % _BLOCK_BYTES == 0 and _address(piece) % _BLOCK_BYTES == 0
            try:
                if self._huge and aligned:
                    return os.preadv(self._direct, [piece[: len(piece) - len(piece) % _BLOCK_BYTES]], offset)
                if len(piece) >= _WORTH_BYTES:
                    return self._read_beside(piece, offset)
            except OSError as e:
                if e.errno != errno.EINVAL:  # a device with larger blocks
                    raise
        return os.preadv(self._buffered, [piece], offset)

    def _read_beside(self, piece: memoryview, offset: int) -> int:
        """Read the blocks around (the first of) the piece into the buffer; return how much of the piece is filled."""
        if self._buffer is None:
            self._buffer = Region(_BUFFER_BYTES)
            self._buffer.populate(0, _BUFFER_BYTES)
        ahead = offset % _BLOCK_BYTES
        wanted = min(len(piece), _BUFFER_BYTES - ahead)
        n_bytes = -(-(ahead + wanted) // _BLOCK_BYTES) * _BLOCK_BYTES
        count = min(os.preadv(self._direct, [self._buffer.view[:n_bytes]], offset - ahead) - ahead, wanted)
        if count > 0:
            piece[:count] = self._buffer.view[ahead : ahead + count]
        return max(count, 0)


def _address(piece: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(piece))
