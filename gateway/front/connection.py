"""One connection: its state, and the way an answer takes to its client.

The socket never blocks.  A whole answer that the client does not take at once is left to the worker's selector, so its
thread is free.  A stream is written by its thread, which gives up when the client reads nothing for too long.
"""

from __future__ import annotations

import enum
import errno
import ipaddress
import json
import select
import socket
import struct
import time
from http import HTTPStatus
from typing import Final, Protocol

from gateway.front.request import RequestReader
from gateway.front.visit import Visit
from gateway.processor import waiting
from thaw.ids import Namespace

CONTINUE: Final = b"HTTP/1.1 100 Continue\r\n\r\n"
_JOINED_BYTES: Final = 64 * 1024
"""Up to this length a body is copied behind its head, so that both are one write and one packet."""


class State(enum.Enum):
    IDLE = "waits for the first byte of a request"
    READING = "reads a request"
    CHECKING = "a thread checks the key of a request with a long body"
    LINED_UP = "waits for memory for the body"
    QUEUED = "waits for a thread"
    RUNNING = "a thread answers"
    WRITING = "waits for the client to read the answer"
    ENDING = "waits for the client to close"


class Line(Protocol):
    """A line of connections in which this one may wait (turns.py)."""

    def leave(self, connection: Connection) -> None: ...


class Connection:
    __slots__ = (
        "address",
        "began_s",
        "client",
        "deadline_s",
        "due_s",
        "is_closed",
        "keep",
        "namespace",
        "out",
        "request",
        "reserved",
        "rest",
        "server",
        "since_s",
        "sock",
        "state",
        "turns",
        "visit",
        "wants",
        "watched",
    )

    def __init__(self, sock: socket.socket, client: object, server: object, answer_s: float) -> None:
        self.sock, self.client, self.server = sock, client, server
        self.address = address_of(client)
        self.out = Out(sock, answer_s)
        self.state = State.IDLE
        self.request: RequestReader | None = None
        self.visit = Visit()
        self.rest = b""
        """The bytes that the client has sent behind its last request."""
        self.reserved: tuple[Namespace, int] | None = None
        """The memory that the request's body has."""
        self.wants = 0
        """How much more memory the body needs."""
        self.namespace: Namespace | None = None
        """The namespace of the last valid key that a request on this connection had."""
        self.turns: Line | None = None
        """The line in which it waits for a thread."""
        self.keep = False
        """The connection stays when its answer is written."""
        self.began_s = self.since_s = 0.0
        """When the body or the end began, and when the state did."""
        self.deadline_s = self.due_s = float("inf")
        self.watched = 0
        """The events that the selector waits for."""
        self.is_closed = False

    def refuse(self, status: int, message: str) -> None:
        """Answer without the application, as far as the client takes it at once."""
        self.send(plain_answer(status, message))

    def send(self, data: bytes) -> None:
        """Send as much as the client takes at once.  A client that has gone is noticed by the next read."""
        try:
            self.sock.send(data)
        except OSError:
            pass

    def close(self) -> None:
        self.is_closed = True
        if self.out.left is not None or self.out.is_broken:
            reset_at_close(self.sock)
        self.request = None
        self.rest = b""
        self.sock.close()
        self.out.drop()


def address_of(client: object) -> str:
    """The IP address; of IPv6 the /64, which is what one customer gets (RFC 6177).  Empty for a unix socket."""
    if not isinstance(client, tuple):
        return ""
    text = str(client[0]).partition("%")[0]
    if ":" not in text:
        return text
    address = ipaddress.IPv6Address(text)
    return str(address.ipv4_mapped or ipaddress.IPv6Network((address, 64), strict=False))


def whole_bytes(left: memoryview) -> int:
    """How much memory the view keeps: a part keeps the whole."""
    whole = left.obj
    return len(whole) if isinstance(whole, bytes) else len(left)


def plain_answer(status: int, message: str) -> bytes:
    body = json.dumps({"error": message}).encode()
    head = (
        f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\nConnection: close\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


class More(Protocol):
    def go_on(self) -> bool: ...

    def close(self) -> None: ...


class Out:
    """The object that gunicorn's Response uses as its socket.  Its first write is the head, which waits for the
    body."""

    def __init__(self, sock: socket.socket | None, answer_s: float) -> None:
        """Without a socket everything is left to the worker."""
        self._sock, self._answer_s = sock, answer_s
        self._head = b""
        self._begun = self._leaves = False
        self.is_broken = False
        """The answer broke off, and its client would take the end of the connection for its end."""
        self.left: memoryview | None = None
        """The part of a whole answer that the client has not taken."""
        self.more: More | None = None
        """It makes the rest of the answer, when the client has taken that part."""
        self.began_s = 0.0
        """The first time at which the client did not take all bytes at once; 0: there was none."""
        self.n_read = 0
        """The bytes that the client has taken since then."""

    def begin(self, *, leaves: bool) -> None:
        """``leaves``: the worker's selector writes what the client does not take at once."""
        self._begun, self._leaves, self._head, self.left, self.more = False, leaves, b"", None, None
        self.began_s, self.n_read = 0.0, 0

    def drop(self) -> None:
        """Nobody will read the rest."""
        more, self.left, self.more = self.more, None, None
        if more is not None:
            more.close()

    def sendall(self, data: bytes) -> None:
        """Raises OSError when the client is gone or, in a stream, reads nothing."""
        if not self._begun:
            self._begun, self._head = True, data
            return
        if self._head:
            head, self._head = self._head, b""
            if len(data) <= _JOINED_BYTES:
                data = head + data
            else:
                self._write(head)
        self._write(data)

    def refuse(self, status: int, message: str) -> None:
        self.begin(leaves=True)
        self._write(plain_answer(status, message))

    def flush(self) -> None:
        """Write a head that no body followed.  Raises OSError."""
        if self._head:
            self.sendall(b"")

    def _write(self, data: bytes) -> None:
        if self.left is not None:
            self.left = memoryview(b"".join((self.left, data)))
            return
        sent = self._send(data)
        if sent == len(data):
            return
        rest = memoryview(data)[sent:]
        if self._leaves or self._sock is None:
            self.left = rest
        else:
            self._press(rest)

    def _press(self, rest: memoryview) -> None:
        assert self._sock is not None  # noqa: S101  else all of it was left
        poll = select.poll()
        poll.register(self._sock, select.POLLOUT)
        deadline_s = time.monotonic() + self._answer_s
        while rest:
            with waiting():
                takes_more = poll.poll(max(0.0, deadline_s - time.monotonic()) * 1000)
            if not takes_more:
                reset_at_close(self._sock)
                raise BrokenPipeError(errno.EPIPE, "the client does not read")
            sent = self._send(rest)
            if sent:
                rest, deadline_s = rest[sent:], time.monotonic() + self._answer_s

    def _send(self, data: bytes | memoryview) -> int:
        if self._sock is None:
            return 0
        try:
            sent = self._sock.send(data)
        except BlockingIOError:
            return 0
        self.n_read += sent
        return sent


def reset_at_close(sock: socket.socket) -> None:
    """Reset the connection: otherwise the kernel would keep its part of the answer, and offer it to the client for
    minutes."""
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    except OSError:
        pass  # closed already
