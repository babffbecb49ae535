"""The relay server for containers that have no network: one unix socket for each relay server, forwarded byte by byte.

``RelaySockets`` is the invoker's side.  It knows the sockets' directory, which is mounted into each llm container, and
keeps one forwarding process for each relay server (``python -m invoker.drivers.relay_socket``), so that a pipeline's
frames do not wait for the invoker's other threads.  The process moves bytes with splice(2), without copying them, or
through TLS (tls_forward.py).  It ends with the invoker.  A client that connects through the socket has to
authenticate at the relay server like any other.

A file beside the directory lists the sockets.  Stages may outlive an invoker, and the next invoker must then open the
same sockets again, under the same names.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit, urlunsplit

from invoker.drivers.socket_wait import wait_socket
from invoker.drivers.tls_forward import TlsForward
from relay.state.relay_tls import endpoint_of
from thaw.errors import PlatformError
from thaw.logs import Log

MOST_CONNECTIONS: Final = 256
"""A stage needs two connections, and one more to reconnect.  The limit is far below the relay server's own, which the
containers of one host must not use up.
"""
_READY_S: Final = 10.0
_CONNECT_S: Final = 5.0
_PIPE_BYTES: Final = 1 << 20


class RelaySockets:
    def __init__(self, directory: Path, log: Log) -> None:
        self.directory, self._log = directory, log
        directory.mkdir(parents=True, exist_ok=True)
        directory.chmod(0o755)
        for left_over in directory.glob("*.sock"):
            left_over.unlink()
        self._notes = directory.with_name(f"{directory.name}.json")
        self._former = _noted(self._notes)
        self._sockets: dict[str, str] = {}  # name → address
        self._lock = threading.Lock()
        self._forwarders: dict[str, subprocess.Popen[bytes]] = {}

    def inside(self, address: str, mounted: str) -> str:
        """The URL under which a container that has our directory at ``mounted`` reaches the relay server ``address``
        (``redis://host:port/db`` or ``rediss://…``, without credential).  Raises PlatformError.
        """
        endpoint_of(address)
        parts = urlsplit(address)
        name = self._forward(urlunsplit((parts.scheme, parts.netloc, "", parts.query, "")))
        database = parts.path.strip("/") or "0"
        return f"unix://{mounted}/{name}?db={database}"

    def reopen(self) -> None:
        """Open the sockets of an earlier invoker process again, for its containers that still run."""
        with self._lock:
            former, self._former = self._former, {}
            self._sockets |= former  # so they stay in the file if this invoker ends before all are open
        for address in former.values():
            try:
                self._forward(address)
            except PlatformError as e:  # its group is given up then, and its requests are continued elsewhere
                self._log.event("relay_not_reopened", error=e.message)

    def close(self) -> None:
        with self._lock:
            for process in self._forwarders.values():
                _end(process)
            self._forwarders.clear()
            self._notes.unlink(missing_ok=True)

    def _forward(self, address: str) -> str:
        name = hashlib.sha256(address.encode()).hexdigest()[:12] + ".sock"
        with self._lock:
            process = self._forwarders.get(name)
            if process is not None and process.poll() is not None:
                _end(process)
                process = None
            if process is None:
                self._forwarders[name] = self._started(self.directory / name, address)
                self._sockets[name] = address
                _note(self._notes, self._sockets)
        return name

    def _started(self, path: Path, address: str) -> subprocess.Popen[bytes]:
        path.unlink(missing_ok=True)
        command = [
            sys.executable,
            "-m",
            "invoker.drivers.relay_socket",
            "--listen",
            str(path),
            "--to",
            address,
        ]
        process = subprocess.Popen(command, stdin=subprocess.PIPE)  # nothing is written; it ends with this process
        never = os.eventfd(0, os.EFD_CLOEXEC)
        try:
            wait_socket(str(path), process.pid, _READY_S, never).close()
        except PlatformError as e:
            _end(process)
            raise PlatformError(f"no way to the relay server {urlsplit(address).netloc}: {e.message}") from e
        finally:
            os.close(never)
        return process


def _noted(notes: Path) -> dict[str, str]:
    try:
        return {str(name): str(address) for name, address in json.loads(notes.read_bytes()).items()}
    except (FileNotFoundError, ValueError):  # there is no file, or the disk was full when it was written
        return {}


def _note(notes: Path, sockets: Mapping[str, str]) -> None:
    part = notes.with_suffix(".part")
    try:
        part.write_text(json.dumps(sockets))
        part.rename(notes)
    except OSError as e:
        raise PlatformError(f"cannot write to {notes}: {e.strerror}", hint="make room where THAW_RUN_DIR is") from e


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    if process.stdin is not None:
        process.stdin.close()


def serve(path: str, address: str) -> None:
    """Accept and forward connections until the process ends.  Raises PlatformError before the first one."""
    relay = endpoint_of(address)
    hidden = f"{path}.new"
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(hidden)
    os.chmod(hidden, 0o666)  # noqa: S103  containers have other users; the directory limits who reaches it
    listener.listen(64)
    tls = TlsForward(listener, relay, MOST_CONNECTIONS, Log("relay-socket")) if relay.is_tls else None
    os.rename(hidden, path)
    if tls is not None:
        asyncio.run(tls.serve())
    slots = threading.BoundedSemaphore(MOST_CONNECTIONS)
    while True:
        inside, _ = listener.accept()
        if not slots.acquire(blocking=False):
            inside.close()
            continue
        threading.Thread(target=_join, args=(inside, (relay.host, relay.port), slots), daemon=True).start()


def _join(inside: socket.socket, relay: tuple[str, int], slots: threading.BoundedSemaphore) -> None:
    """Forward both directions of one connection; when one direction ends, both end."""
    try:
        with inside, socket.create_connection(relay, timeout=_CONNECT_S) as outside:
            outside.settimeout(None)
            outside.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            back = threading.Thread(target=_move, args=(outside, inside), daemon=True)
            back.start()
            _move(inside, outside)
            back.join()
    except OSError:
        return  # the relay server cannot be reached, and the container sees its connection close
    finally:
        slots.release()


def _move(source: socket.socket, sink: socket.socket) -> None:
    read, write = os.pipe()
    try:
        while n_bytes := os.splice(source.fileno(), write, _PIPE_BYTES):
            while n_bytes:
                n_bytes -= os.splice(read, sink.fileno(), n_bytes)
    except OSError:
        pass  # one of the two ends was closed
    finally:
        os.close(read)
        os.close(write)
        for sock in (source, sink):
            try:
                sock.shutdown(socket.SHUT_RDWR)
            except OSError:
                continue


def _end_with_invoker() -> None:
    """Wait until standard input ends, which happens with the invoker's end, however that comes.  (A parent-death signal
    would already come at the end of the thread that started this process.)
    """
    sys.stdin.buffer.read()
    os._exit(0)


def main() -> None:
    parser = argparse.ArgumentParser(description="Forward a unix socket to a relay server.")
    parser.add_argument("--listen", required=True)
    parser.add_argument("--to", required=True, metavar="URL")
    args = parser.parse_args()
    threading.Thread(target=_end_with_invoker, daemon=True).start()
    serve(args.listen, args.to)


if __name__ == "__main__":
    main()
