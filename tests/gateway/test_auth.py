"""The owner of a key, and how long the gateway caches this answer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import redis

from gateway.auth import CACHE_S, Authenticator
from gateway.serving.routing.run_keys import RunKeys
from relay.state import keys, redis_link
from relay.state.api_keys import ApiKey, ApiKeys, Subject, digest_of
from tests.conftest import Clock
from tests.gateway.calls import call_of
from thaw.clock import wall_ms
from thaw.errors import Unauthorized
from thaw.ids import Namespace

KEY = "23bc46b1:secret"
GUEST = Subject(Namespace("guest"), "guest-user")
ROW = ApiKey(GUEST.namespace, GUEST.subject)


@pytest.fixture
def client(valkey_url: str) -> Iterator[redis.Redis]:
    with redis_link.connect(valkey_url) as connected:
        ApiKeys(connected).put(digest_of(KEY), ROW)
        yield connected


def test_a_key_that_was_revoked_works_no_longer_than_the_cache_remembers_it(client: redis.Redis) -> None:
    clock = Clock()
    authenticator = Authenticator(ApiKeys(client), clock)
    assert authenticator.subject(f"Bearer {KEY}") == GUEST
    client.delete(keys.API_KEYS)
    clock.now_s += CACHE_S - 1.0
    assert authenticator.subject(f"Bearer {KEY}") == GUEST, "a known key costs a round trip"
    clock.now_s += 2.0
    with pytest.raises(Unauthorized, match="The supplied authentication is invalid"):
        authenticator.subject(f"Bearer {KEY}")


def test_whose_a_key_is_is_known_while_it_is_remembered_and_of_no_made_up_one(client: redis.Redis) -> None:
    clock = Clock()
    authenticator = Authenticator(ApiKeys(client), clock)
    found = [authenticator.known_namespace(f"Bearer {KEY}")]
    authenticator.subject(f"Bearer {KEY}")
    found += [authenticator.known_namespace(header) for header in (f"Bearer {KEY}", "Bearer made:up", "")]
    clock.now_s += CACHE_S + 1.0
    found.append(authenticator.known_namespace(f"Bearer {KEY}"))
    assert found == [None, GUEST.namespace, None, None, None]


def test_a_key_that_was_unknown_works_as_soon_as_it_is_made(client: redis.Redis) -> None:
    authenticator = Authenticator(ApiKeys(client), Clock())
    with pytest.raises(Unauthorized):
        authenticator.subject("Bearer new:key")
    ApiKeys(client).put(digest_of("new:key"), ROW)
    assert authenticator.subject("Bearer new:key") == GUEST


def test_a_revoked_key_ends_at_once_at_the_gateway_that_revoked_it(client: redis.Redis) -> None:
    authenticator = Authenticator(ApiKeys(client), Clock())
    assert authenticator.subject(f"Bearer {KEY}") == GUEST
    ApiKeys(client).put(digest_of(KEY), replace(ROW, revoked_ms=1))
    authenticator.forget()
    with pytest.raises(Unauthorized):
        authenticator.subject(f"Bearer {KEY}")


def test_a_key_that_was_revoked_while_it_was_read_is_not_remembered(client: redis.Redis) -> None:
    class RevokedMeanwhile(ApiKeys):
        def subject(self, digest: str) -> Subject | None:
            found = super().subject(digest)
            self.put(digest, replace(ROW, revoked_ms=1))
            authenticator.forget()
            return found

    authenticator = Authenticator(RevokedMeanwhile(client), Clock())
    assert authenticator.subject(f"Bearer {KEY}") == GUEST
    with pytest.raises(Unauthorized):
        authenticator.subject(f"Bearer {KEY}")


@pytest.mark.parametrize("with_key", [True, False])
def test_a_runs_key_ends_with_the_key_that_called_it(client: redis.Redis, with_key: bool) -> None:
    """A web request has no key, so its run's key ends with the last key of the namespace."""
    run_keys, api_keys = RunKeys("token"), ApiKeys(client)
    authenticator = Authenticator(api_keys, Clock(), run_keys)
    api_keys.put("elsewhere", replace(ROW, namespace=Namespace("other")))
    caller = authenticator.subject(f"Bearer {KEY}") if with_key else GUEST
    key = run_keys.make(call_of(subject=caller), wall_ms() + 60_000)
    assert authenticator.subject(f"Bearer {key}") == GUEST
    if with_key:
        api_keys.put("another", ROW)
    api_keys.put(digest_of(KEY), replace(ROW, revoked_ms=1))
    assert authenticator.subject(f"Bearer {key}") == GUEST, "a known key costs a round trip"
    authenticator.forget()
    with pytest.raises(Unauthorized):
        authenticator.subject(f"Bearer {key}")


def test_what_is_called_with_a_runs_key_gets_one_that_ends_no_later() -> None:
    run_keys = RunKeys("token")
    first = run_keys.subject(run_keys.make(call_of(subject=GUEST), 1000), 0)
    again = run_keys.make(call_of(subject=first), 9000)
    assert run_keys.subject(again, 1000) == GUEST
    assert run_keys.subject(again, 1001) is None
    assert run_keys.subject(run_keys.make(call_of(subject=first), 500), 501) is None
