"""Clients that hang up, before and after their first token."""

from __future__ import annotations

import json
import socket
import threading
from typing import Any

import pytest

from tests.gateway.conftest import KEY, GatewayProcess, Start


def raw_post(gateway: GatewayProcess, path: str, body: dict[str, Any], headers: str = "") -> socket.socket:
    """Send a request and return its socket, so that the test can hang up at any time.  ``headers`` are whole lines."""
    data = json.dumps(body).encode()
    sock = socket.create_connection(("127.0.0.1", gateway.port), timeout=10)
    headers += f"Authorization: Bearer {KEY}\r\nContent-Length: {len(data)}\r\n"
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\n{headers}\r\n"
    sock.sendall(head.encode() + data)
    return sock


CHAT = ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]})
RESPONSE = ("/v1/responses", {"input": "x"})


def test_a_client_that_hangs_up_before_its_first_token_leaves_nothing_waiting(gateway: GatewayProcess) -> None:
    gateway.put_llm()
    path, body = CHAT
    for stream in (True, False):
        client = raw_post(gateway, path, {"model": "chat", "stream": stream, **body})
        (demand,) = gateway.invoker.wait_for_demand()
        client.close()
        gateway.invoker.wait_for_demand(0)
        assert gateway.ended(demand.activation_id).status.value == 1


@pytest.mark.parametrize(("path", "body"), [CHAT, RESPONSE], ids=["a chat", "a response"])
def test_a_client_that_leaves_in_the_middle_ends_its_run_and_its_count(
    start_gateway: Start, path: str, body: dict[str, Any]
) -> None:
    gateway = start_gateway(THAW_INVOCATIONS_CONCURRENT="1")
    gateway.serve_llm(slots=1)
    for stream in (True, False):
        gateway.invoker.pace = threading.Semaphore(1)
        client = raw_post(gateway, path, {"model": "chat", "stream": stream, **body})
        assert gateway.invoker.entered.acquire(timeout=60)
        if stream:
            assert client.recv(1)
        client.close()
        assert gateway.invoker.closed.acquire(timeout=20), "without the hang-up it would stream for ever"
        assert gateway.ended(gateway.invoker.runs[-1]["activation_id"]).status.value == 1
    gateway.invoker.pace = None
    assert gateway.chat(max_tokens=1).status_code == 200, "a run that is still counted would keep others out"
