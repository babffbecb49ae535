"""No client holds a thread of the gateway by sending or reading slowly, and none waits without an end."""

from __future__ import annotations

import json
import select
import socket
from contextlib import ExitStack

import pytest

from tests.gateway.conftest import GatewayProcess
from tests.gateway.fake_invoker import FakeInvoker
from tests.security.slow import (
    ACTIONS,
    AUTH,
    WAIT_S,
    Start,
    answer_of,
    assert_serves,
    connect,
    crowd,
    head,
    put_large,
    read_answer,
    read_to_end,
    status_of,
    worker_pid,
)
from thaw.process import descriptors

FEW_THREADS = {"THAW_GATEWAY_THREADS": "4"}
CHAT = json.dumps({"model": "none", "messages": [{"role": "user", "content": "hi"}]}).encode()
INVOKE = f"{ACTIONS}/hello?blocking=true&result=true"


@pytest.fixture(autouse=True, scope="module")
def _many_sockets() -> None:
    descriptors.raise_limit()


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"GET /health HT",
        b"GET /health HTTP/1.1\r\nHost: x\r\nA: b",
        head("POST", "/v1/chat/completions", "Content-Length: 100", auth="") + b"{",
        head("POST", "/v1/chat/completions", "Content-Length: 100") + b"{",
        head("POST", "/v1/chat/completions", "Content-Length: 1000000") + b"{",
        head("POST", "/v1/chat/completions", "Transfer-Encoding: chunked") + b"5\r\nab",
    ],
    ids=["nothing", "half-a-line", "half-a-head", "a-stranger's-body", "a-tenant's-body", "a-long-body", "chunks"],
)
def test_clients_that_send_no_more_hold_no_thread(start: Start, data: bytes) -> None:
    gateway = start(**FEW_THREADS)
    with crowd(gateway, 60, data):
        assert_serves(gateway)


def costs_at_most(gateway: GatewayProcess, most_mib: int, n_idle: int, n_slow: int, n_bytes: int) -> None:
    """Crowd the gateway: it has no more threads then, and at most so many MiB more."""
    assert_serves(gateway)
    pid = worker_pid(gateway)
    threads, rss = status_of(pid, "Threads"), status_of(pid, "VmRSS")
    slow = head("POST", "/v1/chat/completions", "Content-Length: 60000", auth="") + bytes(n_bytes)
    addresses = ("127.0.0.2", "127.0.0.3", "127.0.0.4", "127.0.0.5")
    with crowd(gateway, n_idle, b"", addresses), crowd(gateway, n_slow, slow, addresses):
        assert_serves(gateway)
        assert status_of(pid, "Threads") <= threads + 4
        assert status_of(pid, "VmRSS") <= rss + most_mib * 1024


def test_a_crowd_of_idle_and_slow_clients_costs_neither_threads_nor_much_memory(start: Start) -> None:
    costs_at_most(start(), 40, 2000, 400, 10_000)


@pytest.mark.full
def test_ten_thousand_idle_and_two_thousand_slow_clients_cost_memory_only(start: Start) -> None:
    costs_at_most(start(THAW_GATEWAY_HEAD_S="300"), 256, 10_000, 2000, 50_000)


@pytest.mark.parametrize("data", [b"", b"GET /health HTTP/1.1\r\n"], ids=["nothing", "a-part"])
def test_a_head_that_does_not_come_ends_its_connection(start: Start, data: bytes) -> None:
    gateway = start(THAW_GATEWAY_HEAD_S="2")
    with connect(gateway) as sock:
        sock.sendall(data)
        answer = read_to_end(sock)
    assert answer.startswith(b"HTTP/1.1 408 ") if data else answer == b""


def test_a_body_that_stops_is_a_408(start: Start) -> None:
    gateway = start(THAW_GATEWAY_HEAD_S="2")
    with connect(gateway) as api, connect(gateway) as openai:
        api.sendall(head("POST", INVOKE, "Content-Length: 100") + b"{")
        openai.sendall(head("POST", "/v1/completions", "Content-Length: 1000000") + b"{")
        for sock, message in ((api, lambda p: p["error"]), (openai, lambda p: p["error"]["message"])):
            status, body = read_answer(sock)
            assert status == 408
            assert message(json.loads(body)) == "The body of the request came too slowly: 1 bytes."
            assert read_to_end(sock) == b""


