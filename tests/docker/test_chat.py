"""docs/docker.md as it is written: two hosts, the model engine in containers without a network, and two stages."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.docker import standins
from tests.docker.answers import LONG, LongAnswer
from tests.docker.engine import ROOT, DockerEngine
from tests.docker.stack import UP_S, Stack, kill
from tests.e2e.test_readme import blocks
from thaw.dev.known_answers import FRANCE

pytestmark = [pytest.mark.full, pytest.mark.vllm, pytest.mark.timeout(1800)]  # an image of 3 GB is built


@pytest.fixture(scope="module")
def stack(docker_engine: DockerEngine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    for name in ("gateway", "invoker", "fetchd", "python", "vllm-cpu"):
        docker_engine.build(name)
    standins.build(docker_engine.env)
    made = Stack(
        docker_engine,
        tmp_path_factory.mktemp("stack"),
        THAW_STEM_CELLS="on",
        THAW_FETCHD_POOL_MB="1024",
        THAW_MEMORY_MB="4096",
    )
    try:
        made.up()
        yield made
    finally:
        made.compose("down", "-v")
    assert made.left() == []


@pytest.fixture(scope="module")
def first_answer(stack: Stack) -> str:
    """The page's first block: its model is in the store from then on, and ``chat`` is deployed."""
    page = blocks(ROOT / "docs/docker.md")[0].code
    commands = page[page.index("docker compose up -d") :]  # the fixture does the earlier steps: images and secrets
    assert [line.split()[:3] for line in commands.splitlines()] == [
        ["docker", "compose", "up"],
        ["thaw", "model", "demo"],
        ["thaw", "action", "create"],
        ["thaw", "chat", "chat"],
    ]
    return stack.shell(commands)


@pytest.fixture(scope="module")
def answer_of_two(stack: Stack, first_answer: str) -> str:
    """The page's second block: ``chat`` has two stages from then on."""
    del first_answer
    return stack.shell(blocks(ROOT / "docs/docker.md")[1].code)


def test_the_commands_of_the_page_end_in_an_answer(first_answer: str) -> None:
    assert FRANCE.text in first_answer


@pytest.mark.usefixtures("first_answer")
def test_ready_stem_cells_are_claimed_again_and_again_under_the_limits_of_the_claim(
    stack: Stack, tmp_path: Path
) -> None:
    """A stem cell waits with 2 GiB.

    vLLM used to keep the memory limit that it read then, and every start from a ready stem cell failed.
    """
    config = json.loads((ROOT / "examples/chat/chat.json").read_text())
    config["scaling"]["keep_alive_s"] = 2
    (tmp_path / "brief.json").write_text(json.dumps(config))
    stack.thaw("action", "create", "brief", "--config", str(tmp_path / "brief.json"))
    promised = sum(config["resources"][name] for name in ("gpu_memory_mb", "host_memory_mb")) << 20
    for _ in range(3):
        stack.wait_ready_cells("brief")
        asked = {"model": "brief", "messages": FRANCE.messages}
        reply = stack.request("POST", "/v1/chat/completions", json={**asked, "temperature": 0})
        assert reply.json()["choices"][0]["message"]["content"] == FRANCE.text
        activation = reply.headers["X-Openwhisk-Activation-Id"]
        annotations = {a["key"]: a["value"] for a in stack.record(activation)["annotations"]}
        assert annotations["startMode"] == "prewarmed"
        limits = {c.attrs["HostConfig"]["Memory"] for c in stack.serving("brief")}
        assert limits <= {promised}  # the container may be gone already


def test_two_hosts_answer_together_over_the_relay_and_say_so(stack: Stack, answer_of_two: str) -> None:
    whole_answer(stack)  # another test may have ended the instances since
    answer, _, explained = answer_of_two.partition("activation ")
    assert FRANCE.text in answer
    assert re.search(r"2 stages.* over redis: host-\d.*, host-\d", explained), explained
    stages = {(stack.host_of(c), c.attrs["HostConfig"]["NetworkMode"]) for c in stack.instances()}
    assert stages == {("host-1", "none"), ("host-2", "none")}


def test_two_stages_without_a_network_become_one_worker_while_they_answer(stack: Stack, tmp_path: Path) -> None:
    config = in_two_stages_and_float32(keep=1)
    (tmp_path / "folds.json").write_text(json.dumps(config))
    stack.thaw("model", "demo")
    stack.thaw("action", "create", "folds", "--config", str(tmp_path / "folds.json"))
    text = whole_answer(stack, "folds")
    stack.wait_serving("folds", 1)
    assert whole_answer(stack, "folds") == text
    assert [c.attrs["HostConfig"]["NetworkMode"] for c in stack.serving("folds")] == ["none"]
    assert '"stages": 1' in stack.thaw("action", "get", "folds")
    stack.thaw("action", "delete", "folds")
    stack.wait_serving("folds", 0)


