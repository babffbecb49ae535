"""What one namespace asks for in thousands delays and crowds out nobody else."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import redis

from relay.state import keys
from relay.state.records import Pending
from tests.gateway.conftest import (
    KEY,
    OTHER_KEY,
    GatewayProcess,
    invoker,
    start_gateway,
    wait_for_record,
)
from tests.gateway.fake_invoker import FakeInvoker
from thaw import wire
from thaw.ids import ActionName, ActivationId, Namespace

__all__ = ["invoker", "start_gateway"]

F = "/api/v1/namespaces/_/actions/f"


def credentials(key: str) -> tuple[str, str]:
    user, _, password = key.partition(":")
    return user, password


def put(gateway: GatewayProcess, key: str) -> None:
    body = {"exec": {"kind": "python:3.11", "code": "def main(args):\n    return args\n"}}
    assert gateway.call("PUT", F, json=body, auth=credentials(key)).status_code == 200


def flood(url: str, namespace: str, n: int) -> None:
    """So many 202s of a namespace as gateways have accepted them."""
    with redis.Redis.from_url(url) as client:
        pipe = client.pipeline(transaction=False)
        for i in range(n):
            name = ActivationId(f"{i:032x}")
            pending = Pending(name, Namespace(namespace), "x", ActionName(f"{namespace}/f"), "0.0.1", {}, 0, 0)
            pipe.xadd(keys.PENDING, {"p": wire.dumps(pending), "id": name, "o": ""})
        pipe.execute()


def test_ten_thousand_202s_of_one_namespace_delay_no_202_of_another(
    start_gateway: Callable[..., GatewayProcess], invoker: FakeInvoker, valkey_url: str
) -> None:
    """None of the flood ends before the honest tenant's has."""
    honest_ran, n_begun = threading.Event(), list[int]()
    gateway = start_gateway()

    def function(value: Any) -> tuple[int, Any]:
        if value == {"honest": True}:
            n_begun.append(len(invoker.runs))
            honest_ran.set()
        else:
            honest_ran.wait(60)
        return 200, value

    invoker.function = function
    for key in (KEY, OTHER_KEY):
        put(gateway, key)
    invoker.ready("guest/f", instance="i0", slots=64)
    invoker.ready("other/f", instance="i1", group="b" * 32, slots=64)
    flood(valkey_url, "guest", 10_000)
    reply = gateway.call("POST", F, json={"honest": True}, auth=credentials(OTHER_KEY))
    assert reply.status_code == 202
    assert wait_for_record(valkey_url, reply.json()["activationId"], timeout_s=60).result == {"honest": True}
    assert len(n_begun) == 1
    assert n_begun[0] <= 64, "it has a thread, although the flood would take all of them"
