"""The container's socket for an image of a user's own: POST /init, POST /run, GET /health, passed on to port 8080.

::

    invoker ──unix socket──▶ this process ──TCP, loopback──▶ 127.0.0.1:8080 of the image's program
                             └──────── one network namespace without interfaces ────────┘

It runs in a container of its own beside that of the image, with which it shares the network namespace and nothing else:
the image's program has neither the socket nor a folder of the host.  The error messages are OpenWhisk's where it has
one.
"""

from __future__ import annotations

import http.client
import json
import os
import socketserver
import sys
import threading
import time
from typing import Any, Final

from thaw_runtime.action.child import refusal
from thaw_runtime.action.http_exchange import PART_BYTES, STREAM_HEAD, Exchange, Failed, listens, whole_bytes
from thaw_runtime.action.http_server import NotForServer, Request, request_of, result_of
from thaw_runtime.action.lean_http import LeanHandler
from thaw_runtime.action.proxy import bind_ready
from thaw_runtime.action.wire import MAX_MESSAGE_BYTES
from thaw_runtime.process.signals import exit_on_sigterm

PORT: Final = 8080
"""The port of the image's program, unless the environment names another."""
LISTENS_S: Final = 60.0
"""How long the image's program may take until it listens."""
_PAUSE_S: Final = 0.05
"""The pause between two tries.  The kernel does not notify a process when another one begins to listen."""
INIT_S: Final = 600.0
RUN_S: Final = 3700.0
"""Longer than every time limit of the platform; the invoker ends a run that exceeds its own limit."""
_MOST_QUOTED: Final = 500


