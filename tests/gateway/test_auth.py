"""The owner of a key, and how long the gateway caches this answer."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import pytest
import redis

from gateway.auth import CACHE_S, Authenticator
from relay.state import keys, redis_link
from relay.state.records import Records, Subject
from tests.conftest import Clock
from thaw.errors import Unauthorized
from thaw.ids import Namespace

KEY = "23bc46b1:secret"
GUEST = Subject(Namespace("guest"), "guest-user")


@pytest.fixture
def client(valkey_url: str) -> Iterator[redis.Redis]:
    with redis_link.connect(valkey_url) as connected:
        Records(connected).put_key(hashlib.sha256(KEY.encode()).hexdigest(), GUEST)
        yield connected


def test_a_key_that_was_revoked_works_no_longer_than_the_cache_remembers_it(client: redis.Redis) -> None:
    clock = Clock()
    authenticator = Authenticator(Records(client), clock)
    assert authenticator.subject(f"Bearer {KEY}") == GUEST
    client.delete(keys.API_KEYS)
    clock.now_s += CACHE_S - 1.0
    assert authenticator.subject(f"Bearer {KEY}") == GUEST, "a known key costs a round trip"
    clock.now_s += 2.0
    with pytest.raises(Unauthorized, match="The supplied authentication is invalid"):
        authenticator.subject(f"Bearer {KEY}")


def test_a_key_that_was_unknown_works_as_soon_as_it_is_made(client: redis.Redis) -> None:
    authenticator = Authenticator(Records(client), Clock())
    with pytest.raises(Unauthorized):
        authenticator.subject("Bearer new:key")
    Records(client).put_key(hashlib.sha256(b"new:key").hexdigest(), GUEST)
    assert authenticator.subject("Bearer new:key") == GUEST
