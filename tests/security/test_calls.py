"""A tenant's requests other than invocations have limits, too, and lists contain no code."""

from __future__ import annotations

import base64
import io
import json
import os
import signal
import threading
import time
import zipfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace

import pytest
import redis
import requests

from relay.state import keys
from relay.state.code import UNNAMED_TTL_S
from relay.state.records import Records
from tests.gateway.conftest import KEY, OTHER_KEY, GatewayProcess, add_key
from tests.relay.samples import record
from tests.security.slow import connect, crowd, head, read_to_end, status_of, worker_pid
from thaw.action import Action, Exec, Limits
from thaw.ids import ActionName, Namespace

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


def test_lists_of_long_records_take_bounded_memory_also_when_nobody_reads_them(
    start: Callable[..., GatewayProcess], valkey_url: str
) -> None:
    path = f"{NAMESPACES}/_/activations"
    with redis.Redis.from_url(valkey_url) as client:
        for i in range(100):
            one = record(f"{i:032x}", start_ms=1_000 + i)
            Records(client).end(replace(one, result={"x": "y" * MIB}))
        gateway = start()
        assert gateway.call("GET", NAMESPACES).status_code == 200
        pid = worker_pid(gateway)
        before = status_of(pid, "VmHWM")
        shown = gateway.call("GET", f"{path}?limit=200").json()
        assert [r["start"] for r in shown] == [1_000 + i for i in reversed(range(100))]
        with crowd(gateway, 20, head("GET", f"{path}?docs=true&limit=200")):
            whole = gateway.call("GET", f"{path}?docs=true&limit=200").json()
        assert [r["start"] for r in whole] == [r["start"] for r in shown]
        assert {len(r["response"]["result"]["x"]) for r in whole} == {MIB}
        assert status_of(pid, "VmHWM") < before + 256 * 1024


def test_a_list_leaves_out_what_it_cannot_read_and_says_so_also_after_its_first_part(
    start: Callable[..., GatewayProcess], valkey_url: str
) -> None:
    path = f"{NAMESPACES}/_/activations?limit=9"
    with redis.Redis.from_url(valkey_url) as client:
        for i in range(4):
            one = record(f"{i:032x}", start_ms=1_000 + i)
            Records(client).end(replace(one, result={"x": "y" * MIB}))
        client.set(keys.activation(f"{1:032x}"), "{")
        gateway = start()
        for query in ("", "&docs=true"):
            assert [r["start"] for r in gateway.call("GET", path + query).json()] == [1_003, 1_002, 1_000]
            assert gateway.wait_for_event("records_unreadable")["n"] == 1
        client.delete(keys.activation(f"{1:032x}"))
        client.lpush(keys.activation(f"{1:032x}"), "no string: the state server answers with an error")
        with pytest.raises(requests.exceptions.ChunkedEncodingError):
            gateway.call("GET", f"{path}&docs=true")
        assert "read records" in gateway.wait_for_event("list_cut")["error"]


