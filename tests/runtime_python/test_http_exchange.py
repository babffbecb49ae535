"""Answers of an HTTP server in an image, whole and in parts: real sockets, and a server that writes what a test says."""

from __future__ import annotations

import base64
import json
import socket
import struct
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from relay.clients.http11 import Connection
from relay.protocol import messages
from relay.protocol.messages import RunFailed, RunFinished, RunHead, RunPart
from thaw_runtime.action.image_port import Port

WAIT_S = 20.0
GET = {"__ow_method": "get", "__ow_path": "/events", "__ow_headers": {"host": "me.example"}}
WANTS_PARTS = "application/x-thaw-stream;whole=1000"


class Server:
    """The image's program: a test takes its connections, and writes to them."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.settimeout(WAIT_S)
        self._taken: list[socket.socket] = []
        self.port: int = self._listener.getsockname()[1]

    def take(self) -> socket.socket:
        """The next connection with a request on it; those that only asked whether anybody listens are passed over."""
        while True:
            sock, _ = self._listener.accept()
            sock.settimeout(WAIT_S)
            data = b""
            while b"\r\n\r\n" not in data and (got := sock.recv(65536)):
                data += got
            if data:
                self._taken.append(sock)
                return sock
            sock.close()

    def die(self, sock: socket.socket) -> None:
        self._listener.close()
        sock.close()

    def close(self) -> None:
        for sock in (self._listener, *self._taken):
            sock.close()


class Caller:
    """The invoker's side of one run."""

    def __init__(self, path: str, accept: str = WANTS_PARTS, value: Any = GET) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(WAIT_S)
        self.sock.connect(path)
        self._connection = Connection(self.sock)
        self._connection.send("POST", "/run", f"Accept: {accept}\r\n", json.dumps({"value": value}).encode())

    def head(self) -> int:
        self._connection.read_head()
        return self._connection.status

    @property
    def is_chunked(self) -> bool:
        return self._connection.is_chunked

    def message(self) -> Any:
        """The next message, read as a gateway reads it."""
        (n_bytes,) = struct.unpack("<I", self._connection.read(4))
        return messages.from_plain(json.loads(self._connection.read(n_bytes)))

    def rest(self) -> bytes:
        return self._connection.read_rest()

    def close(self) -> None:
        self._connection.close()


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    yield made
    made.close()


@pytest.fixture
def caller(port: str) -> Iterator[Caller]:
    made = Caller(port)
    yield made
    made.close()


@pytest.fixture
def port(server: Server) -> Iterator[str]:
    """The path of the socket of an image that was initialised."""
    with tempfile.TemporaryDirectory(dir="/tmp") as directory:
        path = str(Path(directory) / "s")
        made = Port(path, server.port)
        threading.Thread(target=made.serve_forever, daemon=True).start()
        sock = socket.socket(socket.AF_UNIX)
        sock.connect(path)
        init = Connection(sock)
        init.send("POST", "/init", "", b'{"value": {"http": true}}')
        init.read_head()
        assert (init.status, init.read_rest()) == (200, b'{"ok": true}')
        init.close()
        yield path
        made.shutdown()
        made.server_close()


def part(text: bytes) -> RunPart:
    return RunPart(base64.b64encode(text).decode())


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def test_events_arrive_one_by_one_and_then_the_end(server: Server, caller: Caller) -> None:
    sock = server.take()
    sock.sendall(
        b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nX-Twice: a\r\nX-Twice: b\r\n"
        b"Transfer-Encoding: chunked\r\n\r\n"
    )
    assert caller.head() == 200
    assert caller.is_chunked
    headers: dict[str, str | list[str]] = {"content-type": "text/event-stream", "x-twice": ["a", "b"]}
    assert caller.message() == RunHead(200, headers, None)
    for text in (b"data: 1\n\n", b"data: 2\n\n"):  # the second is written when the first has come
        sock.sendall(chunk(text))
        assert caller.message() == part(text)
    sock.sendall(b"0\r\n\r\n")
    assert caller.message() == RunFinished("stop", 0, 0)
    assert caller.rest() == b""


