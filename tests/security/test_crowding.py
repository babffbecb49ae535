"""When a resource of a gateway's front is full, the clients that have filled it give way."""

from __future__ import annotations

import base64
import json
import os
import resource
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress

import pytest

from tests.conftest import ValkeyServer
from tests.gateway.conftest import KEY, LLM_CONFIG, OTHER_KEY, GatewayProcess, add_key
from tests.security.slow import (
    ACTIONS,
    WAIT_S,
    Start,
    answer_of,
    assert_serves,
    connect,
    credentials,
    crowd,
    head,
    put_code,
    put_large,
    read_answer,
    read_to_end,
    status_of,
    worker_pid,
)
from thaw.process import descriptors

OTHER = f"Authorization: Basic {base64.b64encode(OTHER_KEY.encode()).decode()}\r\n"
CHAT = json.dumps({"model": "chat", "messages": [{"role": "user", "content": "hi"}]}).encode()
ASK_CHAT = head("POST", "/v1/chat/completions", f"Content-Length: {len(CHAT)}") + CHAT
MODELS = head("GET", "/v1/models")
ASK_LARGE = head("GET", f"{ACTIONS}/large", "Connection: close")
SMALL = {"THAW_GATEWAY_ANSWER_BYTES": "16000000", "THAW_PARAMETERS_BYTES": "12000000"}


@pytest.fixture(autouse=True, scope="module")
def _many_sockets() -> None:
    descriptors.raise_limit()


def slow_reader(gateway: GatewayProcess, ask: bytes, n_bytes: int = 4096) -> socket.socket:
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, n_bytes)
    sock.settimeout(WAIT_S)
    sock.connect(("127.0.0.1", gateway.port))
    sock.sendall(ask)
    return sock


def busy_gateway(start: Start) -> GatewayProcess:
    """A gateway without room for more than 256 connections, and with a thread for each request."""
    gateway = start(THAW_GATEWAY_CONNECTIONS="256", THAW_GATEWAY_THREADS="400", THAW_GATEWAY_HEAD_S="100")
    gateway.put_llm()
    gateway.session.close()
    return gateway


def test_connections_that_are_all_busy_lock_nobody_out(start: Start) -> None:
    """No connection is idle when the last one is accepted, so one can give way only later."""
    gateway = busy_gateway(start)
    with ExitStack() as stack:
        busy = [stack.enter_context(connect(gateway)) for _ in range(255)]
        for sock in busy[1:]:
            sock.sendall(ASK_CHAT)
        for _ in range(3):  # the gateway has read the others when it has answered these
            busy[0].sendall(MODELS)
            assert read_answer(busy[0])[0] == 200
        busy[0].sendall(ASK_CHAT)
        stack.enter_context(connect(gateway))
        assert_serves(gateway)


def test_a_newcomer_whose_request_is_on_its_way_makes_no_room_for_a_client_that_had_its_answer(start: Start) -> None:
    gateway = busy_gateway(start)
    with ExitStack() as stack:
        answered = stack.enter_context(connect(gateway))
        for _ in range(254):
            stack.enter_context(connect(gateway)).sendall(ASK_CHAT)
        for _ in range(8):  # the gateway accepts 64 at once, and has read the chats when it has answered these
            answered.sendall(MODELS)
            assert read_answer(answered)[0] == 200
        newcomer = stack.enter_context(connect(gateway))
        with suppress(OSError):  # it may be cut before this request is read
            answered.sendall(MODELS)
            read_to_end(answered)
        newcomer.sendall(MODELS)
        assert read_answer(newcomer)[0] == 200


def test_a_tenant_that_hoards_connections_takes_none_from_newcomers(start: Start) -> None:
    gateway = start(THAW_GATEWAY_CONNECTIONS="256")
    with ExitStack() as stack:
        for _ in range(256):
            sock = stack.enter_context(connect(gateway))
            sock.sendall(head("GET", "/v1/models", auth=OTHER))
            assert read_answer(sock)[0] == 200
        newcomers = [stack.enter_context(connect(gateway)) for _ in range(20)]
        for sock in newcomers:
            sock.sendall(MODELS)
            assert read_answer(sock)[0] == 200


def test_a_tenant_that_reads_no_answers_cuts_none_of_another_one(start: Start) -> None:
    gateway = start(**SMALL)
    put_large(gateway, 6_000_000)
    put_large(gateway, 10_000_000, "huge", OTHER_KEY)
    with ExitStack() as stack:
        honest = stack.enter_context(slow_reader(gateway, ASK_LARGE, 65536))
        n_read = len(honest.recv(1000))
        ask = head("GET", f"{ACTIONS}/huge", auth=OTHER)
        unread = [stack.enter_context(slow_reader(gateway, ask)) for _ in range(3)]
        assert_serves(gateway)
        for sock in unread[:2]:
            sock.recv(1)
        n_read += len(read_to_end(honest))
        assert n_read > 6_000_000


