"""What a tenant asks beside invocations has limits, too, and lists carry no code."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest
import requests

from tests.gateway.conftest import KEY, OTHER_KEY, GatewayProcess, add_key
from tests.security.slow import crowd, head, status_of, worker_pid

NAMESPACES = "/api/v1/namespaces"
MIB = 1024 * 1024


@pytest.fixture
def start(valkey_url: str) -> Iterator[Callable[..., GatewayProcess]]:
    add_key(valkey_url, KEY, "guest")
    add_key(valkey_url, OTHER_KEY, "other")
    with ExitStack() as stack:

        def start(**environ: str) -> GatewayProcess:
            gateway = GatewayProcess(valkey_url, **environ)
            stack.callback(gateway.end)
            return gateway

        yield start


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", NAMESPACES),
        ("GET", f"{NAMESPACES}/_/actions"),
        ("GET", f"{NAMESPACES}/_/activations?count=true"),
        ("DELETE", f"{NAMESPACES}/_/actions/none"),
        ("GET", "/v1/models"),
        ("GET", f"{NAMESPACES}/_/activations"),
        ("POST", f"{NAMESPACES}/_/actions/none"),
        ("POST", "/v1/chat/completions"),
    ],
)
def test_every_request_with_a_key_counts_in_its_minute(
    start: Callable[..., GatewayProcess], method: str, path: str
) -> None:
    gateway = start(THAW_CALLS_PER_MINUTE="3")
    replies = [gateway.call(method, path) for _ in range(7)]  # a minute may end in between
    refused = [r for r in replies if r.status_code == 429]
    assert len(refused) >= 1
    assert "Too many requests in the last minute (count: 4, allowed: 3)." in refused[0].text
    assert int(refused[0].headers["Retry-After"]) <= 60
    other = requests.get(gateway.url + NAMESPACES, auth=tuple(OTHER_KEY.split(":")), timeout=30)  # type: ignore[arg-type]
    assert other.status_code == 200
    assert requests.get(f"{gateway.url}/health", timeout=30).status_code == 200


def test_requests_at_once_have_a_limit_and_are_counted_out(start: Callable[..., GatewayProcess]) -> None:
    gateway = start(THAW_CALLS_CONCURRENT="1")
    for path in (NAMESPACES, f"{NAMESPACES}/other/actions", "/v1/models/none", NAMESPACES):
        assert gateway.call("GET", path).status_code in (200, 403, 404)
    with ThreadPoolExecutor(16) as pool:
        statuses = list(pool.map(lambda _: gateway.call("GET", f"{NAMESPACES}/_/actions").status_code, range(200)))
    assert set(statuses) <= {200, 429}
    assert gateway.call("GET", NAMESPACES).status_code == 200


def test_lists_of_actions_with_much_code_cost_no_more_than_one_of_them(start: Callable[..., GatewayProcess]) -> None:
    gateway = start()
    for i in range(8):
        body = {"exec": {"kind": "python:3.11", "code": "#" * (16 * MIB)}}
        assert gateway.call("PUT", f"{NAMESPACES}/_/actions/a{i}", json=body).status_code == 200
    fresh = start()  # the other one's memory has been in use
    assert fresh.call("GET", NAMESPACES).status_code == 200
    pid = worker_pid(fresh)
    before = status_of(pid, "VmHWM")
    reply = fresh.call("GET", f"{NAMESPACES}/_/actions")
    assert [a["name"] for a in reply.json()] == [f"a{i}" for i in reversed(range(8))]
    assert len(reply.content) < 10_000
    assert fresh.chat(model="none").status_code == 404  # looks for an action with this served name
    assert status_of(pid, "VmHWM") < before + 100 * 1024


def test_long_code_takes_bounded_memory_also_in_answers_that_nobody_reads(
    start: Callable[..., GatewayProcess],
) -> None:
    gateway = start()
    assert gateway.call("GET", NAMESPACES).status_code == 200
    pid = worker_pid(gateway)
    before = status_of(pid, "VmHWM")
    body = {"exec": {"kind": "python:3.11", "code": "#" * (45 * MIB)}}
    path = f"{NAMESPACES}/_/actions/long"
    assert gateway.call("PUT", path, json=body).status_code == 200
    assert status_of(pid, "VmHWM") < before + 256 * 1024
    with crowd(gateway, 20, head("GET", path)):
        assert len(gateway.call("GET", f"{path}?code=false").content) < 10_000
    reply = gateway.call("GET", path)
    assert reply.status_code in (200, 429)
    assert status_of(pid, "VmHWM") < before + 384 * 1024


def test_answers_with_code_share_a_memory_and_give_it_back(start: Callable[..., GatewayProcess]) -> None:
    gateway = start()
    path = f"{NAMESPACES}/_/actions/long"
    body = {"exec": {"kind": "python:3.11", "code": "#" * (20 * MIB)}}
    assert gateway.call("PUT", path, json=body).status_code == 200
    session_auth = tuple(KEY.split(":"))

    def ask(_: int) -> requests.Response:
        return requests.get(gateway.url + path, auth=session_auth, timeout=60)  # type: ignore[arg-type]

    with ThreadPoolExecutor(8) as pool:
        replies = list(pool.map(ask, range(8)))
    assert {r.status_code for r in replies} == {200, 429}
    assert all(len(r.content) > 20 * MIB for r in replies if r.status_code == 200)
    assert ask(0).status_code == 200
