"""The state server, and the typed clients that most tests use."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import redis

from relay.state import redis_link
from relay.state.records import Records
from relay.state.registry import Registry


@pytest.fixture
def client(valkey_url: str) -> Iterator[redis.Redis]:
    """A client of the real, empty state server."""
    with redis_link.connect(valkey_url, timeout_s=60) as connected:  # the server may have to wait for a processor
        yield connected


@pytest.fixture
def records(client: redis.Redis) -> Records:
    return Records(client)


@pytest.fixture
def registry(client: redis.Redis) -> Registry:
    return Registry(client)
