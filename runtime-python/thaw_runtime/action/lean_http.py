"""HTTP/1.1 for the proxy of Python functions, whose image holds thaw_runtime and the standard library alone.

All other processes use relay/clients/http11.py and relay/protocol/http1.py.  This reader accepts and refuses the same
requests, and one test gives them to both.  The handler of http.server reads a head with the mail parser, and writes a
head separately from its body, which wakes the peer twice; both cost more than a short function does.
"""

from __future__ import annotations

import re
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from typing import Any, Final

_MAX_LINE: Final = 64 * 1024
_MAX_HEADERS: Final = 100
_LINE: Final = re.compile(rb"[\t -~]*\r\n")
_MAX_DIGITS: Final = 15


class LeanHandler(BaseHTTPRequestHandler):
    """Like its base class, but ``headers`` is a dict with names in lower case, and an answer is one write."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = False  # a unix socket has none
    raw_requestline: bytes

    def parse_request(self) -> bool:
        """Return False if the request was refused; the connection then ends."""
        self.close_connection = True
        self.requestline = self.command = ""
        self.request_version = self.protocol_version
        line = self.raw_requestline
        words = line[:-2].decode("latin-1").split(" ")
        is_request = len(words) == 3 and all(words) and words[2] in ("HTTP/1.1", "HTTP/1.0") and _LINE.fullmatch(line)
        headers = self._read_headers() if is_request else None
        if headers is None:
            self.send_error(HTTPStatus.BAD_REQUEST)
            return False
        self.command, self.path, self.request_version = words
        self.headers = headers  # type: ignore[assignment]
        self.close_connection = words[2] == "HTTP/1.0" or headers.get("connection", "").lower() == "close"
        return True

    def _read_headers(self) -> dict[str, str] | None:
        """Read the headers up to the empty line; None for a request that is refused."""
        headers: dict[str, str] = {}
        readline, is_line = self.rfile.readline, _LINE.fullmatch
        for _ in range(_MAX_HEADERS + 1):
            line = readline(_MAX_LINE + 1)
            if not is_line(line):
                return None
            if line == b"\r\n":
                length = headers.get("content-length", "0")
                has_length = length.isdigit() and len(length) <= _MAX_DIGITS and "transfer-encoding" not in headers
                return headers if has_length else None
            name, colon, value = line.decode("ascii").partition(":")
            if not colon:
                return None
            headers[name.strip().lower()] = value.strip()
        return None

    def reply(self, status: int, data: bytes, content_type: str = "application/json") -> None:
        """Send an answer.  Raises OSError when the caller has closed the connection."""
        close = "Connection: close\r\n" if self.close_connection else ""
        head = (
            f"HTTP/1.1 {status} {self.responses.get(status, ('',))[0]}\r\nContent-Type: {content_type}\r\n"
            f"Content-Length: {len(data)}\r\n{close}\r\n"
        )
        self.wfile.write(head.encode("latin-1") + data)

    def address_string(self) -> str:
        return "unix"

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: the sender logs its requests, and stderr belongs to the function."""
