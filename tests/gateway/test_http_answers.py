"""Web requests to an HTTP server in an image: a real gateway over real sockets, and a host that answers as a test says."""

from __future__ import annotations

import base64
import queue
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from relay.protocol.messages import RunFailed, RunFinished, RunHead, RunPart
from relay.state.records import Records
from tests.conftest import ValkeyServer
from tests.gateway.calls import action_of
from tests.gateway.conftest import GatewayProcess
from tests.security.slow import connect, module_gateway, read_to_end
from thaw.action import HTTP_SERVER, KIND_PYTHON, Exec, Limits
from thaw.errors import DeveloperError

PATH = "/api/v1/web/guest/default/server"
EVENTS = RunHead(200, {"content-type": "text/event-stream", "set-cookie": ["a=1", "b=2"]})
END = RunFinished("stop", 0, 0)
WAIT_S = 20.0
LEFT = "The client closed the connection"


@pytest.fixture(scope="module")
def gateway(_shared_valkey: ValkeyServer) -> Iterator[GatewayProcess]:
    notes = {HTTP_SERVER: True, "web-export": True, "raw-http": True}
    code = Exec(KIND_PYTHON, image="me/server@sha256:" + "a" * 64)
    with module_gateway(_shared_valkey.url, THAW_RESULT_BYTES="2000") as process:
        for name, timeout in (("server", 60_000), ("brief", 1_000), ("lost", 60_000)):
            limits = Limits(timeout=timeout, concurrency=8)
            action = action_of(f"guest/{name}", exec=code, limits=limits, annotations=notes)
            Records(process.invoker.client).put_action(action, last=None)
        process.serve("server", "brief", "lost")
        yield process


class Server:
    """The server in the image: a test says its messages one by one.  None loses the container."""

    def __init__(self) -> None:
        self.said: queue.Queue[Any] = queue.Queue()

    def say(self, *messages: Any) -> None:
        for message in messages:
            self.said.put(message)

    def answer(self) -> Iterator[Any]:
        while (message := self.said.get(timeout=WAIT_S)) is not None:
            yield message


@pytest.fixture
def server(gateway: GatewayProcess) -> Iterator[Server]:
    made = Server()
    gateway.invoker.server = made.answer
    yield made
    gateway.invoker.server = None


def part(data: bytes) -> RunPart:
    return RunPart(base64.b64encode(data).decode())