@pytest.mark.parametrize(
    ("method", "path", "n_bytes", "auth", "status"),
    [
        ("PUT", f"{ACTIONS}/a", 40_000_000, "", 401),
        ("PUT", f"{ACTIONS}/a", 40_000_000, "Authorization: Bearer no:key\r\n", 401),
        ("PUT", "/api/v1/namespaces/other/actions/a", 40_000_000, AUTH, 403),
        ("PUT", f"{ACTIONS}/a", 60_000_000, AUTH, 413),
        ("POST", "/v1/chat/completions", 9_000_000, AUTH, 413),
        ("POST", f"{ACTIONS}/none", 2_000_000, AUTH, 404),
        ("POST", "/nowhere", 2_000_000, AUTH, 404),
        ("GET", "/health", 2_000_000, "", 401),
        ("DELETE", "/v1/models", 2_000_000, AUTH, 405),
    ],
)
def test_a_long_body_is_refused_before_it_is_sent(
    start: Start, method: str, path: str, n_bytes: int, auth: str, status: int
) -> None:
    gateway = start()
    with connect(gateway) as sock:
        sock.sendall(head(method, path, f"Content-Length: {n_bytes}", auth=auth))
        assert read_answer(sock)[0] == status
        assert read_to_end(sock) == b""  # the rest of the body would be read as the next request


@pytest.fixture
def hello(start: Start, invoker: FakeInvoker) -> GatewayProcess:
    """A gateway with a function that serves."""
    gateway = start()
    gateway.put_python()
    invoker.ready("guest/hello")
    gateway.wait_for_routes()
    return gateway


@pytest.mark.parametrize("n_bytes", [10, 500_000])
def test_a_client_that_expects_100_gets_it_before_its_body(hello: GatewayProcess, n_bytes: int) -> None:
    body = json.dumps({"a": "x" * n_bytes}).encode()
    with connect(hello) as sock:
        sock.sendall(head("POST", INVOKE, f"Content-Length: {len(body)}", "Expect: 100-continue"))
        assert sock.recv(100) == b"HTTP/1.1 100 Continue\r\n\r\n"
        sock.sendall(body)
        assert read_answer(sock) == (200, json.dumps({"a": "x" * n_bytes}).encode())


@pytest.mark.parametrize("piece", [1000, 70_000, 1_000_000])
@pytest.mark.parametrize("chunked", [False, True])
def test_a_body_arrives_whole_however_it_is_cut(hello: GatewayProcess, piece: int, chunked: bool) -> None:
    value = {"a": "".join(chr(97 + i * i % 26) for i in range(300_000))}
    body = json.dumps(value).encode()
    pieces = [body[i : i + piece] for i in range(0, len(body), piece)]
    framing = "Transfer-Encoding: chunked" if chunked else f"Content-Length: {len(body)}"
    with connect(hello) as sock:
        for _ in range(2):  # the second one over the same connection
            sock.sendall(head("POST", INVOKE, framing))
            for one in pieces:
                sock.sendall(b"%x;a=b\r\n%s\r\n" % (len(one), one) if chunked else one)
            sock.sendall(b"0\r\nTrailer: x\r\n\r\n" if chunked else b"")
            status, answer = read_answer(sock)
            assert (status, json.loads(answer)) == (200, value)


def test_chunks_beyond_the_limit_are_a_413(start: Start) -> None:
    gateway = start(THAW_LLM_PAYLOAD_BYTES="200000")
    with connect(gateway) as sock:
        sock.sendall(head("POST", "/v1/completions", "Transfer-Encoding: chunked"))
        for _ in range(21):
            sock.sendall(b"%x\r\n%s\r\n" % (10_000, bytes(10_000)))
        assert read_answer(sock)[0] == 413


def test_requests_sent_together_are_answered_in_their_order(start: Start) -> None:
    gateway = start()
    with connect(gateway) as sock:
        sock.sendall(b"".join(head("GET", p) for p in ("/api/v1/namespaces", "/v1/models", "/api/v1/namespaces")))
        file = sock.makefile("rb")
        found = [answer_of(file)[1] for _ in range(3)]
    assert found == [b'["guest"]', b'{"object": "list", "data": []}', b'["guest"]']


