"""Requests that are held until a record is written: whoever follows a namespace's calls asks for no list in vain."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import redis

from gateway.serving.held import until_news
from relay.state.endings import Endings
from tests.gateway.conftest import KEY, GatewayProcess
from tests.gateway.fake_invoker import FakeInvoker
from thaw.cli.client import Client
from thaw.cli.following import ended
from thaw.cli.properties import Target
from thaw.errors import Throttled
from thaw.ids import Namespace

LIST = "/api/v1/namespaces/_/activations"


@pytest.fixture
def hello(gateway: GatewayProcess, invoker: FakeInvoker) -> GatewayProcess:
    for i, name in enumerate(("hello", "other")):
        gateway.put_python(name)
        invoker.ready(f"guest/{name}", instance=f"i{i}")
    gateway.wait_for_routes(2)
    return gateway


def call(gateway: GatewayProcess, name: str = "hello") -> str:
    reply = gateway.call("POST", f"/api/v1/namespaces/_/actions/{name}?blocking=true", json={})
    return str(reply.json()["activationId"])


def held(pool: ThreadPoolExecutor, state_url: str, ask: Callable[[], Any]) -> Future[Any]:
    """Send a request, and return when it listens for records."""
    with redis.Redis.from_url(state_url) as client:
        asked, tick = pool.submit(ask), threading.Event()
        while not asked.done() and client.pubsub_numsub("thaw:ended:guest")[0][1] == 0:
            tick.wait(0.01)
    return asked


def ids(gateway: GatewayProcess, query: str) -> list[str]:
    reply = gateway.call("GET", f"{LIST}?{query}", timeout=60)
    assert reply.status_code == 200, reply.text
    return [record["activationId"] for record in reply.json()]


def test_a_list_is_held_until_it_has_another_number_of_records_than_the_caller_knows(
    hello: GatewayProcess, valkey_url: str
) -> None:
    first = call(hello)
    assert ids(hello, "known=0&wait_s=30") == [first], "what the caller does not have yet is answered at once"
    with ThreadPoolExecutor(1) as pool:
        asked = held(pool, valkey_url, lambda: ids(hello, "known=1&wait_s=30"))
        assert not asked.done()
        second = call(hello)
        assert asked.result(20) == [second, first]
    assert ids(hello, "known=2&wait_s=0.05") == [second, first], "the time is over"


def test_a_list_by_name_is_not_woken_by_records_of_other_actions(hello: GatewayProcess, valkey_url: str) -> None:
    with ThreadPoolExecutor(1) as pool:
        asked = held(pool, valkey_url, lambda: ids(hello, "name=hello&wait_s=30"))
        call(hello, "other")
        wanted = call(hello)
        assert asked.result(20) == [wanted]


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


def test_the_command_line_follows_calls_as_they_end_each_once(hello: GatewayProcess) -> None:
    call(hello)
    client = Client(Target(hello.url, KEY, ""))
    with ThreadPoolExecutor(1) as pool:
        calls = ended(client, name="hello")
        asked = pool.submit(next, calls)
        n = 0
        while not asked.done() and n < 20:  # the first may have ended before anybody asked
            call(hello, "other")
            last, n = call(hello), n + 1
        following = [asked.result(20)["activationId"]]
        while following[-1] != last:
            following.append(pool.submit(next, calls).result(20)["activationId"])
    assert len(following) == len(set(following))
    assert list(ended(client, for_s=0.05)) == []
    assert len(list(ended(client, since_ms=1, for_s=0.5))) == 1 + 2 * n


@pytest.mark.parametrize("wait_s", ["31", "-1", "nan", "x"])
def test_a_wait_that_cannot_be_is_refused(gateway: GatewayProcess, wait_s: str) -> None:
    assert gateway.call("GET", LIST, params={"wait_s": wait_s}).status_code == 400


def test_too_many_listeners_of_one_or_of_all_namespaces_are_refused_until_others_end(valkey_url: str) -> None:
    endings = Endings(valkey_url, most=3, most_of_one=2)
    one, two, three = map(Namespace, ("one", "two", "three"))
    with endings.heard(one), endings.heard(one):
        with pytest.raises(Throttled), endings.heard(one):
            pass
        with endings.heard(two) as heard:
            with pytest.raises(Throttled), endings.heard(three):
                pass
            assert not heard(0.0)
    with endings.heard(three) as heard:
        assert not heard(0.0)


def test_a_record_that_comes_before_anybody_listens_is_not_waited_for() -> None:
    class Silent:
        """Nothing is said any more."""

        @contextmanager
        def heard(self, _namespace: Namespace) -> Iterator[Callable[[float], bool]]:
            yield lambda _wait_s: False

    seen = iter([0, 1])
    found = until_news(Silent(), Namespace("guest"), 30.0, lambda: next(seen), bool)  # type: ignore[arg-type]
    assert found == 1
