"""Requests that are held until a record is written, so that followers of a namespace's calls get no empty lists."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import pytest

from relay.state import redis_link
from relay.state.records import Ended, Records
from relay.state.storage import Storage
from tests.gateway.conftest import KEY, OTHER_KEY, GatewayProcess, Start
from tests.gateway.waits import until
from tests.relay.samples import record
from tests.security.slow import connect, head
from thaw.activation import Activation
from thaw.cli.platform_api.client import Client
from thaw.cli.platform_api.following import ended
from thaw.cli.platform_api.property_file import Target
from thaw.ids import ActionName
from thaw.quotas import Quotas

LIST = "/api/v1/namespaces/_/activations"
ENDINGS = "/api/v1/namespaces/_/endings"


@pytest.fixture
def hello(gateway: GatewayProcess) -> GatewayProcess:
    gateway.serve_python("hello", "other")
    return gateway


def call(gateway: GatewayProcess, name: str = "hello") -> str:
    reply = gateway.invoke(name)
    gateway.record(reply)
    return str(reply.json()["activationId"])


def held(gateway: GatewayProcess, ask: Callable[[], Any], namespace: str = "guest") -> Future[Any]:
    """Send a request, and return when it listens for records."""
    asked = gateway.soon(ask)
    until(lambda: asked.done() or n_listening(gateway, namespace), most_s=60)
    return asked


def n_listening(gateway: GatewayProcess, namespace: str = "guest") -> int:
    return int(gateway.invoker.client.pubsub_numsub(f"thaw:ended:{namespace}")[0][1])


def endings(gateway: GatewayProcess, **query: Any) -> dict[str, Any]:
    return dict(gateway.read("endings", params=query, timeout=60))


def ids(reply: dict[str, Any]) -> list[str]:
    return [one["activationId"] for one in reply["activations"]]


def settled(gateway: GatewayProcess) -> str:
    """The cursor of now, after the records of all calls so far."""
    gateway.call("GET", LIST)  # this request waits for the records
    return str(endings(gateway)["cursor"])


def test_what_ended_after_a_cursor_is_answered_at_once_and_then_the_request_is_held(hello: GatewayProcess) -> None:
    call(hello)
    start = settled(hello)
    second = call(hello)
    cursor = settled(hello)
    assert ids(endings(hello, after=start, wait_s=30)) == [second]
    assert ids(endings(hello, after=start)) == [second], "a cursor can be used again"
    asked = held(hello, lambda: endings(hello, after=cursor, wait_s=30))
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


def test_a_request_by_name_is_not_answered_for_other_actions(hello: GatewayProcess) -> None:
    start = settled(hello)
    asked = held(hello, lambda: endings(hello, after=start, name="hello", wait_s=30))
    call(hello, "other")
    wanted = call(hello)
    assert ids(asked.result(20)) == [wanted]


def test_a_record_is_held_for_until_its_activation_has_ended(hello: GatewayProcess) -> None:
    may_end = threading.Event()

    def run(value: Any) -> tuple[int, Any]:
        may_end.wait(20)
        return 200, {"n": 1}

    hello.invoker.function = run
    begun = hello.call("POST", "/api/v1/namespaces/_/actions/hello", json={}).json()["activationId"]
    asked = held(hello, lambda: hello.call("GET", f"{LIST}/{begun}?wait_s=30", timeout=60))
    may_end.set()
    assert asked.result(20).json()["response"]["result"] == {"n": 1}
    assert hello.call("GET", f"{LIST}/{'0' * 32}?wait_s=0.05").status_code == 404


def test_a_record_of_another_namespace_is_waited_for_like_one_that_is_not_there(hello: GatewayProcess) -> None:
    theirs = call(hello)
    settled(hello)

    path = f"{LIST}/{theirs}?wait_s=30"
    asked = held(hello, lambda: hello.call("GET", path, key=OTHER_KEY, timeout=60), "other")
    assert not asked.done(), "it is held"
    hello.process.terminate()  # or it would be held for half a minute
    assert asked.result(20).status_code == 404
    hello.process.wait(20)


def test_the_place_of_a_client_that_hung_up_is_free_at_once(hello: GatewayProcess) -> None:
    start = settled(hello)
    with connect(hello) as leaves:
        leaves.sendall(head("GET", f"{ENDINGS}?after={start}&wait_s=30"))
        until(lambda: n_listening(hello) == 1, most_s=25)
    until(lambda: n_listening(hello) == 0, most_s=15)  # it would be held for longer


def test_the_command_line_follows_calls_as_they_end_each_once_and_in_a_burst_all(hello: GatewayProcess) -> None:
    call(hello)
    settled(hello)
    client = Client(Target(hello.url, KEY, ""))
    calls = ended(client, name="hello")
    asked = held(hello, lambda: next(calls))
    now_ms = int(time.time() * 1000)
    burst = [replaced(n, now_ms - n) for n in range(1, 451)]  # each began before the one that ended before it
    Records(hello.invoker.client).end_all([Ended(one) for one in burst])
    following = [asked.result(20)["activationId"]]
    while len(following) < len(burst):
        following.append(hello.soon(next, calls).result(20)["activationId"])
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
def test_a_wait_that_cannot_be_is_refused(shared_gateway: GatewayProcess, wait_s: str) -> None:
    assert shared_gateway.call("GET", ENDINGS, params={"wait_s": wait_s}).status_code == 400
