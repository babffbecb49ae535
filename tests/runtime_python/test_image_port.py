"""The socket of an image of a user's own: real sockets, and programs that keep the contract or do not."""

from __future__ import annotations

import base64
import json
import tempfile
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from relay.clients.http_unix import UnixConnection
from tests.conftest import free_port
from thaw_runtime.action import image_port
from thaw_runtime.action.http_server import request_of
from thaw_runtime.action.image_port import Port

Answer = tuple[int, bytes]


class Image(BaseHTTPRequestHandler):
    """A program that gives the answers of the test."""

    protocol_version = "HTTP/1.1"
    answers: dict[str, Answer]

    def do_POST(self) -> None:
        body = self._body()
        status, answer = self.answers[self.path]
        self._answer(status, answer or body)

    def do_PATCH(self) -> None:
        """An HTTP server of its own: the request comes back as it was read."""
        said = {"line": self.requestline, "headers": dict(self.headers.items()), "body": self._body().hex()}
        twice = ("X-Twice", "a"), ("X-Twice", "b")
        self._answer(418, json.dumps(said).encode(), *twice, ("Content-Type", "application/json"))

    def _body(self) -> bytes:
        return self.rfile.read(int(self.headers["Content-Length"]))

    def _answer(self, status: int, answer: bytes, *headers: tuple[str, str]) -> None:
        self.send_response(status)
        for name, value in (*headers, ("Content-Length", str(len(answer)))):
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, format: str, *args: Any) -> None:
        pass


class Front:
    def __init__(self, path: str) -> None:
        self.path = path

    def __call__(self, method: str, path: str, value: object = None) -> tuple[int, Any]:
        connection = UnixConnection(self.path, 20.0)
        try:
            connection.request(method, path, json.dumps(value).encode() if method == "POST" else None)
            response = connection.getresponse()
            return response.status, json.loads(response.read())
        finally:
            connection.close()


@pytest.fixture
def open_port() -> Iterator[Callable[[dict[str, Answer] | None], Front]]:
    servers: list[Any] = []
    with tempfile.TemporaryDirectory(dir="/tmp") as directory:

        def opened(answers: dict[str, Answer] | None) -> Front:
            number = free_port()
            if answers is not None:
                image = ThreadingHTTPServer(("127.0.0.1", number), type("One", (Image,), {"answers": answers}))
                image.daemon_threads = True
                servers.append(image)
            path = str(Path(directory) / "s")
            servers.append(Port(path, number))
            for server in servers:
                threading.Thread(target=server.serve_forever, daemon=True).start()
            return Front(path)

        yield opened
        for server in servers:
            server.shutdown()
            server.server_close()


OpenPort = Callable[[dict[str, Answer] | None], Front]


def test_init_and_runs_reach_the_image_and_its_answers_come_back(open_port: OpenPort) -> None:
    ask = open_port({"/init": (200, b'{"ok":true}'), "/run": (200, b"")})
    assert ask("POST", "/run", {"value": {}})[0] == 500
    assert ask("POST", "/init", {"value": {"code": ""}}) == (200, {"ok": True})
    assert ask("GET", "/health") == (200, {"state": "ready", "inflight": 0})
    sent = {"value": {"a": 1}, "activation_id": "x"}
    assert ask("POST", "/run", sent) == (200, sent)
    assert ask("POST", "/init", {"value": {}})[0] == 403


@pytest.mark.parametrize(
    ("init", "said"),
    [
        ((502, b'{"error": "no such program"}'), "The image answered /init with status 502: no such program"),
        ((404, b"<html>"), "The image answered /init with status 404: <html>"),
    ],
)
def test_an_init_that_fails_says_what_the_image_said(init: Answer, said: str, open_port: OpenPort) -> None:
    ask = open_port({"/init": init})
    status, plain = ask("POST", "/init", {"value": {}})
    assert (status, plain["error"], plain["info"]["code"]) == (502, said, "InitFailed")
    assert ask("GET", "/health")[1]["state"] == "failed"


@pytest.mark.parametrize(
    ("run", "said"),
    [
        ((200, b"text"), "The image answered /run with status 200 and no JSON: text"),
        ((200, b"3"), "The action did not return a dictionary or array."),
        ((400, b'{"error": "so"}'), "so"),
        ((500, b"{}"), "The image answered /run with status 500."),
        ((200, b"[" * 200_000), "The image answered /run with status 200 and no JSON: [[["),
        ((200, b" " * (1 << 26) + b"{}"), "The image's answer to /run has more than"),
    ],
)
def test_a_run_that_breaks_the_contract_is_a_developer_error(run: Answer, said: str, open_port: OpenPort) -> None:
    ask = open_port({"/init": (200, b"{}"), "/run": run})
    assert ask("POST", "/init", {"value": {}})[0] == 200
    status, plain = ask("POST", "/run", {"value": {}})
    assert status == 502
    assert plain["error"].startswith(said)


def test_an_image_that_does_not_listen_is_told_so(open_port: OpenPort, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image_port, "LISTENS_S", 0.2)
    status, plain = open_port(None)("POST", "/init", {"value": {}})
    assert status == 502
    assert plain["error"].startswith("Nothing in the image listens on port ")


def test_a_server_gets_web_requests_as_they_are_and_its_answer_goes_back(open_port: OpenPort) -> None:
    ask = open_port({"/": (200, b"")})
    assert ask("POST", "/init", {"value": {"http": True}}) == (200, {"ok": True})
    sent = {
        "__ow_method": "patch",
        "__ow_path": "/a/%20b",
        "__ow_query": "q=1&q=2",
        "__ow_headers": {"content-type": "image/png", "host": "me.example", "x-own": "1", "connection": "x", "te": "y"},
        "__ow_body": base64.b64encode(b"\0\xff").decode(),
    }
    status, plain = ask("POST", "/run", {"value": sent})
    assert (status, plain["statusCode"]) == (200, 418)
    assert plain["headers"]["x-twice"] == ["a", "b"]
    said = json.loads(plain["body"])
    assert (said["line"], said["body"]) == ("PATCH /a/%20b?q=1&q=2 HTTP/1.1", "00ff")
    sent_on = {"content-type": "image/png", "host": "me.example", "x-own": "1"}
    assert said["headers"] == {**sent_on, "content-length": "2", "connection": "close"}
    assert ask("POST", "/run", {"value": {"a": 1}}) == (200, {"a": 1})


@pytest.mark.parametrize(
    "changed",
    [
        {"__ow_path": "/a b"},
        {"__ow_path": "/a\r\nX: y"},
        {"__ow_method": "GET /x"},
        {"__ow_query": "a\nb"},
        {"__ow_headers": "x"},
        {"__ow_body": "not base64!"},
        {"__ow_path": "http://elsewhere/"},
    ],
)
def test_what_would_be_another_request_is_not_sent(changed: dict[str, Any], open_port: OpenPort) -> None:
    ask = open_port({})
    assert ask("POST", "/init", {"value": {"http": True}})[0] == 200
    status, plain = ask("POST", "/run", {"value": {"__ow_method": "patch", "__ow_path": "/", **changed}})
    assert status == 502
    assert plain["error"].startswith("The arguments are no request for the image's server")


def test_a_header_that_would_end_its_line_is_left_out() -> None:
    request = request_of({"__ow_method": "get", "__ow_headers": {"a": "1\r\nb: 2", "c d": "x", "e": "y"}})
    assert request.headers == {"e": "y"}