class Port(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    daemon_threads = True
    request_queue_size = 128

    def __init__(self, path: str, port: int = PORT) -> None:
        self.port = port
        self.lock = threading.Lock()
        self.state = "new"
        self.is_http = False  # the image is an HTTP server that knows nothing of the contract
        self.inflight = 0
        super().__init__(path, Handler, bind_and_activate=False)
        bind_ready(self, path)


class Handler(LeanHandler):
    server: Port

    def do_GET(self) -> None:
        known = self.path == "/health"
        plain = {"state": self.server.state, "inflight": self.server.inflight} if known else {"error": "not here"}
        self._reply(200 if known else 404, json.dumps(plain).encode())

    def do_POST(self) -> None:
        length = int(self.headers.get("content-length") or 0)
        if length > MAX_MESSAGE_BYTES:
            self.close_connection = True
            self._refuse(413, "TooLarge", f"Request larger than allowed: {length} > {MAX_MESSAGE_BYTES} bytes.")
            return
        body = self.rfile.read(length)
        try:
            if self.path == "/init":
                self._init(body)
            elif self.path == "/run":
                self._run(body)
            else:
                self._refuse(404, "NotFound", f"no {self.path}")
        except Failed as e:
            self._refuse(502, "InitFailed" if self.path == "/init" else "DeveloperError", str(e))
        except OSError:
            self.close_connection = True  # the caller has closed the connection and cannot be told

    def _init(self, body: bytes) -> None:
        with self.server.lock:
            if self.server.state != "new":
                self._refuse(403, "Conflict", "Cannot initialize the action more than once.")
                return
            self.server.state = "starting"
        try:
            self.server.is_http = _wants_http(body)
            _await_listener(self.server.port)
            if self.server.is_http:
                self.server.state = "ready"
                self._reply(200, b'{"ok": true}')
                return
            status, answer = _asked(self.server.port, "/init", body, INIT_S)
            if not 200 <= status < 300:
                raise Failed(f"The image answered /init with status {status}: {_quoted(answer)}")
        except Failed:
            self.server.state = "failed"
            raise
        self.server.state = "ready"
        self._reply(200, b'{"ok": true}')

    def _run(self, body: bytes) -> None:
        if self.server.state != "ready":
            self._refuse(500, "PlatformError", "no action defined yet")
            return
        self._count(1)
        try:
            if self.server.is_http:
                self._serve(_request(body))
                return
            status, answer = _asked(self.server.port, "/run", body, RUN_S)
        finally:
            self._count(-1)
        try:
            plain = json.loads(answer)
        except (ValueError, RecursionError):
            raise Failed(f"The image answered /run with status {status} and no JSON: {_quoted(answer)}") from None
        is_answer = isinstance(plain, dict | list)
        if status == 200 and not is_answer:
            raise Failed("The action did not return a dictionary or array.")
        if status == 200:
            self._reply(200, answer)
            return
        named = plain.get("error") if isinstance(plain, dict) else None
        raise Failed(named if isinstance(named, str) else f"The image answered /run with status {status}.")

    def _serve(self, request: Request) -> None:
        """Answer with the answer of the image's server: in parts if the caller takes them and it is long, or of a
        length that nobody knows yet.  Raises Failed, and OSError when the caller is gone."""
        exchange = Exchange(self.server.port, request, self.connection, RUN_S)
        try:
            parts = exchange.parts()
            most = whole_bytes(self.headers.get("accept") or "") if request.is_web else None
            if most is None or (exchange.n_bytes is not None and exchange.n_bytes <= most):
                body = exchange.whole(MAX_MESSAGE_BYTES)
                result = json.dumps(result_of(request, exchange.status, exchange.headers, body)).encode()
                if most is None or len(result) <= most:
                    self.reply(200, result)
                    return
                parts = (body[i : i + PART_BYTES] for i in range(0, len(body), PART_BYTES))
            self.wfile.write(STREAM_HEAD)
            for chunk in exchange.chunks(parts):
                self.wfile.write(chunk)
        finally:
            exchange.close()

    def _refuse(self, status: int, code: str, error: str) -> None:
        self._reply(status, json.dumps(refusal(code, error)).encode())

    def _count(self, n: int) -> None:
        with self.server.lock:
            self.server.inflight += n

    def _reply(self, status: int, data: bytes) -> None:
        try:
            self.reply(status, data)
        except OSError:
            self.close_connection = True  # the caller has closed the connection and cannot be told


def _await_listener(port: int) -> None:
    ends_s = time.monotonic() + LISTENS_S
    while not listens(port):
        if time.monotonic() > ends_s:
            raise Failed(
                f"Nothing in the image listens on port {port}, {LISTENS_S:g} s after its start: images of kind "
                f"blackbox answer POST /init and POST /run there."
            )
        time.sleep(_PAUSE_S)


def _wants_http(body: bytes) -> bool:
    try:
        return bool(json.loads(body)["value"].get("http"))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return False


def _request(body: bytes) -> Request:
    """The request to the image's server that a run stands for.  Raises Failed."""
    try:
        return request_of(json.loads(body).get("value") or {})
    except (ValueError, AttributeError, NotForServer) as e:
        raise Failed(f"The arguments are no request for the image's server: {e}") from e


def _asked(port: int, path: str, body: bytes, deadline_s: float) -> tuple[int, bytes]:
    """Send one request and return its whole answer.  Raises Failed."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=deadline_s)
    try:
        connection.request("POST", path, body, {"Content-Type": "application/json", "Connection": "close"})
        response = connection.getresponse()
        answer = response.read(MAX_MESSAGE_BYTES + 1)
        if len(answer) > MAX_MESSAGE_BYTES:
            raise Failed(f"The image's answer to {path} has more than {MAX_MESSAGE_BYTES} bytes.")
        return response.status, answer
    except (OSError, http.client.HTTPException) as e:
        said = f"{type(e).__name__} {e}"[:_MOST_QUOTED]
        raise Failed(f"The image gave no answer to {path} that can be read: {said}") from e
    finally:
        connection.close()


def _quoted(answer: bytes) -> str:
    try:
        plain: Any = json.loads(answer)
        named = plain.get("error") if isinstance(plain, dict) else None
    except (ValueError, RecursionError):
        named = None
    return (named if isinstance(named, str) else answer.decode("utf-8", "replace"))[:_MOST_QUOTED] or "nothing"


def main() -> None:
    exit_on_sigterm()
    server = Port(os.environ["THAW_SOCKET"], int(os.environ.get("PORT", PORT)))
    sys.stdout.flush()
    server.serve_forever(poll_interval=3600)


if __name__ == "__main__":
    main()
