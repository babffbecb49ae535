"""Requests that are held until a record is written, so that followers of a namespace's calls get no empty lists."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import redis
import requests

from relay.state import redis_link
from relay.state.records import Ended, Records
from relay.state.storage import Storage
from tests.gateway.conftest import KEY, OTHER_KEY, GatewayProcess
from tests.gateway.fake_invoker import FakeInvoker
from tests.relay.samples import record
from tests.security.slow import connect, head
from thaw.activation import Activation
from thaw.cli.platform_api.client import Client
from thaw.cli.platform_api.following import ended
from thaw.cli.platform_api.property_file import Target
from thaw.ids import ActionName
from thaw.quotas import Quotas

Start = Callable[..., GatewayProcess]
LIST = "/api/v1/namespaces/_/activations"
ENDINGS = "/api/v1/namespaces/_/endings"


@pytest.fixture
def hello(gateway: GatewayProcess, invoker: FakeInvoker) -> GatewayProcess:
    for i, name in enumerate(("hello", "other")):
        gateway.put_python(name)
        invoker.ready(f"guest/{name}", instance=f"i{i}")
    gateway.wait_for_routes(2)
    return gateway


def call(gateway: GatewayProcess, name: str = "hello") -> str:
    reply = gateway.call("POST", f"/api/v1/namespaces/_/actions/{name}?blocking=true", json={})
    activation_id = str(reply.json()["activationId"])
    gateway.record(activation_id)
    return activation_id


def held(pool: ThreadPoolExecutor, state_url: str, ask: Callable[[], Any]) -> Future[Any]:
    """Send a request, and return when it listens for records."""
    with redis.Redis.from_url(state_url) as client:
        asked, tick = pool.submit(ask), threading.Event()
        while not asked.done() and client.pubsub_numsub("thaw:ended:guest")[0][1] == 0:
            tick.wait(0.01)
    return asked


def endings(gateway: GatewayProcess, **query: Any) -> dict[str, Any]:
    reply = gateway.call("GET", ENDINGS, params=query, timeout=60)
    assert reply.status_code == 200, reply.text
    return dict(reply.json())


def ids(reply: dict[str, Any]) -> list[str]:
    return [one["activationId"] for one in reply["activations"]]


def settled(gateway: GatewayProcess) -> str:
    """The cursor of now, after the records of all calls so far."""
    gateway.call("GET", LIST)  # this request waits for the records
    return str(endings(gateway)["cursor"])


def test_what_ended_after_a_cursor_is_answered_at_once_and_then_the_request_is_held(
    hello: GatewayProcess, valkey_url: str
) -> None:
    call(hello)
    start = settled(hello)
    second = call(hello)
    cursor = settled(hello)
    assert ids(endings(hello, after=start, wait_s=30)) == [second]
    assert ids(endings(hello, after=start)) == [second], "a cursor can be used again"
    with ThreadPoolExecutor(1) as pool:
        asked = held(pool, valkey_url, lambda: endings(hello, after=cursor, wait_s=30))
        assert not asked.done()
        third = call(hello)
        reply = asked.result(20)
    assert (ids(reply), reply["passed_over"]) == ([third], 0)
    nothing = endings(hello, after=reply["cursor"], wait_s=0.05)
    assert (ids(nothing), nothing["cursor"]) == ([], reply["cursor"]), "the time is over"
    assert hello.call("GET", ENDINGS, params={"after": "yesterday"}).status_code == 400


def test_pages_are_cut_at_their_limit_and_go_on_at_their_cursor(hello: GatewayProcess) -> None:
    start = settled(hello)
    calls = [call(hello, name) for name in ("hello", "other", "hello", "other", "hello")]
    settled(hello)
    cursor, seen = start, []
    while page := ids(reply := endings(hello, after=cursor, limit=2)):
        assert len(page) <= 2
        seen += page
        cursor = reply["cursor"]
    assert sorted(seen) == sorted(calls)
    assert len(seen) == len(set(seen))
    named = endings(hello, after=start, name="other", limit=1)
    assert ids(named) + ids(endings(hello, after=named["cursor"], name="other")) == [calls[1], calls[3]]


def test_a_request_by_name_is_not_answered_for_other_actions(hello: GatewayProcess, valkey_url: str) -> None:
    start = settled(hello)
    with ThreadPoolExecutor(1) as pool:
        asked = held(pool, valkey_url, lambda: endings(hello, after=start, name="hello", wait_s=30))
        call(hello, "other")
        wanted = call(hello)
        assert ids(asked.result(20)) == [wanted]


def test_a_record_is_held_for_until_its_activation_has_ended(
    hello: GatewayProcess, invoker: FakeInvoker, valkey_url: str
) -> None:
    may_end = threading.Event()

    def run(value: Any) -> tuple[int, Any]:
        may_end.wait(20)
        return 200, {"n": 1}

    invoker.function = run
    begun = hello.call("POST", "/api/v1/namespaces/_/actions/hello", json={}).json()["activationId"]
    with ThreadPoolExecutor(1) as pool:
        asked = held(pool, valkey_url, lambda: hello.call("GET", f"{LIST}/{begun}?wait_s=30", timeout=60))
        may_end.set()
        assert asked.result(20).json()["response"]["result"] == {"n": 1}
    assert hello.call("GET", f"{LIST}/{'0' * 32}?wait_s=0.05").status_code == 404


def test_a_record_of_another_namespace_is_waited_for_like_one_that_is_not_there(
    hello: GatewayProcess, valkey_url: str
) -> None:
    theirs = call(hello)
    settled(hello)

    def ask() -> requests.Response:
        headers = {"Authorization": f"Bearer {OTHER_KEY}"}
        return requests.get(f"{hello.url}{LIST}/{theirs}?wait_s=30", headers=headers, timeout=60)

    with ThreadPoolExecutor(1) as pool, redis.Redis.from_url(valkey_url) as client:
        asked, tick = pool.submit(ask), threading.Event()
        while not asked.done() and client.pubsub_numsub("thaw:ended:other")[0][1] == 0:
            tick.wait(0.01)
        assert not asked.done(), "it is held"
        hello.process.terminate()  # or it would be held for half a minute
        assert asked.result(20).status_code == 404
        hello.process.wait(20)


def test_a_held_request_ends_when_its_gateway_does(hello: GatewayProcess, valkey_url: str) -> None:
    start = settled(hello)
    with ThreadPoolExecutor(1) as pool:
        asked = held(pool, valkey_url, lambda: endings(hello, after=start, wait_s=30))
        hello.process.terminate()
        assert ids(asked.result(20)) == []
        hello.process.wait(20)


def test_the_place_of_a_client_that_hung_up_is_free_at_once(hello: GatewayProcess, valkey_url: str) -> None:
    start = settled(hello)
    with redis.Redis.from_url(valkey_url) as client:

        def until_listening(n: int, most_s: float) -> None:
            tick, until_s = threading.Event(), time.monotonic() + most_s
            while client.pubsub_numsub("thaw:ended:guest")[0][1] != n:
                assert time.monotonic() < until_s
                tick.wait(0.05)

        with connect(hello) as leaves:
            leaves.sendall(head("GET", f"{ENDINGS}?after={start}&wait_s=30"))
            until_listening(1, 25)
        until_listening(0, 15)  # it would be held for longer


def test_the_command_line_follows_calls_as_they_end_each_once_and_in_a_burst_all(
    hello: GatewayProcess, valkey_url: str
) -> None:
    call(hello)
    settled(hello)
    client = Client(Target(hello.url, KEY, ""))
    calls = ended(client, name="hello")
    with ThreadPoolExecutor(1) as pool, redis.Redis.from_url(valkey_url) as state:
        asked = held(pool, valkey_url, lambda: next(calls))
        records = Records(state)
        now_ms = int(time.time() * 1000)
        burst = [replaced(n, now_ms - n) for n in range(1, 451)]  # each began before the one that ended before it
        records.end_all([Ended(one) for one in burst])
        following = [asked.result(20)["activationId"]]
        while len(following) < len(burst):
            following.append(pool.submit(next, calls).result(20)["activationId"])
    assert following == [one.activation_id for one in burst]
    assert list(ended(client, for_s=0.05)) == []
    since = [one["activationId"] for one in ended(client, since_ms=1, for_s=0.5)]
    assert len(since) == len(set(since)) == 451


def replaced(n: int, start_ms: int) -> Activation:
    return replace(record(f"{n:032x}", start_ms), action=ActionName("guest/hello"))


def test_calls_whose_records_gave_way_are_passed_over(start_gateway: Start, valkey_url: str) -> None:
    gateway = start_gateway(THAW_QUOTA_RECORDS="2")
    start = str(endings(gateway)["cursor"])
    with redis_link.connect(valkey_url) as client:
        own = Quotas(10, 10**9, 10**9, 10, 10, 10, records=2)
        records = Records(client, storage=Storage(client, lambda _: own))
        for n in range(1, 7):  # the records of one transaction all stay
            records.end_all([Ended(replaced(n, n))])
    reply = endings(gateway, after=start)
    assert (ids(reply), reply["passed_over"]) == ([f"{n:032x}" for n in (5, 6)], 4)
    assert endings(gateway, after=reply["cursor"])["passed_over"] == 0
    other = endings(gateway, after=start, name="another")
    assert (ids(other), other["passed_over"]) == ([], 0)


@pytest.mark.parametrize("wait_s", ["31", "-1", "nan", "x"])
def test_a_wait_that_cannot_be_is_refused(gateway: GatewayProcess, wait_s: str) -> None:
    assert gateway.call("GET", ENDINGS, params={"wait_s": wait_s}).status_code == 400
