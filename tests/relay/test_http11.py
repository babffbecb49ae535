"""HTTP/1.1 between Thaw's own processes: every cut, every false value, and the state of a kept connection afterwards."""

from __future__ import annotations

import http.client
import socket
import socketserver
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager

import pytest

from relay.clients.http11 import Connection, Handler
from relay.protocol.http1 import BrokenExchange
from thaw_runtime.action.lean_http import LeanHandler

LENGTH = b"HTTP/1.1 200 All Is Well\r\nContent-Type: text/plain\r\nCONTENT-LENGTH: 11\r\n\r\nhello world"
CHUNKS = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n6\r\n world\r\n0\r\n\r\n"
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
WAIT_S = 10.0


@pytest.fixture
def ends() -> Iterator[tuple[Connection, socket.socket]]:
    ours, theirs = socket.socketpair()
    ours.settimeout(WAIT_S)
    with closing(Connection(ours)) as connection, theirs:
        yield connection, theirs


@contextmanager
def answered(data: bytes) -> Iterator[Connection]:
    ours, theirs = socket.socketpair()
    theirs.sendall(data)
    theirs.close()
    ours.settimeout(WAIT_S)
    with closing(Connection(ours)) as connection:
        yield connection


@pytest.mark.parametrize("answer", [LENGTH, CHUNKS])
def test_an_answer_is_read_in_any_pieces_and_another_may_follow(
    ends: tuple[Connection, socket.socket], answer: bytes
) -> None:
    connection, peer = ends
    for n_bytes in (1, 4, 5, 11, 100):
        peer.sendall(answer)
        connection.read_head()
        assert (connection.status, connection.keep_alive) == (200, True)
        parts = []
        while data := connection.read(n_bytes):
            parts.append(data)
        assert all(len(p) == n_bytes for p in parts[:-1])
        assert b"".join(parts) == b"hello world"
        assert connection.read_rest() == b""
        assert not connection.is_readable()


@pytest.mark.parametrize("answer", [LENGTH, CHUNKS])
def test_a_token_is_there_before_the_next_chunk_is(ends: tuple[Connection, socket.socket], answer: bytes) -> None:
    connection, peer = ends
    cut = answer.index(b"hello") + len(b"hello") + (2 if answer is CHUNKS else 0)
    peer.sendall(answer[:cut])
    connection.read_head()
    assert connection.read(5) == b"hello"
    peer.sendall(answer[cut:])
    assert connection.read_rest() == b" world"


@pytest.mark.parametrize("answer", [LENGTH, CHUNKS])
def test_an_answer_that_is_cut_anywhere_is_never_taken_for_whole(answer: bytes) -> None:
    for cut in range(len(answer)):
        with answered(answer[:cut]) as connection, pytest.raises(BrokenExchange):
            connection.read_head()
            connection.read_rest()


@pytest.mark.parametrize(
    "answer",
    [
        b"SSH-2.0-x\r\n\r\n",
        b"HTTP/1.1 abc\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nno colon\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n" + b"a: b\r\n" * 101 + b"Content-Length: 0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\na: " + b"x" * 70_000 + b"\r\nContent-Length: 0\r\n\r\n",
        *(
            CHUNKED + body
            for body in (b"-5\r\nhello\r\n0\r\n\r\n", b"0x5\r\nhello\r\n0\r\n\r\n", b"4\r\nhello\r\n0\r\n\r\n")
        ),
        *(CHUNKED + body for body in (b"\r\n", b"5;x=y\r\nhello\r\n0\r\n\r\n", b"0\r\nT: v\r\n\r\n", b"0\r\n\n")),
        b"HTTP/1.1 200 OK\nContent-Length: 0\n\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 0\xa0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: " + b"1" * 5000 + b"\r\n\r\n",
    ],
)
def test_what_is_no_answer_is_refused(answer: bytes) -> None:
    with answered(answer) as connection, pytest.raises(BrokenExchange):
        connection.read_head()
        connection.read_rest()


def test_a_closed_connection_is_readable_and_says_so_without_a_wait() -> None:
    with answered(b"") as connection:
        assert connection.is_readable(WAIT_S)


