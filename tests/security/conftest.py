"""Gateways, invokers and fetchds that tests of attacks share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import redis

from tests.conftest import ValkeyServer
from tests.fetchd.harness import Fetchd
from tests.gateway.conftest import KEY, OTHER_KEY, GatewayProcess, add_key
from tests.gateway.fake_invoker import FakeInvoker


@pytest.fixture
def start(valkey_url: str) -> Iterator[Callable[..., GatewayProcess]]:
    """Start a gateway with these settings and the keys of two tenants."""
    add_key(valkey_url, KEY, "guest")
    add_key(valkey_url, OTHER_KEY, "other")
    started: list[GatewayProcess] = []

    def start(**environ: str) -> GatewayProcess:
        started.append(GatewayProcess(valkey_url, **environ))
        return started[-1]

    yield start
    for gateway in started:
        gateway.end()


@pytest.fixture
def invoker(valkey_url: str) -> Iterator[FakeInvoker]:
    fake = FakeInvoker(valkey_url)
    yield fake
    fake.stop()


@pytest.fixture
def fetchd(tmp_path: Path) -> Iterator[Fetchd]:
    with Fetchd(tmp_path) as running:
        yield running


@dataclass(frozen=True, slots=True)
class SmallPlatform:
    """A gateway and an invoker of two tenants at a state server of 64 MB."""

    client: redis.Redis
    gateway: GatewayProcess
    fake: FakeInvoker


@pytest.fixture
def small(own_valkey: ValkeyServer) -> Iterator[SmallPlatform]:
    with redis.Redis.from_url(own_valkey.url) as client:
        client.config_set("maxmemory", "64mb")
        for key, namespace in ((KEY, "guest"), (OTHER_KEY, "other")):
            add_key(own_valkey.url, key, namespace)
        gateway, fake = GatewayProcess(own_valkey.url), FakeInvoker(own_valkey.url)
        yield SmallPlatform(client, gateway, fake)
        gateway.end()
        fake.stop()