def test_what_is_left_of_an_answer_counts_as_the_whole(start: Start) -> None:
    """The kernel's buffers take megabytes of each answer, but the unsent rest keeps the whole answer in memory."""
    gateway = start(**SMALL)
    put_large(gateway, 6_000_000)
    with ExitStack() as stack:
        unread = [stack.enter_context(slow_reader(gateway, ASK_LARGE)) for _ in range(8)]
        for sock in unread:
            sock.recv(1)
        assert_serves(gateway)
        assert sum(len(read_to_end(sock)) > 6_000_000 for sock in unread) <= 3


CHUNKED = head("POST", "/v1/completions", "Transfer-Encoding: chunked")
FIELDS = "".join(f"A{i}: {'b' * 7000}\r\n" for i in range(8))


def test_what_was_refused_holds_no_memory(start: Start) -> None:
    gateway = start()
    assert_serves(gateway)
    begin = head("POST", "/v1/completions", "Transfer-Encoding: chunked", auth=FIELDS) + b"ea60\r\n"
    pid = worker_pid(gateway)
    rss = status_of(pid, "VmRSS")
    with crowd(gateway, 800, begin + bytes(60_000) + b"zz\r\nzz\r\n"):  # 96 MB
        assert_serves(gateway)
        assert status_of(pid, "VmRSS") < rss + 60 * 1024


@contextmanager
def frozen_state(server: ValkeyServer, **environ: str) -> Iterator[GatewayProcess]:
    """A gateway that has known a tenant's key, and whose state server answers nothing."""
    add_key(server.url, KEY, "guest")
    gateway = GatewayProcess(server.url, **environ)
    try:
        assert gateway.call("GET", "/v1/models").status_code == 200
        server.freeze()
        yield gateway
    finally:
        server.thaw()
        gateway.end()


def with_key(key: str, *lines: str, fields: str = "") -> bytes:
    return head("POST", "/v1/completions", *lines, auth=f"{fields}Authorization: Bearer no:{key}\r\n")


def test_long_bodies_whose_keys_wait_for_the_state_server_are_bounded(own_valkey: ValkeyServer) -> None:
    data = with_key("key", "Content-Length: 70000", fields=FIELDS) + bytes(60_000)
    with (
        frozen_state(own_valkey, THAW_GATEWAY_HEAD_S="300") as gateway,
        crowd(gateway, 4, data),  # four have a thread
        connect(gateway) as first,
    ):
        first.sendall(data)
        with crowd(gateway, 600, data):  # 64 KB of each are read
            assert read_to_end(first) == b""


@pytest.fixture
def hold_threads(start: Start) -> Iterator[Callable[..., GatewayProcess]]:
    """A gateway all of whose threads have requests that wait for a cold start."""
    with ExitStack() as stack:

        def hold(first: Callable[[GatewayProcess], None] = lambda _: None, **environ: str) -> GatewayProcess:
            gateway = start(THAW_GATEWAY_THREADS="8", **environ)
            first(gateway)
            for key in (KEY, OTHER_KEY):
                body, auth = {"config": LLM_CONFIG}, credentials(key)
                assert gateway.call("PUT", f"{ACTIONS}/chat", json=body, auth=auth).status_code == 200
            others = head("POST", "/v1/chat/completions", f"Content-Length: {len(CHAT)}", auth=OTHER) + CHAT
            for ask in [ASK_CHAT] * 4 + [others] * 4:
                stack.enter_context(connect(gateway)).sendall(ask)
            return gateway

        yield hold


def test_a_request_that_finds_no_thread_in_time_is_a_503(hold_threads: Callable[..., GatewayProcess]) -> None:
    gateway = hold_threads(THAW_GATEWAY_HEAD_S="2")
    with connect(gateway) as sock:
        sock.sendall(MODELS)
        assert read_answer(sock)[0] == 503
        assert read_to_end(sock) == b""


def test_an_answer_that_has_begun_goes_on_while_requests_hold_all_threads(
    hold_threads: Callable[..., GatewayProcess],
) -> None:
    ask = head("GET", f"{ACTIONS}/long", "Connection: close")
    with ExitStack() as stack:
        begun: list[socket.socket] = []

        def begin(gateway: GatewayProcess) -> None:
            put_code(gateway, "#" * 20_000_000)
            begun.append(stack.enter_context(slow_reader(gateway, ask, 65536)))
            assert begun[0].recv(1000).startswith(b"HTTP/1.1 200 OK")

        gateway = hold_threads(begin, THAW_GATEWAY_HEAD_S="2")
        with connect(gateway) as late:
            late.sendall(MODELS)
            assert read_answer(late)[0] == 503
        assert read_to_end(begun[0]).endswith(b"\r\n0\r\n\r\n")