@pytest.mark.parametrize("head", ["HTTP/1.0 200 OK", "HTTP/1.1 200 OK\r\nConnection: close"])
def test_an_answer_that_ends_the_connection_says_so(head: str) -> None:
    with answered(f"{head}\r\nContent-Length: 2\r\n\r\n{{}}".encode()) as connection:
        connection.read_head()
        assert connection.read_rest() == b"{}"
        assert not connection.keep_alive


def test_a_peer_that_vanishes_is_noticed_whether_we_wait_or_send() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        address = ("127.0.0.1", listening.getsockname()[1])
        with closing(Connection.connect(*address, WAIT_S)) as connection:
            assert connection.sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            assert connection.sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) <= 10
            assert 0 < connection.sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) <= 10_000


class _Echo(Handler):
    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        self.reply(200, f"{self.path} {self.headers.get('x-name')} ".encode() + body, "text/plain")


class _FunctionsEcho(LeanHandler):
    do_POST = _Echo.do_POST  # type: ignore[assignment]


@pytest.fixture(params=[_Echo, _FunctionsEcho], ids=["ours", "of Python functions"])
def server(request: pytest.FixtureRequest) -> Iterator[tuple[str, int]]:
    failed: list[object] = []
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), request.param) as server:
        server.daemon_threads = True
        server.handle_error = lambda request, address: failed.append(address)  # type: ignore[method-assign]
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        yield server.server_address[0], server.server_address[1]
        server.shutdown()
        thread.join()
    assert failed == [], "a request that was refused is carried out, or one that was taken breaks its thread"


def test_our_client_and_our_server_keep_their_connection(server: tuple[str, int]) -> None:
    connection = Connection.connect(*server, WAIT_S)
    for body in (b"", b"x" * 300_000, b"y"):
        connection.send("POST", "/a", "X-Name: n\r\n", body)
        connection.read_head()
        assert (connection.status, connection.keep_alive) == (200, True)
        assert connection.read_rest() == b"/a n " + body
    connection.close()


def test_other_clients_are_served_too(server: tuple[str, int]) -> None:
    client = http.client.HTTPConnection(*server, timeout=WAIT_S)
    for _ in range(2):
        client.request("POST", "/b", b"body", {"X-NAME": " spaced "})
        response = client.getresponse()
        assert (response.status, response.read()) == (200, b"/b spaced body")
    client.request("POST", "/b", b"", {"Connection": "close"})
    response = client.getresponse()
    assert response.getheader("Connection") == "close"
    client.close()


@pytest.mark.parametrize(
    "request_",
    [
        b"nonsense\r\n\r\n",
        b"GET / HTTP/9\r\n\r\n",
        b"POST / HTTP/1.1\r\nbad\r\n\r\n",
        b"POST / HTTP/1.1\nContent-Length: 0\n\n",
        b"POST / HTTP/1.1\nContent-Length: 0\r\n\r\n",
        b"POST / HTTP/1.1\r\nContent-Length: 0\n\r\n",
        b"POST / HTTP/1.1\r\nContent-Length: 0\r\n\n",
        b"POST\t/ HTTP/1.1\r\nContent-Length: 0\r\n\r\n",
        b"POST  HTTP/1.1\r\nContent-Length: 0\r\n\r\n",
        b"POST /\x85 HTTP/1.1\r\nContent-Length: 0\r\n\r\n",
        b"POST / HTTP/1.1\r\nContent-Length: 0\r\nX: \xa0\r\n\r\n",
        b"POST / HTTP/1.1\r\nContent-Length: +2\r\n\r\n{}",
        b"POST / HTTP/1.1\r\nContent-Length: 1_0\r\n\r\n0123456789",
        b"POST / HTTP/1.1\r\nContent-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n{}",
        b"POST / HTTP/1.1\r\nContent-Length: 0\r\n" + b"a: b\r\n" * 101 + b"\r\n",
    ],
)
def test_what_is_no_request_is_400_and_the_end(server: tuple[str, int], request_: bytes) -> None:
    with socket.create_connection(server, WAIT_S) as sock:
        sock.sendall(request_)
        answer = b""
        while data := sock.recv(65536):
            answer += data
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert answer.count(b"HTTP/1.1 ") == 1, "what was refused is answered once, and not carried out"
