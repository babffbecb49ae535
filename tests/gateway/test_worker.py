"""The end of connections."""

from __future__ import annotations

from contextlib import ExitStack

import requests

from gateway.front.bounds import Bounds
from tests.gateway.conftest import GatewayProcess
from tests.security.slow import WAIT_S, connect, read_to_end

LAST = b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"


def test_clients_that_do_not_close_after_their_last_answer_delay_nobody(gateway: GatewayProcess) -> None:
    """There are ten times as many clients as the gateway could wait for, one after another, before the last request
    times out.
    """
    n_clients = int(10 * WAIT_S / Bounds().linger_s)
    with ExitStack() as open_ones:
        staying = [open_ones.enter_context(connect(gateway)) for _ in range(n_clients)]
        for sock in staying:
            sock.sendall(LAST)
        assert requests.get(f"{gateway.url}/health", timeout=WAIT_S).status_code == 200
        for sock in staying:
            assert read_to_end(sock).startswith(b"HTTP/1.1 200 ")
