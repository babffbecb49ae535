"""What the action proxy and its child say to one another: length-prefixed JSON over a socket pair.

Kept apart from relay's channel on purpose: this side must run in an image that has only the standard library.
"""

from __future__ import annotations

import json
import socket
import struct
from typing import Any, Final

SENTINEL: Final = "XXX_THE_END_OF_A_WHISK_ACTIVATION_XXX"
MAX_MESSAGE_BYTES: Final = 64 * 1024 * 1024  # the gateway's own limits are far below
_LENGTH: Final = struct.Struct("<I")


class PeerGone(Exception):
    """The other side closed."""


def send(sock: socket.socket, message: Any) -> None:
    """Raises PeerGone, or ValueError for what is not JSON or too large."""
    data = json.dumps(message).encode()
    if len(data) > MAX_MESSAGE_BYTES:
        raise ValueError(f"{len(data)} bytes; at most {MAX_MESSAGE_BYTES}")
    try:
        sock.sendall(_LENGTH.pack(len(data)) + data)
    except OSError as e:
        raise PeerGone(str(e)) from e


def receive(sock: socket.socket) -> Any:
    """Raises PeerGone."""
    (n_bytes,) = _LENGTH.unpack(_read(sock, _LENGTH.size))
    return json.loads(_read(sock, n_bytes))


def _read(sock: socket.socket, n_bytes: int) -> bytes:
    parts = bytearray()
    while len(parts) < n_bytes:
        try:
            got = sock.recv(min(n_bytes - len(parts), 1 << 20))
        except OSError as e:
            raise PeerGone(str(e)) from e
        if not got:
            raise PeerGone("closed")
        parts += got
    return bytes(parts)