def test_requests_that_wait_for_a_thread_are_bounded(hold_threads: Callable[..., GatewayProcess]) -> None:
    gateway = hold_threads(THAW_GATEWAY_HEAD_S="300")
    data = head("POST", "/v1/completions", "Content-Length: 60000", auth="") + bytes(60_000)
    with connect(gateway) as first:
        first.sendall(data)
        with crowd(gateway, 600, data):  # 36 MB
            assert read_to_end(first) == b""


def test_long_bodies_in_chunks_take_the_memory_that_they_need(start: Start) -> None:
    """Each body could be as long as 8 MiB, and all of them may take 128 MiB."""
    gateway = start()
    body = json.dumps({"model": "none", "x": "y" * 100_000}).encode()
    with ExitStack() as stack:
        crowd = [stack.enter_context(connect(gateway)) for _ in range(40)]
        for sock in crowd:
            sock.sendall(CHUNKED + b"%x\r\n%s\r\n" % (len(body), body))
        for sock in reversed(crowd):
            sock.sendall(b"0\r\n\r\n")
            assert read_answer(sock)[0] == 404


def test_a_body_in_chunks_gets_more_memory_on_its_way(start: Start) -> None:
    gateway = start()
    body = json.dumps({"model": "none", "x": "y" * 5_000_000}).encode()
    with connect(gateway) as sock:
        sock.sendall(CHUNKED + b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body))
        assert read_answer(sock)[0] == 404


def test_strangers_whose_keys_wait_for_the_state_server_delay_no_tenant(own_valkey: ValkeyServer) -> None:
    with frozen_state(own_valkey) as gateway, ExitStack() as stack:
        for i in range(40):
            stack.enter_context(connect(gateway)).sendall(with_key(str(i), "Content-Length: 100000"))
        tenant = stack.enter_context(connect(gateway))
        tenant.sendall(head("POST", "/v1/completions", "Content-Length: 100000", "Expect: 100-continue"))
        assert tenant.recv(100) == b"HTTP/1.1 100 Continue\r\n\r\n"


def test_a_key_that_is_not_checked_in_time_is_a_503(own_valkey: ValkeyServer) -> None:
    with frozen_state(own_valkey, THAW_GATEWAY_HEAD_S="2") as gateway, ExitStack() as stack:
        asking = [stack.enter_context(connect(gateway)) for _ in range(6)]  # four get a thread
        for sock in asking:
            sock.sendall(with_key("key", "Content-Length: 100000"))
        for sock in asking:
            assert read_answer(sock)[0] == 503


def cpu_ticks(pid: int) -> int:
    with open(f"/proc/{pid}/stat") as file:
        fields = file.read().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


def test_a_gateway_without_descriptors_waits_for_one(start: Start) -> None:
    gateway = start(THAW_GATEWAY_THREADS="16")
    gateway.put_llm()
    gateway.session.close()
    pid = worker_pid(gateway)
    with ExitStack() as stack:
        held = [stack.enter_context(connect(gateway)) for _ in range(6)]
        for sock in held:
            sock.sendall(ASK_CHAT)
        assert_serves(gateway)
        n_open = max(int(name) for name in os.listdir(f"/proc/{pid}/fd")) + 1
        _, most = resource.prlimit(pid, resource.RLIMIT_NOFILE)
        with connect(gateway) as more:
            resource.prlimit(pid, resource.RLIMIT_NOFILE, (6, most))
            waits = stack.enter_context(connect(gateway))
            before = cpu_ticks(pid)
            waits.settimeout(1.5)
            waits.sendall(head("GET", "/health"))
            with pytest.raises(TimeoutError):
                waits.recv(1)
            assert cpu_ticks(pid) - before < 40  # hundredths of a second
            resource.prlimit(pid, resource.RLIMIT_NOFILE, (n_open + 100, most))
            waits.settimeout(WAIT_S)
            assert read_answer(waits)[0] == 200
            more.close()


def test_a_client_that_goes_on_sending_reads_why_it_was_refused(start: Start) -> None:
    gateway = start()
    with connect(gateway) as sock:
        sock.sendall(head("POST", "/v1/completions", "Content-Length: 9000000"))
        pace = socket.socketpair()
        pace[0].settimeout(0.5)
        for _ in range(8):  # longer than the gateway waits for a silent client
            sock.sendall(bytes(1000))
            with pytest.raises(TimeoutError):
                pace[0].recv(1)
        for end in pace:
            end.close()
        sock.sendall(bytes(1000))
        file = sock.makefile("rb")
        assert answer_of(file)[0] == 413
        file.close()


def test_half_a_head_delays_no_stop(start: Start) -> None:
    gateway = start(THAW_GATEWAY_HEAD_S="100")
    with connect(gateway) as sock:
        sock.sendall(b"GET / HT")
        assert_serves(gateway)
        gateway.session.close()
        gateway.process.send_signal(signal.SIGTERM)
        assert read_to_end(sock).startswith(b"HTTP/1.1 408 ")
        sock.close()
        assert gateway.process.wait(WAIT_S) == 0
