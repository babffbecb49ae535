"""How a TCP connection between two stages opens: both prove that they know the group's secret, and neither sends it.

::

    listener                                  dialer
       ├── THWT, nonce (32 B) ──────────────────▶│
       │◀── hello: group, from, to, priority, nonce, HMAC(secret; listener's nonce, hello) ──┤
       ├── welcome: position, HMAC(secret; both nonces, position) ──▶│    frames v1 from here on

Every part has a fixed length, so the listener holds 128 bytes for a peer that it does not know, and closes without an
answer when the proof is wrong.  The position is the first frame that the listener does not have: a dialer that connects
again goes on from there.  docs/transports.md.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import struct
from dataclasses import dataclass
from typing import Final

from relay.protocol.frames import Priority
from thaw.errors import ProtocolError

MAGIC: Final = b"THWT"
VERSION: Final = 1
NONCE_BYTES: Final = 32
_MAC_BYTES: Final = 32
_HELLO: Final = struct.Struct("<4sBBBB16s32s")
_WELCOME: Final = struct.Struct("<4sQI")
GREETING_BYTES: Final = len(MAGIC) + NONCE_BYTES
HELLO_BYTES: Final = _HELLO.size + _MAC_BYTES
WELCOME_BYTES: Final = _WELCOME.size + _MAC_BYTES


@dataclass(frozen=True, slots=True)
class Hello:
    group_id: bytes
    sender: int
    receiver: int
    priority: Priority


def nonce() -> bytes:
    return secrets.token_bytes(NONCE_BYTES)


def greeting(listener_nonce: bytes) -> bytes:
    return MAGIC + listener_nonce


def hello(greeting_bytes: bytes, says: Hello, secret: str) -> bytes:
    """The dialer's proof.  Raises ProtocolError for a greeting that is not a stage's."""
    if not greeting_bytes.startswith(MAGIC):
        raise ProtocolError(f"not a stage of Thaw: it says {greeting_bytes[:8]!r}")
    body = _HELLO.pack(MAGIC, VERSION, says.sender, says.receiver, says.priority, says.group_id, nonce())
    return body + _mac(secret, b"thaw hello", greeting_bytes, body)


def read_hello(greeting_bytes: bytes, data: bytes, secret: str) -> Hello:
    """Read the dialer's hello.  Raises ProtocolError for a dialer that does not know the secret."""
    body, mac = data[: _HELLO.size], data[_HELLO.size :]
    if not hmac.compare_digest(mac, _mac(secret, b"thaw hello", greeting_bytes, body)):
        raise ProtocolError("a connection with the wrong secret, or of another group")
    magic, version, sender, receiver, priority, group_id, _ = _HELLO.unpack(body)
    if magic != MAGIC or version != VERSION or priority not in [p.value for p in Priority]:
        raise ProtocolError(f"a stage of another version: {version}; this one speaks {VERSION}")
    return Hello(group_id, sender, receiver, Priority(priority))


def welcome(hello_bytes: bytes, position: tuple[int, int], secret: str) -> bytes:
    body = _WELCOME.pack(MAGIC, *position)
    return body + _mac(secret, b"thaw welcome", hello_bytes, body)


def read_welcome(hello_bytes: bytes, data: bytes, secret: str) -> tuple[int, int]:
    """Read the listener's position.  Raises ProtocolError for a listener that does not know the secret."""
    body, mac = data[: _WELCOME.size], data[_WELCOME.size :]
    if not hmac.compare_digest(mac, _mac(secret, b"thaw welcome", hello_bytes, body)):
        raise ProtocolError("the listener does not know the group's secret")
    _, message, chunk = _WELCOME.unpack(body)
    return message, chunk


def _mac(secret: str, label: bytes, *parts: bytes) -> bytes:
    return hmac.digest(secret.encode(), label + b"".join(parts), hashlib.sha256)
