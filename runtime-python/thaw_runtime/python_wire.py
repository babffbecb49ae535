"""What the action proxy and its child say to one another: JSON behind a short head, over a socket pair.

::

    0        4        12       14
    ├n_bytes─┼run id──┼status──┤ JSON of n_bytes        little-endian; status: 0 in a request, HTTP's in an answer

The proxy passes a run's JSON on as it came and an answer's as it is: only the child looks inside.  Run 0 is the init.
Kept apart from relay's channel on purpose: this side must run in an image that has only the standard library.
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
    """The other side closed."""


class Message(NamedTuple):
    run_id: int
    status: int
    body: bytes


def send(sock: socket.socket, run_id: int, body: bytes, status: int = 0) -> None:
    """Raises PeerGone, or ValueError for what is too large."""
    if len(body) > MAX_MESSAGE_BYTES:
        raise ValueError(f"{len(body)} bytes; at most {MAX_MESSAGE_BYTES}")
    try:
        sock.sendall(_HEAD.pack(len(body), run_id, status) + body)
    except OSError as e:
        raise PeerGone(str(e)) from e


def receive(sock: socket.socket) -> Message:
    """Raises PeerGone."""
    n_bytes, run_id, status = _HEAD.unpack(_read(sock, _HEAD.size))
    return Message(run_id, status, _read(sock, n_bytes))


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
