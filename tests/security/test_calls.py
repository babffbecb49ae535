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
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace

import pytest
import redis
import requests

from relay.state import keys
from relay.state.code import UNNAMED_TTL_S
from relay.state.records import Records
from tests.gateway.conftest import KEY, OTHER_KEY
from tests.relay.samples import record
from tests.security.slow import (
    ACTIONS,
    NAMESPACES,
    PYTHON,
    Start,
    assert_serves,
    connect,
    credentials,
    crowd,
    head,
    memory_bounded,
    put_code,
    read_to_end,
    worker_pid,
)
from thaw.action import Action, Exec, Limits
from thaw.ids import ActionName, Namespace

LONG = f"{ACTIONS}/long"
MIB = 1024 * 1024


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", NAMESPACES),
        ("GET", ACTIONS),
        ("GET", f"{NAMESPACES}/_/activations?count=true"),
        ("DELETE", f"{ACTIONS}/none"),
        ("GET", "/v1/models"),
        ("GET", f"{NAMESPACES}/_/activations"),
        ("POST", f"{ACTIONS}/none"),
        ("POST", "/v1/chat/completions"),
    ],
)
def test_every_request_with_a_key_counts_in_its_minute(start: Start, method: str, path: str) -> None:
    gateway = start(THAW_CALLS_PER_MINUTE="3")
    replies = [gateway.call(method, path) for _ in range(7)]  # a minute may end in between
    refused = [r for r in replies if r.status_code == 429]
    assert len(refused) >= 1
    assert "Too many requests in the last minute (count: 4, allowed: 3)." in refused[0].text
    assert int(refused[0].headers["Retry-After"]) <= 60
    assert gateway.call("GET", NAMESPACES, auth=credentials(OTHER_KEY)).status_code == 200
    assert_serves(gateway)


def test_requests_at_once_have_a_limit_and_are_counted_out(start: Start) -> None:
    gateway = start(THAW_CALLS_CONCURRENT="1")
    for path in (NAMESPACES, f"{NAMESPACES}/other/actions", "/v1/models/none", NAMESPACES):
        assert gateway.call("GET", path).status_code in (200, 403, 404)
    with ThreadPoolExecutor(16) as pool:
        statuses = list(pool.map(lambda _: gateway.call("GET", ACTIONS).status_code, range(200)))
    assert set(statuses) <= {200, 429}
    assert gateway.call("GET", NAMESPACES).status_code == 200


def test_lists_of_actions_with_much_code_cost_no_more_than_one_of_them(start: Start) -> None:
    gateway = start()
    for i in range(8):
        put_code(gateway, "#" * (16 * MIB), f"a{i}")
    fresh = start()  # the other one's memory has been in use
    with memory_bounded(fresh, 100):
        reply = fresh.call("GET", ACTIONS)
        assert [a["name"] for a in reply.json()] == [f"a{i}" for i in reversed(range(8))]
        assert len(reply.content) < 10_000
        assert fresh.chat(model="none").status_code == 404  # looks for an action with this served name


def put_records(client: redis.Redis, n: int) -> None:
    for i in range(n):
        Records(client).end(replace(record(f"{i:032x}", start_ms=1_000 + i), result={"x": "y" * MIB}))


def test_lists_of_long_records_take_bounded_memory_also_when_nobody_reads_them(start: Start, valkey_url: str) -> None:
    path = f"{NAMESPACES}/_/activations"
    with redis.Redis.from_url(valkey_url) as client:
        put_records(client, 100)
    gateway = start()
    with memory_bounded(gateway, 256):
        shown = gateway.call("GET", f"{path}?limit=200").json()
        assert [r["start"] for r in shown] == [1_000 + i for i in reversed(range(100))]
        with crowd(gateway, 20, head("GET", f"{path}?docs=true&limit=200")):
            whole = gateway.call("GET", f"{path}?docs=true&limit=200").json()
        assert [r["start"] for r in whole] == [r["start"] for r in shown]
        assert {len(r["response"]["result"]["x"]) for r in whole} == {MIB}