@pytest.fixture(scope="module")
def exact(stack: Stack, answer_of_two: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A function in two stages and in float32.  In bfloat16, a prompt that ends with generated tokens may decide a tie
    between two tokens differently from the steps that generated them."""
    assert answer_of_two
    path = tmp_path_factory.mktemp("exact") / "exact.json"
    path.write_text(json.dumps(in_two_stages_and_float32()))
    stack.thaw("action", "create", "exact", "--config", str(path))
    yield "exact"
    stack.thaw("action", "delete", "exact")


@pytest.mark.parametrize("victim", ["a stage", "relay", "scheduler", "host-1-fetchd", "host-2-invoker"])
def test_an_answer_in_two_stages_loses_no_token_and_doubles_none(stack: Stack, exact: str, victim: str) -> None:
    """The connections to the relay server, or the whole group, are made again, and go on from the last token."""
    whole = whole_answer(stack, exact)
    asking = LongAnswer(stack, action=exact)
    asking.wait_pieces(10)
    kill(stack.serving(exact)[-1] if victim == "a stage" else stack.service(victim))
    asking.wait_end()
    assert (asking.text, asking.error, asking.broke) == (whole, None, None)


def in_two_stages_and_float32(**scaling: int) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((ROOT / "examples/chat/chat.json").read_text())
    config["engine"]["dtype"], config["resources"]["gpu_memory_mb"] = "float32", 3072
    config["scaling"] |= {"stages": 2, **scaling}
    return config


def whole_answer(stack: Stack, action: str = "chat") -> str:
    asking = LongAnswer(stack, action=action)
    asking.wait_end()
    assert (asking.error, asking.broke) == (None, None)
    return asking.text


# the container engine -----------------------------------------------------------------------------------------------


def kill_engine(engine: DockerEngine, *, live_restore: str) -> None:
    engine.forget_sockets()
    engine.script("crash")
    engine.script("up", THAW_ENGINE_LIVE_RESTORE=live_restore)
    engine.connect()


@pytest.mark.usefixtures("first_answer")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # the SDK forgets a broken socket
def test_an_answer_goes_on_without_the_engine_and_its_containers_serve_the_next(
    own_engine: DockerEngine, stack: Stack
) -> None:
    """This is with live-restore, and with a client that needs no port of the engine.

    The answer is computed alone: beside other answers its last bits may differ, and then its words.
    """
    whole = whole_answer(stack)
    group = {str(c.id) for c in stack.instances()}
    former = stack.invokers()
    asking = LongAnswer(stack, stack.behind_the_port())
    asking.wait_pieces(10)
    kill_engine(own_engine, live_restore="true")
    asking.wait_end()
    assert (asking.text, asking.error, asking.broke) == (whole, None, None)
    assert stack.record(asking.activation_id)["response"]["success"]
    stack.wait_invokers(former)  # the invokers start again because the engine has a new socket
    assert whole_answer(stack) == whole
    assert {str(c.id) for c in stack.instances()} == group
    assert stack.strays() == []


@pytest.mark.usefixtures("first_answer")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("live_restore", ["false", "true"])  # the engine keeps the last setting
def test_whoever_asks_when_the_engine_is_killed_learns_how_it_ended(
    own_engine: DockerEngine, stack: Stack, live_restore: str
) -> None:
    """There is a client outside, one inside, and a 202.

    The test checks what each of them gets, that the next request is served, and that nothing of the old state remains.
    """
    whole_answer(stack)
    inside, outside = LongAnswer(stack, stack.behind_the_port()), LongAnswer(stack)
    accepted = stack.accepted("chat", **LONG)
    inside.wait_pieces(10)
    outside.wait_pieces(1)
    kill_engine(own_engine, live_restore=live_restore)
    for asking in (outside, inside):
        asking.wait_end()
    assert outside.broke is not None  # its port belonged to a process of the engine
    stack.wait_back()
    response = stack.record(accepted)["response"]
    if live_restore == "true":
        assert (inside.error, inside.broke) == (None, None)
        assert stack.record(inside.activation_id)["response"]["success"]
        assert "client closed" in stack.record(outside.activation_id)["response"]["result"]["error"]
        assert response["result"]["usage"]["completion_tokens"] == LONG["max_tokens"]
    else:  # the records of blocking requests may be lost with the gateway that held them
        assert inside.error or inside.broke
        assert response["success"] or response["result"]["error"]
    stack.deploy("here", "def main(args): return {'ok': True}")
    assert stack.record(stack.accepted("here"))["response"]["result"] == {"ok": True}
    answered_in_the_end(stack)
    assert stack.strays() == []


def answered_in_the_end(stack: Stack) -> None:
    """Ask until there is an answer.  The store may come back last, and requests get an error until it is back."""
    deadline = time.monotonic() + UP_S
    pause = threading.Event()
    while True:
        asking = LongAnswer(stack)
        asking.wait_end()
        if asking.error is None:
            break
        assert asking.error["code"] == "StoreUnavailable", asking.error
        assert time.monotonic() < deadline
        pause.wait(0.5)
    assert asking.broke is None
