"""HTTP/1.1 between the platform's own processes: the client of a kept-alive connection, and a handler for servers.

The standard library's client and handler write a head and its body separately, so the peer wakes twice.  They read a
head with the mail parser, which costs more than anything else in a warm request.  Here a message is one write, and
relay/protocol/http1.py reads the peer's messages.  A body has a length or comes in chunks; the caller gets plain bytes
in both cases.
"""

from __future__ import annotations

import select
import socket
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from typing import Any, Final, Self

from relay.protocol.http1 import (
    BrokenExchange,
    chunk_size,
    read_answer_head,
    read_line,
    read_request_head,
)

_VANISHED_MS: Final = 10_000


class Connection:
    """One exchange at a time: send(), read_head(), then the body to its end.  Raises OSError, BrokenExchange included.

    The caller sets the timeout of ``sock``.
    """

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self._file = sock.makefile("rb")
        self.status = 0
        self.keep_alive = True
        self.is_chunked = False  # the answer has no announced length
        self._left = 0  # unread bytes of the body, or of its current chunk
        self._chunked = False  # further chunks are to come

    @classmethod
    def connect(cls, host: str, port: int, timeout_s: float) -> Self:
        """Connect to a server.  If the server vanishes without closing, calls raise ETIMEDOUT after _VANISHED_MS."""
        sock = socket.create_connection((host, port), timeout_s)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 5)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 2)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _VANISHED_MS)
        return cls(sock)

    def send(self, method: str, path: str, headers: str, body: bytes) -> None:
        """Send a request.  ``headers`` are whole lines, each with its line end."""
        head = f"{method} {path} HTTP/1.1\r\nHost: thaw\r\n{headers}Content-Length: {len(body)}\r\n\r\n"
        self.sock.sendall(head.encode("latin-1") + body)

    def read_head(self) -> None:
        """Read the head of the answer.  Sets ``status``, ``keep_alive`` and ``is_chunked``."""
        head = read_answer_head(self._file)
        self.status, self.keep_alive = head.status, head.keep_alive
        self.is_chunked = self._chunked = head.n_bytes is None
        self._left = head.n_bytes or 0

    def read(self, n_bytes: int) -> bytes:
        """The next ``n_bytes`` of the body; fewer only at its end."""
        parts = []
        while n_bytes and self._more():
            parts.append(self._some(n_bytes))
            n_bytes -= len(parts[-1])
        return b"".join(parts)

    @property
    def n_left(self) -> int:
        """The number of bytes that were announced and not read: of the body, or of the current chunk."""
        return self._left

    def read_rest(self) -> bytes:
        """The rest of the body.  After this, the connection takes the next exchange."""
        parts = []
        while self._more():
            parts.append(self._some(self._left))
        return b"".join(parts)

    def is_readable(self, timeout_s: float = 0.0) -> bool:
        """Wait at most ``timeout_s``; return whether something came, the end of the connection included.  For use
        between exchanges and before a head.
        """
        poll = select.poll()  # select() cannot take descriptors from 1024 on
        poll.register(self.sock, select.POLLIN)
        return bool(poll.poll(max(0.0, timeout_s) * 1000))

    def close(self) -> None:
        self._file.close()
        self.sock.close()

    def _more(self) -> bool:
        """Return whether the body has more bytes.  If the size of the next chunk is due, wait for it."""
        if self._chunked and not self._left:
            self._next_chunk()
        return self._left > 0

    def _next_chunk(self) -> None:
        self._left = chunk_size(read_line(self._file))
        if self._left == 0:
            self._chunked = False
            if read_line(self._file):
                raise BrokenExchange("something behind the last chunk")

    def _some(self, n_bytes: int) -> bytes:
        n_bytes = min(n_bytes, self._left)
        data = self._file.read(n_bytes)
        if len(data) < n_bytes:
            raise BrokenExchange("the peer closed in the middle of its answer")
        self._left -= n_bytes
        if self._chunked and not self._left and self._file.read(2) != b"\r\n":
            raise BrokenExchange("a chunk without its end")
        return data


class Handler(BaseHTTPRequestHandler):
    """Like its base class, but ``headers`` is a dict with names in lower case, and an answer is one write."""

    protocol_version = "HTTP/1.1"
    raw_requestline: bytes

    def parse_request(self) -> bool:
        """Return False if the request was refused; the connection then ends."""
        self.close_connection = True
        self.requestline = self.command = ""
        self.request_version = self.protocol_version
        try:
            head = read_request_head(self.raw_requestline, self.rfile)
        except BrokenExchange:
            self.send_error(HTTPStatus.BAD_REQUEST)
            return False
        self.command, self.path, self.request_version = head.method, head.target, head.version
        self.headers = head.headers  # type: ignore[assignment]
        self.close_connection = not head.keep_alive
        return True

    def reply(self, status: int, data: bytes, content_type: str = "application/json") -> None:
        """Send an answer.  Raises OSError when the caller has closed the connection."""
        close = "Connection: close\r\n" if self.close_connection else ""
        head = (
            f"HTTP/1.1 {status} {self.responses.get(status, ('',))[0]}\r\nContent-Type: {content_type}\r\n"
            f"Content-Length: {len(data)}\r\n{close}\r\n"
        )
        self.wfile.write(head.encode("latin-1") + data)

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: metrics count the requests, and their sender logs them."""
