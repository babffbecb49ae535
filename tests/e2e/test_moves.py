"""A host is emptied while streams come from it, through the real processes and with the real model.

In float32, so that the shape of a batch decides no tie between two tokens.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier, Event
from typing import Any

import pytest

from tests.e2e.machine import Machine, text_of
from tests.e2e.pipelines import Pipelines, wait_for
from tests.gateway.event_client import Client
from thaw.tracing.trace import Phase

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]


def asking(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


REQUESTS: tuple[dict[str, Any], ...] = (
    {"messages": asking("Tell me the history of Rome."), "temperature": 0},
    {"messages": asking("Count from one to five hundred."), "temperature": 0, "logprobs": True},
    {
        "messages": asking("Write a story about a fox."),
        "temperature": 0.8,
        "seed": 7,
        "presence_penalty": 0.6,
        "top_p": 0.9,
    },
)
HANGING_UP_CANCELS = {"X-Thaw-Resumable": "0"}
N_AFTER_MOVE = 20

TOO_SLOW = "the destination (sent nothing within|needs .* for a round)"
"""The reasons for which a stream may stay on a busy machine: its client would have waited too long."""


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    directory = tmp_path_factory.mktemp("hosts")
    made = Machine(directory, dict(os.environ))
    try:
        made.up("--hosts", "2", "--memory-mb", "8192")
        made.thaw("model", "demo")
        config = json.loads(Path("examples/chat/chat.json").read_text())
        config["engine"]["dtype"] = "float32"
        config["resources"]["gpu_memory_mb"] = 3072
        config["slo"] = {"ttft_ms": 60_000, "tpot_ms": 2000}  # one worker is enough
        path = directory / "chat.json"
        path.write_text(json.dumps(config))
        made.thaw("action", "create", "chat", "--config", str(path))
        pipelines = Pipelines(made)
        pipelines.wait_stem_cells(2)  # otherwise a start takes as long as the imports of the engine
        yield made
        pipelines.close()
    finally:
        made.down()
    assert made.leftovers() == []


class Streams:
    """Clients that read the answers to ``REQUESTS`` until the host is empty, and a few tokens more."""

    def __init__(self, machine: Machine, n_tokens: int) -> None:
        """``n_tokens``: of a whole answer."""
        self._machine, self._key, self._n_tokens = machine, ":".join(machine.auth()), n_tokens
        self.all_begun, self.emptied = Barrier(len(REQUESTS) + 1), Event()

    def read(self, request: dict[str, Any]) -> Client:
        client = self._ask(request, self._n_tokens)
        client.read(5)
        self.all_begun.wait(120)
        n_left = N_AFTER_MOVE
        while n_left and not is_whole(client):
            client.read(1)
            n_left -= self.emptied.is_set()
        client.hang_up()
        return client

    def unmoved(self, request: dict[str, Any], other: Client) -> Client:
        """Read the same answer as far as the other client has read it."""
        client = self._ask(request, min(self._n_tokens, other.indexes[-1] + 2))
        client.read_all()
        return client

    def _ask(self, request: dict[str, Any], n_tokens: int) -> Client:
        client = Client(self._key, max_tokens=n_tokens, ignore_eos=True, **request)
        assert client.ask(self._machine, timeout_s=300, **HANGING_UP_CANCELS).status_code == 200
        return client


def is_whole(client: Client) -> bool:
    return client.events[-1].data == "[DONE]"


def outlasting_a_start(machine: Machine) -> int:
    """Return so many tokens that three answers last longer than a start from a stem cell, which the first request waits
    for, even if the machine is busier later."""
    began_s, times_s = time.monotonic(), list[float]()
    reply = machine.chat("chat", "Hello", stream=True, max_tokens=24, ignore_eos=True, timeout=300)
    text_of(reply, lambda _: times_s.append(time.monotonic()))
    token_s = (times_s[-1] - times_s[0]) / (len(times_s) - 1)
    return min(1500, 100 + round(4 * (times_s[0] - began_s) / token_s))


def serving(machine: Machine) -> list[str]:
    found = machine.request("GET", "/api/v1/namespaces/_/actions/chat").json()["instances"]
    return [i["host"] for i in found]


def test_a_busy_host_is_emptied_and_every_stream_ends_with_the_text_it_would_have_had(hosts: Machine) -> None:
    streams = Streams(hosts, outlasting_a_start(hosts))
    (source,) = serving(hosts)
    with ThreadPoolExecutor(len(REQUESTS)) as pool:
        reading = [pool.submit(streams.read, request) for request in REQUESTS]
        streams.all_begun.wait(120)
        try:
            said = hosts.thaw("host", "drain", source, "--wait").stdout
        finally:
            streams.emptied.set()
        answers = [client.result(300) for client in reading]
        unmoved = list(pool.map(streams.unmoved, REQUESTS, answers))
    for client, other in zip(answers, unmoved, strict=True):
        assert client.seen == other.seen[: len(client.events)]
    assert "3 requests are moving, 1 instance is left" in said
    assert said.splitlines()[-1] == f"{source} is empty"
    (dest,) = serving(hosts)
    assert dest != source
    listed = hosts.thaw("host", "list").stdout
    n_moved = 0
    for client in answers:
        activation_id = client.reply.headers["X-Openwhisk-Activation-Id"]
        trace = wait_for(lambda a=activation_id: moved(hosts, a), "no trace of a move")
        assert trace["begin"]["from"] == source, trace
        assert trace["end"]["rounds"] >= 1
        if "stayed" in trace["end"]:
            assert re.match(TOO_SLOW, trace["end"]["stayed"]), trace
            continue
        n_moved += 1
        assert trace["end"]["to"] == dest, trace
        assert "the answer went on on" in hosts.thaw("activation", "explain", activation_id).stdout, listed
    assert n_moved, "no stream has moved"
    hosts.thaw("host", "undrain", source)


def moved(machine: Machine, activation_id: str) -> dict[str, Any] | None:
    reply = machine.request("GET", f"/api/v1/namespaces/_/activations/{activation_id}/trace")
    found = {e["name"]: e["attrs"] for e in (reply.json()["events"] if reply.status_code == 200 else ())}
    if Phase.FINISHED not in found:
        return None
    return {"begin": found.get(Phase.MOVE_BEGIN, {}), "end": found.get(Phase.MOVE_END, {})}
