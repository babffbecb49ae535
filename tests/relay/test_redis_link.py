"""The connection to a state server with many clients, and the error for its loss."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from relay.state import redis_link
from tests.conftest import free_port
from thaw.errors import Unavailable


def test_a_crowd_shares_a_few_connections(valkey_url: str) -> None:
    with redis_link.connect(valkey_url) as client, ThreadPoolExecutor(300) as crowd:
        before = client.info("stats")["total_connections_received"]
        assert all(crowd.map(lambda _: client.ping(), range(300)))
        assert client.info("stats")["total_connections_received"] - before <= 32


def test_a_server_that_is_not_there_is_unavailable() -> None:
    with (
        redis_link.connect(f"redis://127.0.0.1:{free_port()}/0", n_retries=0) as client,
        pytest.raises(Unavailable, match="count: the state server does not answer"),
        redis_link.translated("count"),
    ):
        client.ping()