def test_a_short_answer_of_known_length_is_whole(server: Server, caller: Caller) -> None:
    server.take().sendall(b"HTTP/1.1 201 Created\r\nContent-Type: text/plain\r\nContent-Length: 2\r\n\r\nhi")
    assert caller.head() == 200
    assert not caller.is_chunked
    assert json.loads(caller.rest()) == {"statusCode": 201, "headers": {"content-type": "text/plain"}, "body": "hi"}


def test_a_body_whose_result_is_too_long_comes_in_parts_with_its_length(server: Server, caller: Caller) -> None:
    body = bytes(range(256)) * 3  # in base64 it has 1,024 bytes
    server.take().sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 768\r\n\r\n" + body)
    assert caller.head() == 200
    assert caller.message() == RunHead(200, {}, 768)
    assert caller.message() == part(body)
    assert caller.message() == RunFinished("stop", 0, 0)


def test_a_caller_that_takes_no_parts_and_a_run_that_is_no_web_request_get_all_of_it(server: Server, port: str) -> None:
    answer = b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nTransfer-Encoding: chunked\r\n\r\n" + chunk(b"hi")
    for accept, value, result in (
        ("*/*", GET, {"statusCode": 200, "headers": {"content-type": "text/plain"}, "body": "hi"}),
        (WANTS_PARTS, {"a": 1}, {"body": "hi"}),
    ):
        caller = Caller(port, accept, value)
        server.take().sendall(answer + b"0\r\n\r\n")
        assert caller.head() == 200
        assert json.loads(caller.rest()) == result
        caller.close()


@pytest.mark.parametrize(
    ("head", "sent"),
    [
        (b"Transfer-Encoding: chunked", chunk(b"half")),
        (b"Transfer-Encoding: chunked", b"8\r\nhalf"),
        (b"Content-Length: 2000", b"half"),
        (b"X-No-Length: 1", b"half"),
    ],
)
def test_a_server_that_dies_in_the_middle_is_told_apart_from_the_end(
    server: Server, caller: Caller, head: bytes, sent: bytes
) -> None:
    sock = server.take()
    sock.sendall(b"HTTP/1.1 200 OK\r\n" + head + b"\r\n\r\n" + sent)
    assert caller.head() == 200
    assert isinstance(caller.message(), RunHead)
    assert caller.message() == part(b"half")
    server.die(sock)
    failed = caller.message()
    assert isinstance(failed, RunFailed)
    assert failed.error.code == "DeveloperError"
    assert failed.error.message.startswith("The image's server broke off its answer after 4 bytes")


def test_a_body_that_ends_with_its_connection_is_whole_while_the_server_listens(server: Server, caller: Caller) -> None:
    sock = server.take()
    sock.sendall(b"HTTP/1.0 200 OK\r\n\r\nall")
    assert caller.head() == 200
    caller.message()
    assert caller.message() == part(b"all")
    sock.close()
    assert caller.message() == RunFinished("stop", 0, 0)


@pytest.mark.parametrize("begun", [b"", b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"])
def test_a_caller_that_leaves_ends_the_request(server: Server, port: str, begun: bytes) -> None:
    caller = Caller(port)
    sock = server.take()
    sock.sendall(begun)
    if begun:
        assert caller.head() == 200
        caller.message()
    caller.close()
    assert sock.recv(1) == b"", "the server reads the end of its connection"


def test_a_caller_that_does_not_read_stops_the_server(server: Server, caller: Caller) -> None:
    sock = server.take()
    sock.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 1000000000\r\n\r\n")
    sock.settimeout(1.0)
    n_sent = 0
    with pytest.raises(TimeoutError):
        while True:
            n_sent += sock.send(b"x" * 65536)
    assert n_sent < 50_000_000, "what the sockets between them hold, and no more"
