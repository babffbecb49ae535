"""Frames over a connected stream socket: fetchd's control socket, the proxy's and the engine's.

Each control frame carries one JSON message, and may carry file descriptors (of segments) with SCM_RIGHTS.  A channel
serves one reader and any number of writers.
"""

from __future__ import annotations

import array
import os
import socket
import threading
from typing import Any, Self

from relay.protocol.frames import (
    HEADER_BYTES,
    FrameHeader,
    FrameKind,
    check_payload,
    decode_header,
    encode,
)
from thaw import wire
from thaw.errors import ProtocolError

MAX_FDS = 250
"""Linux's SCM_MAX_FD is 253.  More descriptors than this are sent in several messages."""


class ChannelClosed(ProtocolError):
    """The peer closed the connection.  Between frames this is an ordinary end; inside a frame it is an error."""


class Channel:
    def __init__(self, sock: socket.socket, *, takes_fds: bool = True) -> None:
        """Without ``takes_fds`` the kernel closes the descriptors that a message brings, so they never count against
        this process's limit.
        """
        self.sock = sock
        self._ancillary_bytes = socket.CMSG_SPACE(MAX_FDS * 4) if takes_fds else 0
        self._write_lock = threading.Lock()
        self._seq = 0

    @classmethod
    def connect(cls, path: str, *, timeout_s: float = 10.0) -> Self:
        """Connect to a unix socket.  ``timeout_s`` bounds every later operation until :meth:`set_timeout`."""
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.settimeout(timeout_s)
        try:
            sock.connect(path)
        except OSError:
            sock.close()
            raise
        return cls(sock)

    def set_timeout(self, timeout_s: float | None) -> None:
        self.sock.settimeout(timeout_s)

    def send(self, message: Any, fds: tuple[int, ...] = ()) -> None:
        """Send one control frame with ``message`` (dataclass or plain JSON) and up to MAX_FDS descriptors."""
        with self._write_lock:
            self._seq += 1
            data = memoryview(encode(FrameHeader(FrameKind.CONTROL, seq=self._seq), wire.dumps(message)))
            if fds:
                rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))]
                data = data[self.sock.sendmsg([data], rights) :]
            if data:  # otherwise the peer has all of it, and may have closed already
                self.sock.sendall(data)

    def receive(self) -> tuple[Any, list[int]]:
        """The next control message as plain JSON, and the descriptors that came with it.

        Raises ChannelClosed when the peer closed, ProtocolError for a bad frame, TimeoutError.  After an error, no
        descriptor is left open.
        """
        fds: list[int] = []
        try:
            header = decode_header(self._read(HEADER_BYTES, fds, at_boundary=True))
            payload = self._read(header.n_bytes, fds, at_boundary=False)
            check_payload(header, payload)
            if header.kind is not FrameKind.CONTROL:
                raise ProtocolError(f"expected a control frame, got {header.kind.name}")
            return wire.loads(object, payload), fds
        except BaseException:
            for fd in fds:
                os.close(fd)
            raise

    def close(self) -> None:
        try:
            self.sock.shutdown(socket.SHUT_RDWR)  # wakes a reader that is blocked in another thread
        except OSError:
            pass
        self.sock.close()

    def _read(self, n_bytes: int, fds: list[int], *, at_boundary: bool) -> bytes:
        buffer = bytearray(n_bytes)
        view = memoryview(buffer)
        done = 0
        while done < n_bytes:
            count, ancillary, _, _ = self.sock.recvmsg_into([view[done:]], self._ancillary_bytes)
            for level, kind, data in ancillary:
                if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                    received = array.array("i")
                    received.frombytes(data[: len(data) - len(data) % received.itemsize])
                    fds.extend(received)
            if count == 0:
                where = "closed" if at_boundary and done == 0 else f"closed inside a frame ({done} of {n_bytes} bytes)"
                raise ChannelClosed(f"the peer {where}")
            done += count
        return bytes(buffer)
