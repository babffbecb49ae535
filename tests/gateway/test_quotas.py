"""Quotas of namespaces, as tenants and operators meet them at real gateways."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import pytest
import requests

from gateway.serving.actions.quotas import QuotaBook
from relay.state import redis_link
from relay.state.quotas import NamespaceQuotas
from tests.conftest import ValkeyServer
from tests.gateway.conftest import (
    CODE,
    LLM_CONFIG,
    OPERATOR_KEY,
    OTHER_KEY,
    GatewayProcess,
    Patched,
    Start,
    pairs,
)
from tests.gateway.waits import until
from thaw.ids import Namespace
from thaw.quotas import OwnQuotas, Quotas
from thaw.settings import SettingError, load

QUOTAS = "/api/v1/thaw/namespaces/guest/quotas"
HELLO = "/api/v1/namespaces/_/actions/hello"


def as_operator(gateway: GatewayProcess, method: str, **more: Any) -> requests.Response:
    return gateway.call(method, QUOTAS, key=OPERATOR_KEY, **more)


def code(n_bytes: int) -> dict[str, Any]:
    return {"exec": {**CODE, "code": "#" * n_bytes + "\n" + CODE["code"]}}


def test_a_namespace_has_as_many_actions_and_as_much_code_as_its_quotas(start_gateway: Start) -> None:
    one, two = (start_gateway(THAW_QUOTA_ACTIONS="2", THAW_QUOTA_CODE_BYTES="50000") for _ in range(2))
    paths = [f"/api/v1/namespaces/_/actions/f{i}" for i in range(3)]
    assert one.call("PUT", paths[0], json=code(10)).status_code == 200
    assert two.call("PUT", paths[1], json=code(10)).status_code == 200
    refused = one.call("PUT", paths[2], json=code(10))
    assert refused.status_code == 403
    assert refused.json()["error"] == (
        "The namespace has too many actions (count: 3, allowed: 2). THAW_QUOTA_ACTIONS is the quota for all, thaw "
        "namespace quota guest --actions N sets it for one."
    )
    large = two.call("PUT", f"{paths[0]}?overwrite=true", json=code(60_000))
    assert (large.status_code, "THAW_QUOTA_CODE_BYTES" in large.text) == (413, True)
    assert two.call("DELETE", paths[0]).status_code == 200
    assert one.call("PUT", paths[2], json=code(10)).status_code == 200


def test_an_operator_sets_a_namespaces_quotas_at_every_gateway(start_gateway: Start) -> None:
    one, two = start_gateway(), start_gateway(THAW_QUOTA_ACCEPTED="7")
    two.put_python()
    shown = as_operator(two, "GET").json()
    assert (shown["default"]["accepted"], shown["default"]["weight"], shown["own"]) == (7, 1.0, {})
    assert (shown["used"]["actions"], shown["used"]["code_bytes"] > 30) == (1, True)
    changed = as_operator(one, "PUT", json={"accepted": 1, "weight": 2})
    assert changed.json()["own"] == {"accepted": 1, "weight": 2.0}
    two.invoker.ready("guest/another")
    two.wait_for_routes()  # this event came after the one of the quotas
    first = two.call("POST", HELLO, json={})
    refused = two.call("POST", HELLO, json={})
    assert (first.status_code, refused.status_code) == (202, 429)
    assert refused.json()["error"].startswith("Too many concurrent requests in flight (count: 2, allowed: 1).")
    assert refused.headers["Retry-After"] == "1"
    assert as_operator(one, "GET").json()["used"]["accepted"] == 1
    assert as_operator(two, "PUT", json={"accepted": None}).json()["own"] == {"weight": 2.0}
    assert two.call("POST", HELLO, json={}).status_code == 202


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[("action", 1), ("actions", -1), ("actions", 1.5), ("held", True), ("held", "x")],
        *[("weight", 0), ("weight", "2"), ("records", 0), ("record_age_s", 0), (None, None)],
    ],
)
def test_what_is_no_quota_is_a_400_that_says_so(shared_gateway: GatewayProcess, name: str | None, value: Any) -> None:
    refused = as_operator(shared_gateway, "PUT", json={name: value} if name else {})
    assert refused.status_code == 400
    assert as_operator(shared_gateway, "GET").json()["own"] == {}


def test_requests_that_wait_have_a_quota_at_all_gateways_together(start_gateway: Start) -> None:
    one, two = (start_gateway(THAW_QUOTA_HELD="2", THAW_GATEWAY_HEARTBEAT_S="0.5") for _ in range(2))
    one.put_python()
    wait = f"{HELLO}?blocking=true&timeout=50"
    assert [gateway.call("POST", wait, json={}).status_code for gateway in (one, two)] == [202, 202]
    for gateway in (one, two):
        refused = gateway.call("POST", wait, json={})
        assert refused.status_code == 429
        assert refused.json()["error"].startswith("Too many requests wait for namespace guest (count: 2, allowed: 2).")
    put = two.call("PUT", HELLO, json=code(10), key=OTHER_KEY)
    other = two.call("POST", wait, json={}, key=OTHER_KEY)
    assert (put.status_code, other.status_code) == (200, 202)
    assert one.call("POST", HELLO, json={}).status_code == 202, "which has a quota of its own"
    one.invoker.ready("guest/hello")
    one.invoker.wait_for_demand(1)  # the other namespace's
    assert two.invoke().status_code == 200


def test_a_namespace_s_actions_keep_no_more_instances_than_its_quota(start_gateway: Start) -> None:
    gateways = [start_gateway(THAW_QUOTA_KEPT="3") for _ in range(2)]
    one, two = gateways
    names = ("a", "b", "c", "d")
    for name in names:
        one.put_python(name)

    def scale(gateway: GatewayProcess, name: str, least: int) -> requests.Response:
        return gateway.call("PUT", f"/api/v1/namespaces/_/scaling/{name}", json={"min_instances": least})

    def kept() -> int:
        found = (one.read(f"scaling/{name}") for name in names)
        return sum(each["min_instances"] for each in found)

    assert scale(one, "a", 2).status_code == 200
    refused = scale(two, "b", 2)
    assert refused.status_code == 403
    assert "(count: 4, allowed: 3). THAW_QUOTA_KEPT is the quota for all" in refused.json()["error"]
    llm = {"config": {**LLM_CONFIG, "scaling": {"min_instances": 2}}}
    assert one.call("PUT", "/api/v1/namespaces/_/actions/chat?force=true", json=llm).status_code == 403
    assert scale(one, "a", 0).status_code == 200
    with ThreadPoolExecutor(8) as pool:
        asked = [pool.submit(scale, gateways[i % 2], name, 2) for i, name in enumerate(2 * names)]
        assert {one.result(20).status_code for one in asked} <= {200, 403}
    assert kept() <= 3, "however many come at once"
    for name in names:
        assert scale(two, name, 2 if name == "a" else 0).status_code in (200, 403)
    assert scale(two, "a", 2).status_code == 200
    assert as_operator(one, "PUT", json={"kept": 1}).status_code == 200
    assert one.call("PUT", f"{HELLO.replace('hello', 'a')}?overwrite=true", json=code(10)).status_code == 200
    assert kept() == 2, "what it keeps already is refused to nobody"
    assert as_operator(two, "GET").json()["used"]["kept"] == 2


def test_a_quota_below_zero_stops_the_start() -> None:
    from gateway.settings import GatewaySettings

    with pytest.raises(SettingError, match="THAW_QUOTA_HELD is below 0"):
        load(GatewaySettings, {"THAW_QUOTA_HELD": "-1"})
    with pytest.raises(SettingError, match="THAW_QUOTA_RECORDS is below 1"):
        load(GatewaySettings, {"THAW_QUOTA_RECORDS": "0"})
    assert load(GatewaySettings, {"THAW_QUOTA_RECORDS": "1", "THAW_QUOTA_HELD": "0"}).quotas.records == 1


def test_a_change_that_comes_while_all_quotas_are_read_is_not_lost() -> None:
    guest = Namespace("guest")

    class Stored:
        def all(self) -> dict[Namespace, OwnQuotas]:
            found = {guest: OwnQuotas(held=1)}
            changing.start()  # the values that were read are on their way
            changing.join(0.2)
            return found

        def of(self, _: Namespace) -> OwnQuotas:
            return OwnQuotas(held=2)

    book = QuotaBook(Quotas(1, 1, 1, 1, 1, 1), cast(NamespaceQuotas, Stored()))
    changing = threading.Thread(target=book.changed, args=(guest,))
    book.reload()
    changing.join(60)
    assert book.of(guest).held == 2


def test_a_gateway_says_at_its_start_that_the_state_servers_memory_has_no_limit(own_valkey: ValkeyServer) -> None:
    told = []
    with redis_link.connect(own_valkey.url) as client:
        for maxmemory in ("0", "64mb"):
            client.config_set("maxmemory", maxmemory)
            gateway = GatewayProcess(own_valkey.url)
            gateway.end()
            told.append("state_memory_unlimited" in "".join(gateway.lines))
    assert told == [True, False]


PATIENT = "from gateway.serving import recorder; recorder._LOGS_S = 60.0"
"""The gateway does not give up logs, and write the records, in the middle of a test."""


def test_results_count_for_the_quota_before_they_are_written(start_gateway: Start, patched: Patched) -> None:
    """The state server has none of them, because their host does not tell their logs."""
    gateway = start_gateway(THAW_QUOTA_RECORD_BYTES="20000", **patched(PATIENT))
    gateway.serve_python()
    gateway.invoker.function = lambda _: (200, {"x": "y" * 3_000})
    gateway.invoker.may_tell_logs.clear()
    answers = [gateway.invoke().status_code for _ in range(9)]
    assert answers == [200] * 6 + [507] * 3
    gateway.invoker.may_tell_logs.set()
    until(lambda: gateway.read("activations?limit=1"), most_s=60)
    assert gateway.read("activations?count=true")["activations"] <= 6, (
        "written, and the oldest gave way if they were longer than they were expected to be"
    )


@pytest.mark.parametrize("kind", ["sequence", "conductor", "failure"])
def test_results_of_what_is_composed_count_for_the_quota_before_they_are_written(
    start_gateway: Start, kind: str, patched: Patched
) -> None:
    """They count twice: for the component and for the composition."""
    gateway = start_gateway(THAW_QUOTA_RECORD_BYTES="20000", **patched(PATIENT))
    if kind == "conductor":
        gateway.serve_python(annotations=pairs(conductor=True))
    else:
        gateway.serve_python()
        gateway.put("actions/hello-seq", exec={"kind": "sequence", "components": ["/_/hello"]})
    name = "hello" if kind == "conductor" else "hello-seq"
    gateway.invoker.function = lambda _: (200, {"error" if kind == "failure" else "x": "y" * 3_000})
    gateway.invoker.may_tell_logs.clear()
    answers = [gateway.invoke(name).status_code for _ in range(5)]
    assert answers == [502 if kind == "failure" else 200] * 3 + [507] * 2
    gateway.invoker.may_tell_logs.set()
