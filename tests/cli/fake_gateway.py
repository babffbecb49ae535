"""A small real HTTP server that answers as a gateway does, and records its requests."""

from __future__ import annotations

import json
import ssl
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

HERE = "/api/v1/namespaces/_"


@dataclass
class Asked:
    method: str
    path: str
    query: dict[str, str]
    body: Any
    authorization: str


@dataclass
class FakeGateway:
    """``answers`` maps "METHOD path" to (status, body), or to a list of them that are given one after the other.  A body
    of bytes is sent as server-sent events."""

    answers: dict[str, tuple[int, Any] | list[tuple[int, Any]]] = field(default_factory=dict)
    asked: list[Asked] = field(default_factory=list)
    held_until: dict[str, str] = field(default_factory=dict)
    """A request that is answered when another one has come, both as "METHOD path"."""
    tls: ssl.SSLContext | None = None
    _came: threading.Condition = field(default_factory=threading.Condition)

    def __enter__(self) -> FakeGateway:
        gateway = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def _serve(self) -> None:
                parts = urlsplit(self.path)
                length = int(self.headers.get("Content-Length") or 0)
                body = json.loads(self.rfile.read(length)) if length else None
                query = {k: v[0] for k, v in parse_qs(parts.query).items()}
                authorization = self.headers.get("Authorization", "")
                gateway.note(Asked(self.command, parts.path, query, body, authorization))
                missing = (404, {"error": "The requested resource does not exist.", "code": "c1"})
                found = gateway.answers.get(f"{self.command} {parts.path}", missing)
                status, answer = found.pop(0) if isinstance(found, list) else found
                data = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("Content-Type", "text/event-stream" if answer is data else "application/json")
                self.send_header("Content-Length", str(len(data)))
                self.send_header("X-Openwhisk-Activation-Id", "a" * 32)
                self.end_headers()
                self.wfile.write(data)

            do_GET = do_PUT = do_POST = do_DELETE = _serve

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        if self.tls is not None:
            self._server.socket = self.tls.wrap_socket(self._server.socket, server_side=True)
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05})
        self._thread.start()
        return self

    def note(self, asked: Asked) -> None:
        until = self.held_until.get(f"{asked.method} {asked.path}")
        with self._came:
            self.asked.append(asked)
            self._came.notify_all()
            if until is not None:
                assert self._came.wait_for(lambda: any(f"{a.method} {a.path}" == until for a in self.asked), 60)

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    @property
    def url(self) -> str:
        return f"http{'s' if self.tls else ''}://127.0.0.1:{self._server.server_address[1]}"
