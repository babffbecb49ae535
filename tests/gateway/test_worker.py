"""The end of connections."""

from __future__ import annotations

import socket
from collections.abc import Callable

import requests

from gateway.front.bounds import Bounds
from tests.gateway.conftest import GatewayProcess

LAST = b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
WAIT_S = 30.0


def read_to_end(sock: socket.socket) -> bytes:
    data = b""
    while piece := sock.recv(65536):
        data += piece
    return data


def ask_and_stay(gateway: GatewayProcess) -> socket.socket:
    sock = socket.create_connection(("127.0.0.1", gateway.port), WAIT_S)
    sock.sendall(LAST)
    return sock


def test_clients_that_do_not_close_after_their_last_answer_delay_nobody(
    start_gateway: Callable[..., GatewayProcess],
) -> None:
    """There are ten times as many clients as the gateway could wait for, one after another, before the last request
    times out.
    """
    gateway = start_gateway()
    n_clients = int(10 * WAIT_S / Bounds().linger_s)
    staying = [ask_and_stay(gateway) for _ in range(n_clients)]
    try:
        assert requests.get(f"{gateway.url}/health", timeout=WAIT_S).status_code == 200
        for sock in staying:
            assert read_to_end(sock).startswith(b"HTTP/1.1 200 ")
    finally:
        for sock in staying:
            sock.close()
