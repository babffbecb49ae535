"""A client that reconnects reads each token once, through the real processes and with the real model."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from tests.e2e.machine import Machine
from tests.e2e.test_crashes import answered, kill_workers
from tests.gateway.event_client import Client

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]


@dataclass(frozen=True, slots=True)
class Gateway:
    url: str


def seen(client: Client) -> list[tuple[str, str]]:
    """The events as the client has them, without what differs between two activations."""
    assert client.events[-1].data == "[DONE]"
    return [(e.id.rpartition(":")[2], e.text) for e in client.events]


def test_each_token_comes_once_though_worker_and_gateway_are_killed(platform: Machine) -> None:
    answered(platform)
    gateway, key = Gateway(platform.api), ":".join(platform.auth())
    body = {
        "messages": [{"role": "user", "content": "Count from one to fifty."}],
        "max_tokens": 120,
        "temperature": 0,
        "ignore_eos": True,
    }
    whole, client = Client(key, **body), Client(key, **body)
    whole.ask(gateway)
    whole.read_all()
    client.ask(gateway)
    client.read(10)
    client.hang_up()
    kill_workers(platform)
    client.ask(gateway, timeout_s=120)  # the answer waits for a cold start
    client.read(10)
    assert client.comments[0] == ": thaw going on with the answer"
    client.hang_up()
    client.ask(gateway)
    client.read(10)
    platform.kill("gateway")
    client.hang_up()
    answered(platform)
    assert client.ask(gateway).status_code == 200
    client.read_all()
    assert client.comments[-1] == ": thaw computing the answer again"
    assert seen(client) == seen(whole)
    activation_id = client.reply.headers["X-Openwhisk-Activation-Id"]
    listed = platform.request("GET", "/api/v1/namespaces/_/activations?limit=0").json()
    assert [a["activationId"] for a in listed].count(activation_id) == 1
