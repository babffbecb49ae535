"""The records of owned containers on disk, by which a restarted invoker adopts or ends them.

``<run_dir>/c/<12 hex of the container id>/`` holds the socket ``s``, both logs and ``owner.json``.  The short name
keeps socket paths below the kernel's 107 bytes.  The file is written before the process exists (pid 0) and again with
its pid, so a crash in between leaves a directory whose process is found by its socket or its environment.
"""

from __future__ import annotations

import hashlib
import shutil
import socket
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from invoker.drivers import process_ids
from invoker.drivers.base import Handle, Owned
from thaw import wire
from thaw.errors import PlatformError, ProtocolError

_MAX_SOCKET_PATH: Final = 107
_PEER: Final = struct.Struct("3i")  # struct ucred: pid, uid, gid


@dataclass(frozen=True, slots=True)
class _Owner:
    container_id: str
    kind: str
    pid: int
    start_ticks: int
    labels: Mapping[str, str]


class OwnedContainers:
    def __init__(self, run_dir: Path, *, by_environment: bool = True) -> None:
        """``by_environment``: look for a process whose pid was not written down yet."""
        self._by_environment = by_environment
        self._root = run_dir / "c"
        self._root.mkdir(parents=True, exist_ok=True)

    def handle(self, container_id: str, kind: str) -> Handle:
        name = hashlib.sha256(container_id.encode()).hexdigest()[:12]
        handle = Handle(container_id, kind, self._root / name)
        if len(handle.socket_path.encode()) + len(".new") > _MAX_SOCKET_PATH:
            raise PlatformError(f"{handle.socket_path} is too long for a socket", hint="set a shorter THAW_RUN_DIR")
        return handle

    def write(self, handle: Handle, labels: Mapping[str, str]) -> None:
        """Raises PlatformError when there is no room."""
        data = wire.dumps(_Owner(handle.container_id, handle.kind, handle.pid, handle.start_ticks, labels))
        part = handle.directory / "owner.json.part"
        try:
            handle.directory.mkdir(exist_ok=True)
            part.write_bytes(data)
            part.rename(handle.directory / "owner.json")
        except OSError as e:
            raise PlatformError(
                f"cannot write to {self._root}: {e.strerror}", hint="make room where THAW_RUN_DIR is"
            ) from e

    def all(self) -> Iterator[Owned]:
        for directory in sorted(self._root.iterdir()):
            owned = self._owned(directory)
            if owned is not None:
                yield owned
            else:
                shutil.rmtree(directory, ignore_errors=True)  # never became a container

    def remove(self, handle: Handle) -> None:
        shutil.rmtree(handle.directory, ignore_errors=True)

    def _owned(self, directory: Path) -> Owned | None:
        try:
            owner = wire.loads(_Owner, (directory / "owner.json").read_bytes())
        except (OSError, ProtocolError):
            return None
        pid, ticks = owner.pid, owner.start_ticks
        if pid == 0 and self._by_environment:
            pid, ticks = find_by_socket(str(directory / "s"))
        handle = Handle(owner.container_id, owner.kind, directory, pid, ticks)
        return Owned(handle, owner.labels, process_ids.is_alive(pid, ticks))


def find_by_socket(socket_path: str) -> tuple[int, int]:
    """The container of ``socket_path``: (pid, start ticks), or zeros.

    It is the process that listens there, or else the one whose environment names the socket.  The environment alone
    would not do: a fork of the stem cell shows the stem cell's.
    """
    found = find_listener(socket_path)
    return found if found[0] else _with_ticks(_started_for(socket_path))


def find_listener(socket_path: str) -> tuple[int, int]:
    """The process that listens there: (pid, start ticks), or zeros."""
    with socket.socket(socket.AF_UNIX) as sock:
        sock.setblocking(False)  # a full queue is no reason to wait
        try:
            sock.connect(socket_path)
        except OSError:
            return 0, 0
        return listener(sock)


def listener(connected: socket.socket) -> tuple[int, int]:
    """The process on the other side; zeros when its pid means nothing here."""
    return _with_ticks(_PEER.unpack(connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))[0])


def _with_ticks(pid: int) -> tuple[int, int]:
    ticks = process_ids.start_ticks(pid) if pid else None
    return (pid, ticks) if ticks is not None else (0, 0)


def _started_for(socket_path: str) -> int:
    wanted = f"THAW_SOCKET={socket_path}".encode()
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            if wanted in (entry / "environ").read_bytes().split(b"\0"):
                return int(entry.name)
        except OSError:
            continue
    return 0
