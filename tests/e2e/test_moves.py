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
from threading import Barrier
from typing import Any

import pytest

from tests.e2e.machine import Machine, text_of
from tests.e2e.pipelines import Pipelines, wait_for
from thaw.tracing.trace import Phase

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

REQUESTS: tuple[dict[str, Any], ...] = (
    {"content": "Tell me the history of Rome.", "temperature": 0},
    {"content": "Count from one to five hundred.", "temperature": 0, "logprobs": True},
    {"content": "Write a story about a fox.", "temperature": 0.8, "seed": 7, "presence_penalty": 0.6, "top_p": 0.9},
)


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


def stream(
    machine: Machine, content: str, n_tokens: int, all_begun: Barrier | None = None, **body: Any
) -> tuple[str, str]:
    """The text of a streamed answer, and its activation.  ``all_begun`` is passed after a few tokens."""
    reply = machine.chat("chat", content, stream=True, max_tokens=n_tokens, ignore_eos=True, timeout=300, **body)

    def after(n: int) -> None:
        if n == 5 and all_begun is not None:
            all_begun.wait(120)

    return text_of(reply, after), reply.headers["X-Openwhisk-Activation-Id"]


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
    n_tokens = outlasting_a_start(hosts)
    (source,) = serving(hosts)
    all_begun = Barrier(len(REQUESTS) + 1)
    with ThreadPoolExecutor(len(REQUESTS)) as pool:
        streams = [
            pool.submit(stream, hosts, n_tokens=n_tokens, all_begun=all_begun, **request) for request in REQUESTS
        ]
        all_begun.wait(120)
        said = hosts.thaw("host", "drain", source, "--wait").stdout
        answers = [s.result(300) for s in streams]
        unmoved = [pool.submit(stream, hosts, n_tokens=n_tokens, **request) for request in REQUESTS]
        expected = [s.result(300)[0] for s in unmoved]
    assert [text for text, _ in answers] == expected
    assert "3 requests are moving, 1 instance is left" in said
    assert said.splitlines()[-1] == f"{source} is empty"
    (dest,) = serving(hosts)
    assert dest != source
    listed = hosts.thaw("host", "list").stdout
    n_moved = 0
    for _, activation_id in answers:
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
