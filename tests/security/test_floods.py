"""Thousands of requests of one namespace neither delay nor crowd out another namespace."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import redis

from relay.state import keys
from relay.state.records import Pending
from tests.gateway.conftest import KEY, OTHER_KEY, GatewayProcess, start_gateway, wait_for_record
from tests.gateway.fake_invoker import FakeInvoker
from tests.security.conftest import SmallPlatform
from tests.security.slow import ACTIONS, credentials, put_code
from thaw import wire
from thaw.ids import ActionName, ActivationId, Namespace

__all__ = ["start_gateway"]

CODE = "def main(args):\n    return args\n"
F = f"{ACTIONS}/f"
BLOCKING = "?blocking=true"


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
    """No activation of the flood ends before the honest tenant's has ended."""
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
        put_code(gateway, CODE, "f", key)
    invoker.ready("guest/f", instance="i0", slots=64)
    invoker.ready("other/f", instance="i1", group="b" * 32, slots=64)
    flood(valkey_url, "guest", 10_000)
    reply = gateway.call("POST", F, json={"honest": True}, auth=credentials(OTHER_KEY))
    assert reply.status_code == 202
    assert wait_for_record(valkey_url, reply.json()["activationId"], timeout_s=60).result == {"honest": True}
    assert len(n_begun) == 1
    assert n_begun[0] <= 64, "it has a thread, although the flood would take all of them"


def test_a_flood_of_large_results_ends_in_507_and_another_namespaces_results_are_kept(small: SmallPlatform) -> None:
    """The state server's memory stays below its limit."""
    client, gateway, fake = small.client, small.gateway, small.fake
    fake.function = lambda value: (200, {"x": "y" * value["n"]})
    for key, namespace, instance in ((KEY, "guest", "i0"), (OTHER_KEY, "other", "i1")):
        put_code(gateway, CODE, "f", key)
        fake.ready(f"{namespace}/f", instance=instance, group=instance * 16)
    gateway.wait_for_routes(2)
    flooded = []
    while 507 not in flooded:
        assert len(flooded) < 233, "megabytes"
        for how in ("", BLOCKING):
            flooded.append(gateway.call("POST", f"{F}{how}", json={"n": 1_000_000}).status_code)
        gateway.call("GET", "/api/v1/namespaces/_/activations?limit=1")  # after the records are written
    assert set(flooded) == {200, 202, 507}
    kept = [gateway.call("POST", F + BLOCKING, json={"n": 900_000}, auth=credentials(OTHER_KEY)) for _ in "abc"]
    assert [reply.status_code for reply in kept] == [200] * 3
    for reply in kept:
        path = f"/api/v1/namespaces/_/activations/{reply.json()['activationId']}/result"
        found = gateway.call("GET", path, auth=credentials(OTHER_KEY)).json()
        assert len(found["result"]["x"]) == 900_000
    assert gateway.call("POST", F + BLOCKING, json={"n": 1}).status_code == 200, "its client has the answer"
    told = gateway.call("POST", F, json={"n": 1})
    assert told.status_code == 507
    assert "no room for more records" in told.json()["error"]
    memory: Any = client.info("memory")
    assert memory["used_memory"] < 64 * 2**20
