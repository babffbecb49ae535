"""The Redis protocol on a bare socket, because a client library costs more per message than the message itself.

redis-py encodes, parses and dispatches in Python, and copies a payload four times.  Here a command is written from the
caller's memory, and a reply is received directly into its final place.  All calls block; the receiving end of the
transport parses while it waits (redis.py).  RESP 2, https://valkey.io/topics/protocol/.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import parse_qs, unquote, urlsplit

from relay.protocol.frames import Priority
from relay.protocol.messages import GroupCredential
from thaw.errors import PlatformError, ProtocolError, Unavailable

BUFFER_BYTES: Final = 64 * 1024
"""The size of a connection's buffer: it has room for two reads."""

READ_BYTES: Final = 33 * 1024
"""The most that one read puts into the buffer.  The rest of a larger message is received into its final place, without
a copy.
"""

SMALL_BYTES: Final = 16 * 1024
"""Below this, joining the pieces of a command costs less than giving the kernel a list of them."""

CONNECT_TIMEOUT_S: Final = 2.0
_REPLY_TIMEOUT_S: Final = 5.0
_SO_PRIORITY: Final = {Priority.INFERENCE: 6, Priority.KV: 4, Priority.BULK: 2}
"""In the kernel's default priority map, 6 and 4 (interactive) belong to band 0, and 2 is bulk."""
_DSCP: Final = {Priority.INFERENCE: 46 << 2, Priority.KV: 34 << 2, Priority.BULK: 10 << 2}
"""Expedited forwarding, AF41 and AF11.  All of them take precedence over fetches, which are marked CS1."""


class Refused(PlatformError):
    """The server answered with an error.  ``word`` is the error's first word: WRONGPASS, NOPERM, OOM …"""

    @property
    def word(self) -> str:
        return self.message.partition(" ")[0]


@dataclass(frozen=True, slots=True)
class Server:
    """Where a relay server is, without any credential: ``redis://host:port/db`` or ``unix:///path?db=0``."""

    host: str
    port: int
    path: str
    database: int

    @staticmethod
    def parse(url: str) -> Server:
        parts = urlsplit(url)
        if parts.scheme == "unix":
            return Server("", 0, unquote(parts.path), int(parse_qs(parts.query).get("db", ["0"])[0]))
        if parts.scheme != "redis":
            raise PlatformError(
                f"the relay server's address has scheme {parts.scheme!r}",
                hint="use redis:// or unix://; a host's invoker forwards to a relay server with TLS",
            )
        return Server(parts.hostname or "127.0.0.1", parts.port or 6379, "", int(parts.path.strip("/") or 0))

    def dial(self, priority: Priority, timeout_s: float) -> socket.socket:
        if self.path:
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            sock.settimeout(timeout_s)
            sock.connect(self.path)
        else:
            sock = socket.create_connection((self.host, self.port), timeout_s)
            tune(sock, priority)
        return sock


def tune(sock: socket.socket, priority: Priority) -> None:
    """Set the options of a socket: it sends without waiting for more bytes, its packets have the priority of their
    messages, and a peer that vanished is noticed in seconds.
    """
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 5)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 2)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 10_000)
    if sock.family == socket.AF_INET6:
        sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_TCLASS, _DSCP[priority])
    else:
        sock.setsockopt(socket.IPPROTO_IP, socket.IP_TOS, _DSCP[priority])
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_PRIORITY, _SO_PRIORITY[priority])  # after IP_TOS, which sets it too


def command(*arguments: bytes | str | int) -> bytes:
    parts = [b"*%d\r\n" % len(arguments)]
    for argument in arguments:
        data = argument if isinstance(argument, bytes) else str(argument).encode()
        parts.append(b"$%d\r\n%b\r\n" % (len(data), data))
    return b"".join(parts)


