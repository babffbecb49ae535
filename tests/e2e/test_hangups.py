"""When a client hangs up, the engine stops working for it, and the next request is answered."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import time
from base64 import b64encode
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from relay.clients.http_unix import UnixConnection
from tests.e2e import bad_models
from tests.e2e.bad_models import Shop
from thaw.instance import InstanceState

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]
LONG = {"max_tokens": 1900, "min_tokens": 1900, "ignore_eos": True, "temperature": 0}
"""Such an answer takes many seconds on any machine.  An engine that is idle again has therefore aborted the answer, and
not completed it.
"""
ABORTED_S = 10.0
"""An abort takes a fraction of a second on an idle machine.  LONG takes longer than this limit on any machine."""


@pytest.fixture(scope="module")
def small_model(shop: Shop, tmp_path_factory: pytest.TempPathFactory) -> str:
    base = tmp_path_factory.mktemp("models")
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "thaw" / "models"
    shop.machine.thaw("model", "push", str(bad_models.tiny_checkpoint(base / "made", cache)), f"file://{base}/pushed")
    return f"file://{base}/pushed"


class Client:
    """One request on a connection of its own, which can be closed at any moment."""

    def __init__(self, shop: Shop, action: str, **body: Any) -> None:
        self._socket = socket.create_connection(("127.0.0.1", shop.machine.port), timeout=60)
        message = {"model": action, "messages": [{"role": "user", "content": "Count."}], **LONG, **body}
        data, key = json.dumps(message).encode(), b64encode(":".join(shop.key).encode())
        head = (
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: thaw\r\nAuthorization: Basic %b\r\nContent-Length: %d\r\n\r\n"
        )
        self._socket.sendall(head % (key, len(data)) + data)

    def read_until(self, wanted: bytes) -> bytes:
        seen = b""
        while wanted not in seen:
            more = self._socket.recv(65536)
            assert more, seen
            seen += more
        return seen

    def hang_up(self) -> float:
        """Close the connection, and return the time."""
        self._socket.close()
        return time.monotonic()


def inflight(shop: Shop) -> int:
    """The number of requests on which the platform's engines work, as their containers report it."""
    assert shop.known is not None
    total = 0
    for owner in (Path(shop.known.run_dir) / "host-0" / "c").glob("*/owner.json"):
        try:
            if json.loads(owner.read_bytes())["kind"] != "llm:vllm":
                continue
            with closing(UnixConnection(str(owner.parent / "s"), timeout=10)) as connection:
                connection.request("GET", "/health")
                total += json.loads(connection.getresponse().read())["inflight"]
        except (OSError, http.client.HTTPException, ValueError):
            continue  # the container has just ended or does not answer yet, so it runs nothing
    return total


def wait_until(condition: Callable[[], bool], deadline_s: float = 30) -> float:
    """Wait until the condition is true, and return the time.  Fail after ``deadline_s``."""
    until = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < until, "it did not come"
        time.sleep(0.01)
    return time.monotonic()


def given_up(shop: Shop, action: str) -> int:
    """The number of the action's records that say that the client hung up."""
    url = f"{shop.machine.url}/api/v1/namespaces/_/activations"
    records = shop.http.get(url, params={"name": action, "docs": "true", "limit": "0"}, timeout=30).json()
    results = [r["response"]["result"] for r in records if not r["response"]["success"]]
    return sum(str(r.get("error")).startswith("The client closed the connection") for r in results)


@pytest.mark.parametrize("stream", [True, False])
def test_an_answer_nobody_reads_any_more_is_aborted_in_the_engine(shop: Shop, stream: bool) -> None:
    before = given_up(shop, "chat")
    client = Client(shop, "chat", stream=stream)
    if stream:
        client.read_until(b'"content"')
    wait_until(lambda: inflight(shop) == 1)
    hung_up = client.hang_up()
    assert wait_until(lambda: inflight(shop) == 0) - hung_up < ABORTED_S
    wait_until(lambda: given_up(shop, "chat") == before + 1)
    assert shop.ask("chat").status_code == 200


def test_all_slots_are_free_again_after_a_full_batch_has_hung_up(shop: Shop) -> None:
    before = given_up(shop, "chat")
    clients = [Client(shop, "chat", stream=True) for _ in range(8)]
    wait_until(lambda: inflight(shop) == 8)
    for client in clients:
        hung_up = client.hang_up()
    assert wait_until(lambda: inflight(shop) == 0) - hung_up < ABORTED_S
    assert shop.ask("chat").status_code == 200
    wait_until(lambda: given_up(shop, "chat") == before + 8)
    assert len(shop.picture().instances) == 1  # the eight requests left no demand that would start another instance


def test_who_hangs_up_does_not_disturb_who_stays(shop: Shop) -> None:
    """The words may differ from those of a request that runs alone, because in bfloat16 the batch size decides ties."""
    leaving = Client(shop, "chat", stream=True)
    leaving.read_until(b'"content"')
    staying = Client(shop, "chat", stream=False, max_tokens=60, min_tokens=60)
    wait_until(lambda: inflight(shop) == 2)
    leaving.hang_up()
    assert b'"completion_tokens": 60' in staying.read_until(b'"total_tokens"')
    staying.hang_up()
    wait_until(lambda: inflight(shop) == 0, ABORTED_S)


@contextmanager
def no_start_goes_on(shop: Shop) -> Iterator[None]:
    """Stop the process that forks the containers' processes."""
    assert shop.known is not None
    pid = int((Path(shop.known.run_dir) / "host-0" / "zygote.pid").read_text().split()[0])
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


@pytest.mark.parametrize("stream", [True, False])
def test_a_request_that_is_given_up_during_a_cold_start_is_forgotten_at_once(
    shop: Shop, small_model: str, stream: bool
) -> None:
    name = f"given_up_{stream}"
    shop.deploy(name, small_model, scaling={"keep_alive_s": 5}, engine={"max_model_len": 512})
    with no_start_goes_on(shop):
        asked = Client(shop, name, stream=stream, max_tokens=400, min_tokens=400)
        wait_until(lambda: any(d.action.endswith(name) for d in shop.registry.demand()))
        assert inflight(shop) == 0  # this is before the first token, and before there is an engine
        asked.hang_up()
        wait_until(lambda: not shop.registry.demand())
        assert not any(i.action.endswith(name) and i.state is InstanceState.READY for i in shop.registry.instances())
    wait_until(lambda: given_up(shop, name) == 1)
    with ExitStack() as cleanup:
        cleanup.enter_context(shop.nothing_left_behind())
        cleanup.callback(shop.delete, name)
        answer = shop.ask(name)  # the instance that was started for the lost request answers
        assert answer.status_code == 200
        assert inflight(shop) == 0