def test_a_list_leaves_out_what_it_cannot_read_and_says_so_also_after_its_first_part(
    start: Start, valkey_url: str
) -> None:
    path = f"{NAMESPACES}/_/activations?limit=9"
    with redis.Redis.from_url(valkey_url) as client:
        put_records(client, 4)
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
def test_long_code_takes_bounded_memory_also_in_answers_that_nobody_reads(start: Start, char: str) -> None:
    gateway = start()
    code = char * (45 * MIB // len(char.encode()))
    body = json.dumps({"exec": {"kind": PYTHON, "code": code}}, ensure_ascii=False).encode()
    with memory_bounded(gateway, 150):
        assert gateway.call("PUT", LONG, data=body).json()["exec"]["code"] == code
        with crowd(gateway, 20, head("GET", LONG)):
            assert len(gateway.call("GET", f"{LONG}?code=false").content) < 10_000
            assert gateway.call("GET", LONG).json()["exec"]["code"] == code


def test_a_long_zip_takes_bounded_memory(start: Start) -> None:
    gateway, data = start(), io.BytesIO()
    with zipfile.ZipFile(data, "w") as archive:
        archive.writestr("__main__.py", "def main(args): return args\n")
        archive.writestr("data", bytes(33 * MIB))
        archive.writestr("requirements.txt", "numpy\n")
        archive.writestr("virtualenv/lib/python3.11/site-packages/numpy.py", "")
    code = base64.b64encode(data.getvalue()).decode()
    with memory_bounded(gateway, 150):
        made = put_code(gateway, code)["exec"]
    assert (made["binary"], made["code"]) == (True, code)


def test_code_is_read_as_fast_as_its_client_reads_and_no_thread_waits(start: Start) -> None:
    gateway = start(THAW_GATEWAY_THREADS="4", THAW_GATEWAY_ANSWER_S="100")
    put_code(gateway, "#" * (20 * MIB))
    with ExitStack() as stack:
        unread = [stack.enter_context(connect(gateway)) for _ in range(16)]
        for sock in unread:
            sock.sendall(head("GET", LONG, "Connection: close"))
        for _ in range(3):
            assert gateway.call("GET", NAMESPACES).status_code == 200
        found = read_to_end(unread[0])
    assert found.count(b"#") == 20 * MIB
    assert found.endswith(b"\r\n0\r\n\r\n")


def test_an_answer_that_is_made_as_it_is_read_ends_as_its_client_expects(start: Start) -> None:
    gateway = start()
    put_code(gateway, "#" * (5 * MIB))
    assert gateway.call("HEAD", LONG).status_code == 200
    with connect(gateway) as old:
        old.sendall(head("GET", LONG).replace(b"HTTP/1.1", b"HTTP/1.0"))
        plain = json.loads(read_to_end(old).partition(b"\r\n\r\n")[2])
    assert plain["exec"]["code"] == "#" * (5 * MIB)
    with connect(gateway) as sock:
        sock.sendall(head("GET", LONG) + head("GET", NAMESPACES, "Connection: close"))
        both = read_to_end(sock)
    assert both.count(b"HTTP/1.1 200 OK") == 2
    assert both.endswith(b'["guest"]')


def test_code_that_goes_while_it_is_read_cuts_its_answer(start: Start, valkey_url: str) -> None:
    gateway = start()
    put_code(gateway, "#" * (20 * MIB))
    with connect(gateway) as sock, redis.Redis.from_url(valkey_url) as client:
        sock.sendall(head("GET", LONG))
        assert sock.recv(1000).startswith(b"HTTP/1.1 200 OK")
        client.delete(*client.keys("thaw:code:*"))
        assert not read_to_end(sock).endswith(b"0\r\n\r\n")
    lost = gateway.call("GET", LONG)
    assert (lost.status_code, lost.json()["error"]) == (500, "The code of the action is lost: deploy the action again.")
    deleted = gateway.call("DELETE", LONG)
    assert (deleted.status_code, "code" in deleted.json()["exec"]) == (200, False), "it has been deleted"
    assert gateway.call("GET", LONG).status_code == 404


def test_deletions_do_not_cut_the_answers_of_one_another(start: Start) -> None:
    gateway = start()
    for name, n_bytes in (("a", 20 * MIB), ("b", 100_000), ("c", 100_000)):
        put_code(gateway, "#" * n_bytes, name)
    with connect(gateway) as sock:
        sock.sendall(head("DELETE", f"{ACTIONS}/a", "Connection: close"))
        assert sock.recv(1000).startswith(b"HTTP/1.1 200 OK")
        for name in "bc":
            assert gateway.call("DELETE", f"{ACTIONS}/{name}").status_code == 200
        assert read_to_end(sock).endswith(b"\r\n0\r\n\r\n")


def test_actions_of_before_code_was_kept_in_pieces_take_bounded_memory(start: Start, valkey_url: str) -> None:
    gateway = start()

    def ask(_: int) -> int:
        with requests.get(f"{gateway.url}{ACTIONS}/old", auth=credentials(KEY), stream=True, timeout=50) as reply:
            return reply.status_code

    with memory_bounded(gateway, 256), redis.Redis.from_url(valkey_url) as client:
        exec_ = Exec(PYTHON, "\u4e2d" * (15 * MIB))
        old = Action(ActionName("guest/old"), Namespace("guest"), "0.0.1", exec_, Limits())
        Records(client).put_action(old, last=None)
        with ThreadPoolExecutor(6) as pool:
            statuses = set(pool.map(ask, range(6)))
        assert statuses in ({200}, {200, 429})
    until_s, tick = time.monotonic() + 60, threading.Event()
    while (last := gateway.call("GET", f"{ACTIONS}/old")).status_code == 429:
        assert time.monotonic() < until_s, "clients that hang up give their memory back"
        tick.wait(0.05)
    assert len(last.json()["exec"]["code"]) == 15 * MIB


def test_answers_whose_clients_hang_up_give_their_memory_back(start: Start) -> None:
    gateway = start()
    put_code(gateway, "#" * (5 * MIB), parameters=[{"key": "a", "value": "#" * 1_000_000}])
    for _ in range(70):
        with connect(gateway) as sock:
            sock.sendall(head("GET", LONG))
            assert sock.recv(1000).startswith(b"HTTP/1.1 200 OK")
    assert gateway.call("GET", LONG).status_code == 200


def test_a_gateway_that_is_killed_in_a_put_leaves_nothing_that_stays(start: Start, valkey_url: str) -> None:
    gateway = start()
    pid = worker_pid(gateway)
    body = json.dumps({"exec": {"kind": PYTHON, "code": "#" * (40 * MIB)}}).encode()
    with redis.Redis.from_url(valkey_url) as client, redis.Redis.from_url(valkey_url) as other:
        watch = client.pubsub()
        client.config_set("notify-keyspace-events", "Kh")
        watch.psubscribe("__keyspace@0__:thaw:code:*")
        assert watch.get_message(timeout=60) is not None, "no confirmation"
        with connect(gateway) as sock:
            sock.sendall(head("PUT", LONG, f"Content-Length: {len(body)}") + body)
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
        ({"exec": {"kind": PYTHON, "code": "#" * 100_000}, "limits": {"memory": 1}}, "limits.memory: 1 MB"),
        ({"exec": {"kind": PYTHON, "code": "#" * (2 * MIB), "main": 5}}, "exec.main must be a string"),
        ({"exec": {"kind": "llm:vllm", "code": " " * (2 * MIB)}}, "a config of 2097152 > 1048576 bytes"),
        (
            {"parameters": [{"key": "a", "value": "#" * (2 * MIB)}]},
            "a string beside exec.code has more than 1048576 bytes (THAW_PARAMETERS_BYTES",
        ),
        ({"exec": {"kind": PYTHON, "code": "#" * (6 * MIB)}}, "> 5242880 bytes"),
        (
            {"exec": {"kind": PYTHON, "code": "#" * (2 * MIB), "main": "m" * (2 * MIB)}},
            "two strings have more than 1048576 bytes",
        ),
    ],
)
def test_long_code_that_is_refused_is_not_kept(
    start: Start, valkey_url: str, body: dict[str, object], said: str
) -> None:
    gateway = start(THAW_CODE_BYTES=str(5 * MIB))
    reply = gateway.call("PUT", LONG, json=body)
    assert reply.status_code in (400, 413)
    assert said in reply.json()["error"]
    with redis.Redis.from_url(valkey_url) as client:
        assert client.keys("thaw:code:*") == []


def test_code_is_replaced_and_deleted_with_its_action(start: Start, valkey_url: str) -> None:
    gateway = start()
    with redis.Redis.from_url(valkey_url) as client:

        def lifetimes() -> list[int]:
            return sorted(int(client.ttl(key)) for key in client.keys("thaw:code:*"))

        put_code(gateway, "a" * 100_000)
        assert lifetimes() == [-1]
        assert gateway.call("PUT", f"{LONG}?overwrite=true", json={"limits": {"memory": 512}}).status_code == 200
        assert lifetimes() == [-1]
        assert gateway.call("GET", LONG).json()["exec"]["code"] == "a" * 100_000
        put_code(gateway, "b" * (2 * MIB), "long?overwrite=true")
        assert lifetimes()[0] == -1
        assert 0 < lifetimes()[1] <= UNNAMED_TTL_S
        assert gateway.call("DELETE", LONG).json()["exec"]["code"] == "b" * (2 * MIB)
        assert lifetimes()[0] > 0
        put_code(gateway, "short")
        assert lifetimes()[0] > 0
        assert gateway.call("GET", LONG).json()["exec"]["code"] == "short"
