"""Clients that hang up, before and after their first token."""

from __future__ import annotations

import json
import socket
import threading
from typing import Any

from tests.gateway.conftest import KEY, GatewayProcess, wait_for_record
from tests.gateway.fake_invoker import FakeInvoker


def raw_post(gateway: GatewayProcess, path: str, body: dict[str, Any], headers: str = "") -> socket.socket:
    """Send a request and return its socket, so that the test can hang up at any time.  ``headers`` are whole lines."""
    data = json.dumps(body).encode()
    sock = socket.create_connection(("127.0.0.1", gateway.port), timeout=10)
    headers += f"Authorization: Bearer {KEY}\r\nContent-Length: {len(data)}\r\n"
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\n{headers}\r\n"
    sock.sendall(head.encode() + data)
    return sock


def test_a_client_that_hangs_up_before_its_first_token_leaves_nothing_waiting(
    gateway: GatewayProcess, invoker: FakeInvoker, valkey_url: str
) -> None:
    gateway.put_llm()
    for body in ({"stream": True}, {}):
        chat = {"model": "chat", "messages": [{"role": "user", "content": "x"}], **body}
        client = raw_post(gateway, "/v1/chat/completions", chat)
        (demand,) = invoker.wait_for_demand()
        client.close()
        invoker.wait_for_demand(0)
        record = wait_for_record(valkey_url, demand.activation_id)
        assert record.status.value == 1


def test_a_client_that_hangs_up_in_mid_stream_frees_its_slot(
    gateway: GatewayProcess, invoker: FakeInvoker, valkey_url: str
) -> None:
    gateway.put_llm()
    invoker.ready("guest/chat", slots=1)
    for body in ({"stream": True}, {}):
        invoker.pace = threading.Semaphore(1)
        chat = {"model": "chat", "messages": [{"role": "user", "content": "x"}], **body}
        client = raw_post(gateway, "/v1/chat/completions", chat)
        assert invoker.entered.acquire(timeout=60)
        if body:
            assert client.recv(1)
        client.close()
        assert invoker.closed.acquire(timeout=20), "without the hang-up it would stream for ever"
        record = wait_for_record(valkey_url, invoker.runs[-1]["activation_id"])
        assert record.status.value == 1
    invoker.pace = None
    assert gateway.chat(max_tokens=1).status_code == 200
