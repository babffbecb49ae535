"""Gateways, invokers and fetchds that tests of attacks share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

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