@pytest.mark.parametrize("char", ["#", "\u4e2d", "\U0001f9ca"], ids=["ascii", "two-bytes", "four-bytes"])
def test_long_code_takes_bounded_memory_also_in_answers_that_nobody_reads(
    start: Callable[..., GatewayProcess], char: str
) -> None:
    gateway = start()
    assert gateway.call("GET", NAMESPACES).status_code == 200
    pid = worker_pid(gateway)
    before = status_of(pid, "VmHWM")
    code = char * (45 * MIB // len(char.encode()))
    body = json.dumps({"exec": {"kind": "python:3.11", "code": code}}, ensure_ascii=False).encode()
    path = f"{NAMESPACES}/_/actions/long"
    assert gateway.call("PUT", path, data=body).json()["exec"]["code"] == code
    with crowd(gateway, 20, head("GET", path)):
        assert len(gateway.call("GET", f"{path}?code=false").content) < 10_000
        assert gateway.call("GET", path).json()["exec"]["code"] == code
    assert status_of(pid, "VmHWM") < before + 150 * 1024


def test_a_long_zip_takes_bounded_memory(start: Callable[..., GatewayProcess]) -> None:
    gateway = start()
    assert gateway.call("GET", NAMESPACES).status_code == 200
    pid = worker_pid(gateway)
    before = status_of(pid, "VmHWM")
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w") as archive:
        archive.writestr("__main__.py", "def main(args): return args\n")
        archive.writestr("data", bytes(33 * MIB))
        archive.writestr("requirements.txt", "numpy\n")
        archive.writestr("virtualenv/lib/python3.11/site-packages/numpy.py", "")
    body = {"exec": {"kind": "python:3.11", "code": base64.b64encode(data.getvalue()).decode()}}
    reply = gateway.call("PUT", f"{NAMESPACES}/_/actions/zip", json=body)
    assert reply.json()["exec"]["binary"] is True
    assert reply.json()["exec"]["code"] == body["exec"]["code"]
    assert status_of(pid, "VmHWM") < before + 150 * 1024


def test_code_is_read_as_fast_as_its_client_reads_and_no_thread_waits(start: Callable[..., GatewayProcess]) -> None:
    gateway = start(THAW_GATEWAY_THREADS="4", THAW_GATEWAY_ANSWER_S="100")
    path = f"{NAMESPACES}/_/actions/long"
    code = "#" * (20 * MIB)
    assert gateway.call("PUT", path, json={"exec": {"kind": "python:3.11", "code": code}}).status_code == 200
    with ExitStack() as stack:
        unread = [stack.enter_context(connect(gateway)) for _ in range(16)]
        for sock in unread:
            sock.sendall(head("GET", path, "Connection: close"))
        for _ in range(3):
            assert gateway.call("GET", NAMESPACES).status_code == 200
        found = read_to_end(unread[0])
    assert found.count(b"#") == len(code)
    assert found.endswith(b"\r\n0\r\n\r\n")


def test_an_answer_that_is_made_as_it_is_read_ends_as_its_client_expects(start: Callable[..., GatewayProcess]) -> None:
    gateway = start()
    path = f"{NAMESPACES}/_/actions/long"
    body = {"exec": {"kind": "python:3.11", "code": "#" * (5 * MIB)}}
    assert gateway.call("PUT", path, json=body).status_code == 200
    assert gateway.call("HEAD", path).status_code == 200
    with connect(gateway) as old:
        old.sendall(head("GET", path).replace(b"HTTP/1.1", b"HTTP/1.0"))
        plain = json.loads(read_to_end(old).partition(b"\r\n\r\n")[2])
    assert plain["exec"]["code"] == body["exec"]["code"]  # type: ignore[index]
    with connect(gateway) as sock:
        sock.sendall(head("GET", path) + head("GET", NAMESPACES, "Connection: close"))
        both = read_to_end(sock)
    assert both.count(b"HTTP/1.1 200 OK") == 2
    assert both.endswith(b'["guest"]')


def test_code_that_goes_while_it_is_read_cuts_its_answer(start: Callable[..., GatewayProcess], valkey_url: str) -> None:
    gateway = start()
    path = f"{NAMESPACES}/_/actions/long"
    body = {"exec": {"kind": "python:3.11", "code": "#" * (20 * MIB)}}
    assert gateway.call("PUT", path, json=body).status_code == 200
    with connect(gateway) as sock, redis.Redis.from_url(valkey_url) as client:
        sock.sendall(head("GET", path))
        assert sock.recv(1000).startswith(b"HTTP/1.1 200 OK")
        client.delete(*client.keys("thaw:code:*"))
        assert not read_to_end(sock).endswith(b"0\r\n\r\n")
    lost = gateway.call("GET", path)
    assert (lost.status_code, lost.json()["error"]) == (500, "The code of the action is lost: deploy the action again.")
    deleted = gateway.call("DELETE", path)
    assert (deleted.status_code, "code" in deleted.json()["exec"]) == (200, False), "it has been deleted"
    assert gateway.call("GET", path).status_code == 404


def test_deletions_do_not_cut_the_answers_of_one_another(start: Callable[..., GatewayProcess]) -> None:
    gateway = start()
    for name, n_bytes in (("a", 20 * MIB), ("b", 100_000), ("c", 100_000)):
        body = {"exec": {"kind": "python:3.11", "code": "#" * n_bytes}}
        assert gateway.call("PUT", f"{NAMESPACES}/_/actions/{name}", json=body).status_code == 200
    with connect(gateway) as sock:
        sock.sendall(head("DELETE", f"{NAMESPACES}/_/actions/a", "Connection: close"))
        assert sock.recv(1000).startswith(b"HTTP/1.1 200 OK")
        for name in "bc":
            assert gateway.call("DELETE", f"{NAMESPACES}/_/actions/{name}").status_code == 200
        assert read_to_end(sock).endswith(b"\r\n0\r\n\r\n")


def test_actions_of_before_code_was_kept_in_pieces_take_bounded_memory(
    start: Callable[..., GatewayProcess], valkey_url: str
) -> None:
    gateway = start()
    assert gateway.call("GET", NAMESPACES).status_code == 200
    pid = worker_pid(gateway)
    before = status_of(pid, "VmHWM")
    with redis.Redis.from_url(valkey_url) as client:
        exec_ = Exec("python:3.11", "\u4e2d" * (15 * MIB))
        old = Action(ActionName("guest/old"), Namespace("guest"), "0.0.1", exec_, Limits())
        Records(client).put_action(old, last=None)
    url = f"{gateway.url}{NAMESPACES}/_/actions/old"

    def ask(method: str) -> int:
        user, _, password = KEY.partition(":")
        with requests.request(method, url, auth=(user, password), stream=True, timeout=50) as reply:
            return reply.status_code

    with ThreadPoolExecutor(6) as pool:
        statuses = list(pool.map(ask, ["GET"] * 6))
    assert set(statuses) <= {200, 429}
    assert 200 in statuses
    assert status_of(pid, "VmHWM") < before + 256 * 1024
    until_s, tick = time.monotonic() + 60, threading.Event()
    while (last := gateway.call("GET", f"{NAMESPACES}/_/actions/old")).status_code == 429:
        assert time.monotonic() < until_s, "clients that hang up give their memory back"
        tick.wait(0.05)
    assert len(last.json()["exec"]["code"]) == 15 * MIB


def test_answers_whose_clients_hang_up_give_their_memory_back(start: Callable[..., GatewayProcess]) -> None:
    gateway = start()
    path = f"{NAMESPACES}/_/actions/long"
    parameters = [{"key": "a", "value": "#" * 1_000_000}]
    body = {"exec": {"kind": "python:3.11", "code": "#" * (5 * MIB)}, "parameters": parameters}
    assert gateway.call("PUT", path, json=body).status_code == 200
    for _ in range(70):
        with connect(gateway) as sock:
            sock.sendall(head("GET", path))
            assert sock.recv(1000).startswith(b"HTTP/1.1 200 OK")
    assert gateway.call("GET", path).status_code == 200


def test_a_gateway_that_is_killed_in_a_put_leaves_nothing_that_stays(
    start: Callable[..., GatewayProcess], valkey_url: str
) -> None:
    gateway = start()
    pid = worker_pid(gateway)
    body = json.dumps({"exec": {"kind": "python:3.11", "code": "#" * (40 * MIB)}}).encode()
    with redis.Redis.from_url(valkey_url) as client, redis.Redis.from_url(valkey_url) as other:
        watch = client.pubsub()
        client.config_set("notify-keyspace-events", "Kh")
        watch.psubscribe("__keyspace@0__:thaw:code:*")
        assert watch.get_message(timeout=60) is not None, "no confirmation"
        with connect(gateway) as sock:
            path = f"{NAMESPACES}/_/actions/long"
            sock.sendall(head("PUT", path, f"Content-Length: {len(body)}") + body)
            assert watch.get_message(timeout=60) is not None
            os.kill(pid, signal.SIGKILL)
        watch.close()
        (left,) = other.keys("thaw:code:*")
        assert 0 < int(other.ttl(left)) <= UNNAMED_TTL_S
        assert not other.exists(keys.actions("guest"))


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"exec": {"kind": "ruby", "code": "#" * (2 * MIB)}}, "'ruby' is not supported"),
        ({"exec": {"kind": "python:3.11", "code": "#" * 100_000}, "limits": {"memory": 1}}, "limits.memory: 1 MB"),
        ({"exec": {"kind": "python:3.11", "code": "#" * (2 * MIB), "main": 5}}, "exec.main must be a string"),
        ({"exec": {"kind": "llm:vllm", "code": " " * (2 * MIB)}}, "a config of 2097152 > 1048576 bytes"),
        (
            {"parameters": [{"key": "a", "value": "#" * (2 * MIB)}]},
            "a string beside exec.code has more than 1048576 bytes (THAW_PARAMETERS_BYTES",
        ),
        ({"exec": {"kind": "python:3.11", "code": "#" * (6 * MIB)}}, "> 5242880 bytes"),
        (
            {"exec": {"kind": "python:3.11", "code": "#" * (2 * MIB), "main": "m" * (2 * MIB)}},
            "two strings have more than 1048576 bytes",
        ),
    ],
)
def test_long_code_that_is_refused_is_not_kept(
    start: Callable[..., GatewayProcess], valkey_url: str, body: dict[str, object], said: str
) -> None:
    gateway = start(THAW_CODE_BYTES=str(5 * MIB))
    reply = gateway.call("PUT", f"{NAMESPACES}/_/actions/long", json=body)
    assert reply.status_code in (400, 413)
    assert said in reply.json()["error"]
    with redis.Redis.from_url(valkey_url) as client:
        assert client.keys("thaw:code:*") == []


