"""docs/docker.md as it is written: the stack, the real engine in containers without a network, two hosts, two stages."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

import pytest

from tests.docker import standins
from tests.docker.engine import BASE, ROOT, DockerEngine
from tests.docker.stack import Stack, kill
from tests.e2e.test_readme import blocks

pytestmark = [pytest.mark.full, pytest.mark.vllm, pytest.mark.timeout(1800)]  # an image of 3 GB is built


@pytest.fixture(scope="module")
def stack(docker_engine: DockerEngine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    for name in ("gateway", "invoker", "fetchd", "python", "vllm-cpu"):
        docker_engine.build(name)
    standins.build(BASE, docker_engine.env)
    made = Stack(docker_engine, tmp_path_factory.mktemp("stack"), THAW_STEM_CELLS="on", THAW_FETCHD_POOL_MB="1024",
                 THAW_MEMORY_MB="4096")  # fmt: skip
    try:
        made.up()
        yield made
    finally:
        made.compose("down", "-v")
    assert made.left() == []


def test_the_commands_of_the_page_end_in_an_answer(stack: Stack) -> None:
    page = blocks(ROOT / "docs/docker.md")[0].code
    commands = page[page.index("docker compose up -d") :]  # what is before is the fixture's: images, secrets
    assert [line.split()[:3] for line in commands.splitlines()] == [
        ["docker", "compose", "up"], ["thaw", "model", "demo"], ["thaw", "action", "create"], ["thaw", "chat", "chat"],
    ]  # fmt: skip
    assert "Paris" in stack.shell(commands)


def test_two_hosts_answer_together_over_the_relay_and_say_so(stack: Stack) -> None:
    answer, _, explained = stack.shell(blocks(ROOT / "docs/docker.md")[1].code).partition("activation ")
    assert "Paris" in answer
    assert re.search(r"2 stages.* over redis: host-\d.*, host-\d", explained), explained
    stages = {(stack.host_of(c), c.attrs["HostConfig"]["NetworkMode"]) for c in stack.instances()}
    assert stages == {("host-1", "none"), ("host-2", "none")}


def ask_streaming(stack: Stack, at: int, action: object) -> str:
    """The text of a long answer; ``action`` is done after its ``at``-th piece."""
    body = {"model": "chat", "messages": [{"role": "user", "content": "Count from one to fifty."}], "stream": True,
            "max_tokens": 120, "temperature": 0, "ignore_eos": True}  # fmt: skip
    with stack.request("POST", "/v1/chat/completions", json=body, stream=True) as response:
        assert response.status_code == 200, response.text
        texts = []
        for line in response.iter_lines():
            if not line.startswith(b"data: {"):
                continue
            piece = json.loads(line.removeprefix(b"data: "))
            assert "error" not in piece, piece
            texts.append(piece["choices"][0]["delta"].get("content") or "")
            if len(texts) == at and callable(action):
                action()
    return "".join(texts)


@pytest.mark.parametrize("victim", ["a stage", "relay", "scheduler", "host-1-fetchd", "host-2-invoker"])
def test_an_answer_in_two_stages_loses_no_token_and_doubles_none(stack: Stack, victim: str) -> None:
    """The relay's connections are made again, or the group is, and goes on from the last token."""
    whole = ask_streaming(stack, 0, None)

    def strike() -> None:
        kill(stack.instances()[-1] if victim == "a stage" else stack.service(victim))

    assert ask_streaming(stack, 10, strike) == whole
