"""HTTP/1.1 for the proxy of Python functions, whose image holds this package and the standard library and no more: what
relay.clients.http11.Handler is to everybody else.

http.server reads a head with the mail parser and writes it apart from its body, which wakes the peer twice; both cost
more than a short function does.
"""

from __future__ import annotations

from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from typing import Any, Final

_MAX_LINE: Final = 65536
_MAX_HEADERS: Final = 100


class LeanHandler(BaseHTTPRequestHandler):
    """As its base, but ``headers`` is a dict with names in lower case, and an answer is one write."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = False  # a unix socket has none
    raw_requestline: bytes

    def parse_request(self) -> bool:
        """False: the request was refused, and the connection ends."""
        self.close_connection = True
        self.requestline = self.raw_requestline.decode("latin-1").rstrip("\r\n")
        self.command, self.request_version = "", "HTTP/1.1"
        words = self.requestline.split()
        if len(words) != 3 or words[2] not in ("HTTP/1.1", "HTTP/1.0"):
            self.send_error(HTTPStatus.BAD_REQUEST)
            return False
        self.command, self.path, self.request_version = words
        headers: dict[str, str] = {}
        for _ in range(_MAX_HEADERS + 1):
            line = self.rfile.readline(_MAX_LINE + 1)
            if line in (b"\r\n", b"\n"):
                self.headers = headers  # type: ignore[assignment]
                self.close_connection = words[2] == "HTTP/1.0" or headers.get("connection", "").lower() == "close"
                return True
            name, colon, value = line.decode("latin-1").partition(":")
            if not colon or len(line) > _MAX_LINE:
                break
            headers[name.strip().lower()] = value.strip()
        self.send_error(HTTPStatus.BAD_REQUEST)
        return False

    def reply(self, status: int, data: bytes, content_type: str = "application/json") -> None:
        """Raises OSError when the caller has gone."""
        close = "Connection: close\r\n" if self.close_connection else ""
        head = (f"HTTP/1.1 {status} {self.responses.get(status, ('',))[0]}\r\nContent-Type: {content_type}\r\n"
                f"Content-Length: {len(data)}\r\n{close}\r\n")  # fmt: skip
        self.wfile.write(head.encode("latin-1") + data)

    def address_string(self) -> str:
        return "unix"

    def log_message(self, format: str, *args: Any) -> None:
        """Requests are logged by who sends them; stderr is the function's."""