def ask(gateway: GatewayProcess, path: str = PATH, version: str = "1.1") -> socket.socket:
    sock = connect(gateway)
    sock.sendall(f"GET {path} HTTP/{version}\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
    return sock


def read_until(sock: socket.socket, end: bytes) -> bytes:
    data = b""
    while not data.endswith(end):
        got = sock.recv(65536)
        assert got, data
        data += got
    return data


def record_of(gateway: GatewayProcess, head: bytes) -> dict[str, Any]:
    """The record of the call whose answer begins with this head."""
    lines = head.decode().lower().split("\r\n")
    prefix = "x-openwhisk-activation-id: "
    return gateway.record(next(line.removeprefix(prefix) for line in lines if line.startswith(prefix)))


def test_each_part_reaches_the_client_before_the_next_is_made(gateway: GatewayProcess, server: Server) -> None:
    with ask(gateway) as sock:
        server.say(EVENTS)
        head = read_until(sock, b"\r\n\r\n").removesuffix(b"\r\n\r\n")
        server.say(part(b"data: 1\n\n"))
        assert read_until(sock, b"\n\r\n") == b"9\r\ndata: 1\n\n\r\n"
        server.say(part(b"data: 2\n\n"), END)
        assert read_to_end(sock) == b"9\r\ndata: 2\n\n\r\n0\r\n\r\n"
    lines = head.decode().split("\r\n")
    assert lines[0] == "HTTP/1.1 200 OK"
    told = [line for line in lines if line.lower().startswith(("content-type", "set-cookie", "content-length"))]
    assert told == ["content-type: text/event-stream", "set-cookie: a=1", "set-cookie: b=2"]
    record = record_of(gateway, head)
    assert record["response"]["status"] == "success"
    headers = {"content-type": "text/event-stream", "set-cookie": ["a=1", "b=2"]}
    assert record["response"]["result"] == {"statusCode": 200, "headers": headers, "bodyBytes": 18}


def test_an_answer_of_known_length_has_it_and_is_longer_than_a_result(gateway: GatewayProcess, server: Server) -> None:
    with ask(gateway) as sock:
        server.say(RunHead(206, {"content-type": "image/png"}, 6000), *[part(b"x" * 1000)] * 6, END)
        head, _, body = read_to_end(sock).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 206 ")
    assert b"content-length: 6000" in head.lower()
    assert body == b"x" * 6000


def test_a_whole_answer_is_as_every_web_actions(gateway: GatewayProcess) -> None:
    headers = {"content-type": "text/plain"}
    gateway.invoker.function = lambda value: (200, {"statusCode": 201, "headers": headers, "body": value["__ow_path"]})
    reply = gateway.call("GET", f"{PATH}/any/path")
    assert (reply.status_code, reply.text) == (201, "/any/path")
    assert (reply.headers["Content-Type"], reply.headers["Content-Length"]) == ("text/plain; charset=UTF-8", "9")
    result = {"statusCode": 201, "headers": headers, "body": "/any/path"}
    assert gateway.record(reply)["response"]["result"] == result
    gateway.invoker.function = lambda value: (502, {"error": "it does not listen"})
    reply = gateway.call("GET", PATH)
    assert (reply.status_code, reply.json()["error"]) == (400, "There was an error processing your request.")
    assert gateway.record(reply)["response"]["result"] == {"error": "it does not listen"}
    assert gateway.call("GET", f"{PATH}.json").status_code == 400, "other extensions take results, and this is none"


BROKEN = RunFailed(DeveloperError("The image's server broke off its answer after 4 bytes.").info())


@pytest.mark.parametrize(
    ("name", "ending", "error"),
    [
        ("server", BROKEN, "The image's server broke off its answer after 4 bytes."),
        ("lost", None, "the connection to the container broke"),
    ],
)
def test_an_answer_that_breaks_off_has_no_end(
    gateway: GatewayProcess, server: Server, name: str, ending: RunFailed | None, error: str
) -> None:
    with ask(gateway, PATH.replace("server", name)) as sock:
        server.say(EVENTS, part(b"half"), ending)
        head, _, body = read_to_end(sock).partition(b"\r\n\r\n")
    assert body == b"4\r\nhalf\r\n", "the last chunk is missing"
    record = record_of(gateway, head)
    assert record["response"]["success"] is False
    assert record["response"]["result"]["error"].startswith(error)


def test_a_client_of_http_1_0_reads_a_reset_when_an_answer_breaks_off(gateway: GatewayProcess, server: Server) -> None:
    """The end of the connection is the end of its answer, so a plain end would look whole."""
    with ask(gateway, version="1.0") as sock:
        server.say(EVENTS, part(b"half"))
        read_until(sock, b"half")
        server.say(BROKEN)
        with pytest.raises(ConnectionResetError):
            sock.recv(1)
    with ask(gateway, version="1.0") as sock:
        server.say(EVENTS, part(b"all"), END)
        assert read_until(sock, b"all")
        assert sock.recv(1) == b""


def test_a_client_that_leaves_ends_the_run(gateway: GatewayProcess, server: Server) -> None:
    with ask(gateway) as sock:
        server.say(EVENTS, part(b"first"))
        head = read_until(sock, b"first\r\n")
    server.say(*[part(b"x" * 10_000)] * 1000)  # until its connection is cut
    assert gateway.invoker.closed.acquire(timeout=WAIT_S)
    while not server.said.empty():
        server.said.get()
    assert record_of(gateway, head.partition(b"\r\n\r\n")[0])["response"]["result"]["error"].startswith(LEFT)


def test_a_client_that_does_not_read_stops_the_server(gateway: GatewayProcess, server: Server) -> None:
    made = 0

    def endless() -> Iterator[Any]:
        nonlocal made
        yield RunHead(200, {}, 10**9)
        while True:
            made += 1
            yield part(b"x" * 48_000)

    gateway.invoker.server = endless
    with ask(gateway) as sock:
        assert sock.recv(100)
        before, tick = -1, threading.Event()
        while made != before:
            before = made
            tick.wait(0.5)
        assert made < 1000, "what the sockets on the way hold, and no more"
    assert gateway.invoker.closed.acquire(timeout=WAIT_S)


def test_the_time_limit_ends_an_answer_that_goes_on(gateway: GatewayProcess, server: Server) -> None:
    with ask(gateway, PATH.replace("server", "brief")) as sock:
        server.say(EVENTS, part(b"1"))
        head, _, body = read_to_end(sock).partition(b"\r\n\r\n")
    server.say(None)
    assert body == b"1\r\n1\r\n"
    record = record_of(gateway, head)
    assert record["response"]["result"] == {"error": "The action exceeded its time limits of 1000 milliseconds."}
    assert {"key": "timeout", "value": True} in record["annotations"]


@pytest.mark.parametrize("head", [RunHead(1000, {}), RunHead(200, {"a b": "c"}), RunHead(200, {"a": "b\r\nc: d"})])
def test_a_head_that_cannot_be_sent_is_an_error(gateway: GatewayProcess, server: Server, head: RunHead) -> None:
    server.say(head, None)
    reply = gateway.call("GET", PATH)
    assert (reply.status_code, reply.json()["error"]) == (400, "Response is not valid 'message/http'.")
    assert gateway.record(reply)["response"]["status"] == "action developer error"
