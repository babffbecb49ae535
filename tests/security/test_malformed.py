"""Bytes that are not HTTP get a 4xx or no answer from the gateway and from an invoker's data port, and both stay up."""

from __future__ import annotations

import os
import random
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import requests

from tests.conftest import ValkeyServer
from tests.gateway.conftest import GatewayProcess
from tests.invoker.platform import Host
from tests.security.malformed import KNOWN, mutations
from tests.security.slow import WAIT_S, assert_serves, module_gateway, read_to_end, status_of, worker_pid

N_LONG = int(os.environ.get("THAW_FUZZ_REQUESTS", "1000000"))


@pytest.fixture(scope="module")
def gateway(_shared_valkey: ValkeyServer) -> Iterator[GatewayProcess]:
    with module_gateway(_shared_valkey.url, THAW_GATEWAY_HEAD_S="1") as process:
        yield process


def answer(port: int, data: bytes) -> bytes:
    """Send the data, end the sending side, and return the answer."""
    with socket.create_connection(("127.0.0.1", port), WAIT_S) as sock:
        try:
            sock.sendall(data)
            sock.shutdown(socket.SHUT_WR)
        except OSError:
            pass  # it was refused before it was read
        return read_to_end(sock)


def assert_no_500(data: bytes, found: bytes) -> None:
    for part in found.split(b"HTTP/1.1 ")[1:]:
        assert part[:3] not in (b"500", b"502", b"503"), (data, found)


@pytest.mark.parametrize("data", KNOWN, ids=lambda d: repr(d)[:60])
def test_the_gateway_refuses_what_is_no_request(gateway: GatewayProcess, data: bytes) -> None:
    assert_no_500(data, answer(gateway.port, data))


def some(n: int) -> Iterator[bytes]:
    """Mutations that are others each time; the seed is printed."""
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    return mutations(random.Random(seed), n)


def test_the_gateway_stays_up_under_mutated_requests(gateway: GatewayProcess) -> None:
    send_mutations(gateway, 1500)


@pytest.mark.full
@pytest.mark.timeout(4 * 3600)
def test_the_gateway_stays_up_under_many_mutated_requests(gateway: GatewayProcess) -> None:
    """THAW_FUZZ_REQUESTS says how many."""
    send_mutations(gateway, 2000)  # memory that a process takes only once
    rss = status_of(worker_pid(gateway), "VmRSS")
    send_mutations(gateway, N_LONG)
    assert status_of(worker_pid(gateway), "VmRSS") < rss + 50 * 1024


def send_mutations(gateway: GatewayProcess, n: int) -> None:
    pid = worker_pid(gateway)
    with ThreadPoolExecutor(4) as pool:
        for data, found in pool.map(lambda d: (d, answer(gateway.port, d)), some(n)):
            assert_no_500(data, found)
    assert worker_pid(gateway) == pid
    assert_serves(gateway)


def test_a_header_sets_nothing_that_only_a_proxy_may_set(gateway: GatewayProcess) -> None:
    found = answer(gateway.port, b"GET /api/v1 HTTP/1.1\r\nHost: x\r\nSCRIPT_NAME: /api\r\nConnection: close\r\n\r\n")
    assert found.startswith(b"HTTP/1.1 200 ")


def test_the_data_port_refuses_what_is_no_request(valkey_url: str, tmp_path: Path) -> None:
    with Host(valkey_url, tmp_path) as host:
        port = int(host.agent.address.rpartition(":")[2])
        for data in (*KNOWN, *some(300)):
            assert_no_500(data, answer(port, data))
        assert requests.get(f"http://127.0.0.1:{port}/health", timeout=WAIT_S).status_code == 200


def test_strangers_at_the_data_port_make_room_for_its_gateways(valkey_url: str, tmp_path: Path) -> None:
    with Host(valkey_url, tmp_path) as host:
        port = int(host.agent.address.rpartition(":")[2])
        known = host.connection()
        known.request("GET", "/metrics", headers=host.headers())
        assert known.getresponse().read()
        oldest = socket.create_connection(("127.0.0.1", port), WAIT_S)
        oldest.sendall(b"GET /health HT")
        strangers = [socket.create_connection(("127.0.0.1", port), WAIT_S) for _ in range(300)]
        try:
            assert read_to_end(oldest) == b""
            known.request("GET", "/metrics", headers=host.headers())
            assert known.getresponse().status == 200
        finally:
            for sock in (oldest, *strangers):
                sock.close()
            known.close()