class Connection:
    """One authenticated connection.  Every call may raise OSError; the connection cannot be used after that."""

    def __init__(self, server: Server, credential: GroupCredential, priority: Priority, timeout_s: float) -> None:
        self.sock = server.dial(priority, max(0.01, min(timeout_s, CONNECT_TIMEOUT_S)))
        self.buffer = bytearray(BUFFER_BYTES)
        self.view = memoryview(self.buffer)
        self.start = self.end = 0
        self._wait_s = 0.0
        try:
            self._greet(server, credential)
        except BaseException:
            self.sock.close()
            raise

    def send(self, *parts: bytes | memoryview) -> None:
        """Write all of ``parts``.  Only small parts are joined into one piece first."""
        if len(parts) == 1 or sum(map(len, parts)) <= SMALL_BYTES:
            self.sock.sendall(b"".join(parts) if len(parts) > 1 else parts[0])
            return
        rest = [memoryview(p) for p in parts if len(p)]
        while rest:
            sent = self.sock.sendmsg(rest)
            while rest and sent >= len(rest[0]):
                sent -= len(rest.pop(0))
            if sent:
                rest[0] = rest[0][sent:]

    def call(self, *arguments: bytes | str | int, wait_s: float = _REPLY_TIMEOUT_S) -> Any:
        self.send(command(*arguments))
        return self.reply(wait_s)

    def reply(self, wait_s: float = _REPLY_TIMEOUT_S) -> Any:
        """The next reply: bytes, int, None or a list of them.  Raises Refused; OSError when none came in time."""
        self.wait_at_most(wait_s)
        found = self._parse()
        if isinstance(found, Refused):
            raise found
        return found

    def replies(self, most: int) -> Iterator[Any]:
        """The replies that have come so far, at most ``most``.  Errors are among them.  Does not wait."""
        for _ in range(most):
            if self.start == self.end:
                self.start = self.end = 0
                try:
                    count = self.sock.recv_into(self.view, 0, socket.MSG_DONTWAIT)
                except BlockingIOError:
                    return
                if count == 0:
                    raise ConnectionResetError("the relay server closed the connection")
                self.end = count
            yield self._parse()

    def wait_at_most(self, wait_s: float) -> None:
        """Limit the time of one read or write by the kernel's own option.  Python's timeout would poll before each."""
        if wait_s != self._wait_s:
            whole, part = divmod(max(wait_s, 0.001), 1)
            limit = struct.pack("ll", int(whole), int(part * 1e6))
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
            self._wait_s = wait_s

    def interrupt(self) -> None:
        """Wake the thread that waits in this connection; called on another thread.  The woken thread then closes the
        connection.
        """
        try:
            self.sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # the connection was closed just now

    def close(self) -> None:
        self.sock.close()

    def _greet(self, server: Server, credential: GroupCredential) -> None:
        self.sock.settimeout(None)
        if credential.secret:
            who = [credential.username] if credential.username else []
            self.call("AUTH", *who, credential.secret)
        if server.database:
            self.call("SELECT", server.database)

    def _parse(self) -> Any:
        line = self._line()
        kind, rest = line[:1], line[1:]
        if kind == b"-":
            return Refused(rest.decode("utf-8", "replace"))
        if kind == b":":
            return int(rest)
        if kind == b"$":
            return self._bulk(int(rest))
        if kind == b"*":
            return None if rest == b"-1" else [self._parse() for _ in range(int(rest))]
        if kind == b"+":
            return rest
        raise ProtocolError(f"the relay server does not speak the Redis protocol: {bytes(line[:20])!r}")

    def _line(self) -> bytes:
        while (at := self.buffer.find(b"\r\n", self.start, self.end)) < 0:
            self._fill()
        line = bytes(self.view[self.start : at])
        self.start = at + 2
        return line

    def _bulk(self, n_bytes: int) -> bytes | None:
        if n_bytes < 0:
            return None
        if n_bytes > BUFFER_BYTES // 2:
            raise ProtocolError(f"the relay server answers a small question with {n_bytes} bytes")
        while self.end - self.start < n_bytes + 2:
            self._fill()
        data = bytes(self.view[self.start : self.start + n_bytes])
        self.start += n_bytes + 2
        return data

    def _fill(self) -> None:
        if self.start == self.end:
            self.start = self.end = 0
        elif self.end == BUFFER_BYTES:
            self.compact()
        count = self.sock.recv_into(self.view[self.end :])
        if count == 0:
            raise ConnectionResetError("the relay server closed the connection")
        self.end += count

    def compact(self) -> None:
        """Move the unread bytes to the front of the buffer."""
        rest = bytes(self.view[self.start : self.end])
        if len(rest) == BUFFER_BYTES:
            raise ProtocolError("the relay server answers with a line that has no end")
        self.view[: len(rest)] = rest
        self.start, self.end = 0, len(rest)


def gave_up(doing: str, error: Exception) -> Unavailable:
    return Unavailable(f"{doing}: the relay server does not answer: {error}", hint="is the relay server running?")