def test_clients_that_do_not_read_hold_no_thread_and_are_cut(start: Start) -> None:
    gateway = start(**FEW_THREADS, THAW_GATEWAY_ANSWER_S="4", THAW_PARAMETERS_BYTES="7000000")
    put_large(gateway, 6_000_000)
    ask = head("GET", f"{ACTIONS}/large", "Connection: close")
    with ExitStack() as stack:
        unread = [stack.enter_context(connect(gateway)) for _ in range(8)]
        for sock in unread:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            sock.sendall(ask)
        assert_serves(gateway)
        with connect(gateway) as reads:
            reads.sendall(ask)
            assert len(read_to_end(reads)) > 6_000_000
        poll_end(unread[0])
        assert len(read_to_end(unread[0])) < 6_000_000


def poll_end(sock: socket.socket) -> None:
    """Wait until the gateway has closed the connection, without reading from it."""
    poll = select.poll()
    poll.register(sock, 0)  # POLLHUP: the connection was reset
    assert poll.poll(WAIT_S * 1000)


def test_a_stream_that_nobody_reads_ends(start: Start, invoker: FakeInvoker) -> None:
    gateway = start(THAW_GATEWAY_ANSWER_S="1")
    gateway.put_llm()
    invoker.ready("guest/chat")
    gateway.wait_for_routes()
    body = json.dumps({"model": "chat", "prompt": "hi", "stream": True, "max_tokens": 200_000}).encode()
    with connect(gateway) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.sendall(head("POST", "/v1/completions", f"Content-Length: {len(body)}") + body)
        assert invoker.closed.acquire(timeout=WAIT_S)  # the gateway has cut the run


def test_an_address_has_so_many_connections_and_its_oldest_gives_way(start: Start) -> None:
    """All clients behind a router that translates addresses have one address: old connections must not shut out new
    ones."""
    gateway = start(THAW_GATEWAY_PER_ADDRESS="5")
    with connect(gateway) as other, connect(gateway, "127.0.0.2") as known, connect(gateway, "127.0.0.2") as oldest:
        known.sendall(head("GET", "/v1/models"))
        assert read_answer(known)[0] == 200
        with crowd(gateway, 4, b"GET"):
            assert_serves(gateway)
            assert read_to_end(oldest) == b""
            for sock in (known, other):
                sock.sendall(head("GET", "/v1/models"))
                assert read_answer(sock)[0] == 200


def test_when_there_are_too_many_connections_the_oldest_gives_way(start: Start) -> None:
    gateway = start(THAW_GATEWAY_CONNECTIONS="256")
    with connect(gateway) as oldest, connect(gateway) as known:
        oldest.sendall(b"")
        known.sendall(head("GET", "/v1/models"))
        assert read_answer(known)[0] == 200
        with crowd(gateway, 300, b""):
            assert_serves(gateway)
            assert read_to_end(oldest) == b""
            known.sendall(head("GET", "/v1/models"))
            assert read_answer(known)[0] == 200  # it had a valid key, so strangers gave way before it


def test_parts_of_requests_without_a_key_have_a_memory_of_their_own(start: Start) -> None:
    gateway = start()
    part = head("POST", "/v1/completions", "Content-Length: 60001", auth="") + bytes(60_000)
    with connect(gateway) as first:
        first.sendall(part)
        with crowd(gateway, 600, part):  # 36 MB
            assert read_to_end(first) == b""
            assert_serves(gateway)


def test_a_long_body_waits_for_the_memory_that_another_one_has(start: Start) -> None:
    gateway = start(THAW_CODE_BYTES="1000000", THAW_LLM_PAYLOAD_BYTES="1000000", THAW_GATEWAY_BODY_BYTES="3200000")
    body = json.dumps({"model": "none", "x": "y" * 900_000}).encode()
    ask = head("POST", "/v1/completions", f"Content-Length: {len(body)}", "Expect: 100-continue")
    with connect(gateway) as one, connect(gateway) as two, connect(gateway) as three:
        for sock in (one, two):
            sock.sendall(ask)
            assert sock.recv(100).startswith(b"HTTP/1.1 100 ")
        three.sendall(ask)
        one.sendall(body)
        assert read_answer(one)[0] == 404
        assert three.recv(100).startswith(b"HTTP/1.1 100 ")
        three.sendall(body)
        assert read_answer(three)[0] == 404


def test_a_gateway_that_stops_does_not_wait_for_those_that_send_nothing(start: Start) -> None:
    gateway = start(THAW_GATEWAY_HEAD_S="600", THAW_GATEWAY_DRAIN_S="600")
    with crowd(gateway, 5, b""), crowd(gateway, 5, b"GET /health HT"):
        assert_serves(gateway)
        gateway.process.terminate()
        assert gateway.process.wait(WAIT_S) == 0
