"""The port of the scheduler's metrics: ``GET /metrics`` with the installation's token or THAW_METRICS_TOKEN, as at an
invoker's data port.

``GET /health`` needs no token.  Standbys answer too, because it is worth knowing that they stand by.
"""

from __future__ import annotations

import json
import socketserver
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler
from typing import Final

from gateway.scheduler.io import metrics
from thaw.bearer import is_bearer
from thaw.errors import PlatformError
from thaw.process import lasting
from thaw.process.lasting import LastingThread

REFRESH_S: Final = 1.0
_IDLE_S: Final = 30.0


class MetricsPort(socketserver.ThreadingTCPServer):
    """``token`` reads the installation's token.  It is called at most once a second, however often strangers ask.
    ``scrapers`` is the token that an operator has set for scrapers; empty: none."""

    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, bind: str, token: Callable[[], str], scrapers: str = "") -> None:
        """Raises OSError when it cannot listen there."""
        host, _, port = bind.rpartition(":")
        super().__init__((host, int(port)), _Handler)
        self._read_token, self._token, self._read_s = token, "", float("-inf")
        self._scrapers = scrapers
        self._lock = threading.Lock()
        self._thread = LastingThread(self.serve_forever, "metrics")
        self._thread.start()

    @property
    def address(self) -> str:
        host, port = self.server_address[:2]
        return f"{host!s}:{port}"

    def handle_error(self, request: object, client_address: object) -> None:
        """Do nothing: a broken scrape is its client's problem, and a line on stderr might not be written."""

    def lets_in(self, authorization: str) -> bool:
        return self._is(authorization) or (self._refresh() and self._is(authorization))

    def close(self) -> None:
        self.shutdown()
        self.server_close()

    def _is(self, authorization: str) -> bool:
        return is_bearer(authorization, self._token, self._scrapers)

    def _refresh(self) -> bool:
        """Read the token.  Return False when it was read a moment ago, or cannot be read."""
        with self._lock:
            if time.monotonic() - self._read_s < REFRESH_S:
                return False
            self._read_s = time.monotonic()
        try:
            self._token = self._read_token()
        except PlatformError:
            return False
        return True


class _Handler(BaseHTTPRequestHandler):
    server: MetricsPort
    protocol_version = "HTTP/1.1"
    timeout = _IDLE_S

    def do_GET(self) -> None:
        if self.path == "/health":
            status, plain = lasting.health()
            self._answer(status, json.dumps(plain).encode(), "application/json")
        elif not self.server.lets_in(self.headers.get("Authorization", "")):
            self._answer(401, b"a bearer token is needed\n")
        elif self.path != "/metrics":
            self._answer(404, b"only /metrics and /health are here\n")
        else:
            self._answer(200, metrics.page())

    def _answer(self, status: int, body: bytes, content_type: str = "text/plain; version=0.0.4; charset=utf-8") -> None:
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Write nothing: the log is for events, and a scrape is not an event."""
