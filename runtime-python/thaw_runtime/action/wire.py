"""The messages between the action proxy and its child: JSON behind a short head, over a socket pair.

::

    0        4        12       14
    ├n_bytes─┼run id──┼status──┤ JSON of n_bytes        little-endian; status: 0 in a request, HTTP's in an answer

The proxy passes the JSON of a run and of its answer on unchanged; only the child reads it.  Run 0 is the init.
This module is separate from relay's channel on purpose: it must run in an image that has only the standard library.
"""

from __future__ import annotations

import socket
import struct
from typing import Final, NamedTuple

SENTINEL: Final = "XXX_THE_END_OF_A_WHISK_ACTIVATION_XXX"
MAX_MESSAGE_BYTES: Final = 64 * 1024 * 1024  # the gateway's own limits are far below
INIT: Final = 0
_HEAD: Final = struct.Struct("<IQH")


class PeerGone(Exception):
    """The other side closed the socket."""


class Message(NamedTuple):
    run_id: int
    status: int
    body: bytes


def send(sock: socket.socket, run_id: int, body: bytes, status: int = 0) -> None:
    """Send one message.  Raises PeerGone, or ValueError for a message that is too large."""
    if len(body) > MAX_MESSAGE_BYTES:
        raise ValueError(f"{len(body)} bytes; at most {MAX_MESSAGE_BYTES}")
    try:
        sock.sendall(_HEAD.pack(len(body), run_id, status) + body)
    except OSError as e:
        raise PeerGone(str(e)) from e


def receive(sock: socket.socket) -> Message:
    """Wait for one message.  Raises PeerGone."""
    message = Incoming(sock).take()
    assert message is not None  # noqa: S101  without MSG_DONTWAIT, take() waits for a message
    return message


class Incoming:
    """Reads messages in parts, as they arrive: a thread that watches several sockets must not wait inside a message."""

    def __init__(self, sock: socket.socket, flags: int = 0) -> None:
        """``flags`` are passed to ``recv``."""
        self._sock, self._flags = sock, flags
        self._head: tuple[int, int, int] | None = None
        self._parts = bytearray()

    def take(self) -> Message | None:
        """The next message; with MSG_DONTWAIT, None if it is not complete yet.  Raises PeerGone."""
        try:
            if self._head is None:
                self._fill(_HEAD.size)
                self._head = _HEAD.unpack(self._parts)
                self._parts = bytearray()
            n_bytes, run_id, status = self._head
            self._fill(n_bytes)
        except BlockingIOError:
            return None
        except OSError as e:
            raise PeerGone(str(e)) from e
        body, self._head, self._parts = bytes(self._parts), None, bytearray()
        return Message(run_id, status, body)

    def _fill(self, n_bytes: int) -> None:
        while len(self._parts) < n_bytes:
            got = self._sock.recv(min(n_bytes - len(self._parts), 1 << 20), self._flags)
            if not got:
                raise PeerGone("closed")
            self._parts += got
