"""Keep-alive, scale to zero, and a platform that leaves nothing behind."""

from __future__ import annotations

import json
import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest

from tests.e2e.machine import Machine
from thaw.dev.known_answers import FRANCE

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    """A running platform with the small real model in its store."""
    made = Machine(tmp_path_factory.mktemp("platform"), dict(os.environ))
    try:
        made.up()
        made.thaw("model", "demo")
        yield made
    finally:
        made.down()
    assert made.leftovers() == []


def wait_until_no_instance(machine: Machine, deadline_s: float) -> None:
    """Wait until the hosts report no instance, at most until the deadline."""
    until = time.monotonic() + deadline_s
    while any(h["instances"] for h in machine.request("GET", "/api/v1/thaw/hosts").json()["hosts"]):
        assert time.monotonic() < until, "an instance outlived its keep-alive"
        time.sleep(0.5)


def test_after_keep_alive_the_instance_is_gone_and_the_next_request_thaws_again(
    machine: Machine, tmp_path: Path
) -> None:
    config = json.loads(Path("examples/chat/chat.json").read_text())
    config["scaling"] = {"keep_alive_s": 2}
    (tmp_path / "chat.json").write_text(json.dumps(config))
    machine.thaw("action", "create", "brief", "--config", str(tmp_path / "chat.json"))
    for is_held_up in (False, True):
        with stem_cell_stops(machine) if is_held_up else nullcontext():
            response = machine.chat("brief", FRANCE.prompt, temperature=0)
        assert response.json()["choices"][0]["message"]["content"] == FRANCE.text
        path = f"/api/v1/namespaces/_/activations/{response.headers['X-Openwhisk-Activation-Id']}"
        assert "initTime" in {a["key"] for a in machine.request("GET", path).json()["annotations"]}
        wait_until_no_instance(machine, 30)
    lines = machine.thaw("activation", "explain", response.headers["X-Openwhisk-Activation-Id"]).stdout.splitlines()
    container = next(line for line in lines if line.startswith("  container on host-0"))
    waited = re.search(r"waiting for the stem cell (\d\.\d+) s", container)
    assert waited is not None, container
    assert float(waited[1]) >= 1.9
    assert [line for line in lines if "the stem cell" in line and line.startswith("  ")] == [container]


@contextmanager
def stem_cell_stops(machine: Machine) -> Iterator[None]:
    """Stop the stem cell's process until four seconds after a start has made a container's directory.

    The start does this shortly before it requests a fork.
    """
    run_dir = Path(json.loads((machine.state_dir / "platform.json").read_text())["run_dir"])
    pid = int((run_dir / "host-0" / "zygote.pid").read_text().split()[0])
    before = set(run_dir.glob("host-0/c/*"))
    os.kill(pid, signal.SIGSTOP)

    def go_on() -> None:
        until = time.monotonic() + 60
        while set(run_dir.glob("host-0/c/*")) <= before and time.monotonic() < until:
            time.sleep(0.01)
        threading.Event().wait(4.0)  # the process stays stopped for this long
        os.kill(pid, signal.SIGCONT)

    thread = threading.Thread(target=go_on)
    thread.start()
    try:
        yield
    finally:
        thread.join()


@pytest.mark.ends("machine")
def test_down_after_a_killed_supervisor_leaves_nothing(machine: Machine) -> None:
    machine.thaw("action", "create", "chat", "--config", "examples/chat/chat.json")
    assert machine.chat("chat", "Hello", max_tokens=2).status_code == 200
    supervisor = json.loads((machine.state_dir / "platform.json").read_text())["supervisor"]["pid"]
    machine.note_ports()
    os.kill(supervisor, signal.SIGKILL)
    machine.thaw("dev", "down")
    assert machine.leftovers() == []
