"""The engine of docs/extending.md, in real containers: proxy, engine process, wire and descriptor socket."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from invoker.drivers.base import Spec
from invoker.drivers.cpu_shares import NoShares
from invoker.drivers.process.driver import ProcessDriver
from relay.clients.http_unix import UnixConnection
from tests.thaw_runtime.conftest import Container, Zygote, forked_container
from tests.thaw_runtime.fake_descriptor_socket import FakeDescriptorSocket
from tests.thaw_runtime.models import write_tiny_model
from thaw.action import KIND_LLM
from thaw.dev.components import base_env
from thaw.logs import Log

PROMPT = {"prompt": "hello", "max_tokens": 4, "temperature": 0}


@pytest.fixture
def descriptor_socket(tmp_path: Path) -> Iterator[FakeDescriptorSocket]:
    made = FakeDescriptorSocket(write_tiny_model(tmp_path / "model"), tmp_path / "socket")
    yield made
    made.close()


def with_echo(*command: str) -> list[str]:
    """``command`` with the echo engine, and with this process's PYTHONPATH: container fixtures set another one."""
    return ["env", f"PYTHONPATH={os.environ['PYTHONPATH']}", "THAW_LLM_ENGINE=echo", *command]


def check(container: Container) -> None:
    status, reply = container.init()
    assert (status, reply["ok"]) == (200, True)
    *tokens, end = container.stream(PROMPT)
    assert "".join(token["text"] for token in tokens) == "hell"
    assert end["reason"] == "length"


@pytest.mark.parametrize("warm", ["", "on"], ids=["cold", "stem cell"])
def test_a_container_serves_the_engine_that_its_environment_names(
    descriptor_socket: FakeDescriptorSocket, tmp_path: Path, installed: Path, warm: str
) -> None:
    command = with_echo(f"THAW_WARM={warm}", sys.executable, "-m", "thaw_runtime.llm.main")
    container = Container(command, tmp_path, descriptor_socket)
    try:
        container.wait_listening()
        check(container)
    finally:
        container.close()


def test_a_zygote_forks_containers_of_the_engine_that_its_environment_names(
    descriptor_socket: FakeDescriptorSocket, tmp_path: Path, installed: Path
) -> None:
    zygote = Zygote(tmp_path, with_echo)
    try:
        with forked_container(zygote, tmp_path / "c0", descriptor_socket) as container:
            check(container)
    finally:
        zygote.close()


def test_a_host_without_containers_passes_the_engine_of_its_environment_on(
    descriptor_socket: FakeDescriptorSocket, tmp_path: Path, installed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("THAW_LLM_ENGINE", "echo")
    environment = base_env(tmp_path)  # the environment of thaw dev's invoker
    assert environment["THAW_LLM_ENGINE"] == "echo"
    with tempfile.TemporaryDirectory(prefix="thaw-", dir="/tmp") as run_dir:
        driver = ProcessDriver(Path(run_dir), NoShares(), 1, Log("test"))
        spec = Spec("one", KIND_LLM, {"THAW_DOOR": descriptor_socket.path})
        handle = driver.start(driver.create(spec), spec)
        container = Connected(handle.socket_path)
        try:
            driver.connect(handle, deadline_s=120)
            check(container)
        finally:
            container.http.close()
            driver.stop(handle, deadline_s=5)
            driver.remove(handle)
            driver.close()


class Connected(Container):
    """A container that a driver has started."""

    def __init__(self, path: str) -> None:
        self.http = UnixConnection(path, timeout=300)


@pytest.mark.parametrize("module", ["thaw_runtime.llm.main", "thaw_runtime.start.zygote"])
def test_a_process_whose_environment_names_no_engine_ends_with_those_that_there_are(
    module: str, tmp_path: Path, installed: Path
) -> None:
    command = with_echo("THAW_LLM_ENGINE=nonsense", f"THAW_SOCKET={tmp_path}/s", "THAW_DOOR=d", sys.executable, "-m")
    arguments = ["--socket", str(tmp_path / "z")] if module.endswith("zygote") else []
    done = subprocess.run([*command, module, *arguments], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 1
    said = "THAW_LLM_ENGINE='nonsense' is not an engine; set it to one of: echo, vllm"
    assert said in done.stderr.splitlines()