def test_code_is_replaced_and_deleted_with_its_action(start: Callable[..., GatewayProcess], valkey_url: str) -> None:
    gateway = start()
    path = f"{NAMESPACES}/_/actions/long"
    with redis.Redis.from_url(valkey_url) as client:

        def lifetimes() -> list[int]:
            return sorted(int(client.ttl(key)) for key in client.keys("thaw:code:*"))

        def put(body: dict[str, object]) -> None:
            assert gateway.call("PUT", f"{path}?overwrite=true", json=body).status_code == 200

        put({"exec": {"kind": "python:3.11", "code": "a" * 100_000}})
        assert lifetimes() == [-1]
        put({"limits": {"memory": 512}})
        assert lifetimes() == [-1]
        assert gateway.call("GET", path).json()["exec"]["code"] == "a" * 100_000
        put({"exec": {"kind": "python:3.11", "code": "b" * (2 * MIB)}})
        assert lifetimes()[0] == -1
        assert 0 < lifetimes()[1] <= UNNAMED_TTL_S
        assert gateway.call("DELETE", path).json()["exec"]["code"] == "b" * (2 * MIB)
        assert lifetimes()[0] > 0
        put({"exec": {"kind": "python:3.11", "code": "short"}})
        assert lifetimes()[0] > 0
        assert gateway.call("GET", path).json()["exec"]["code"] == "short"
