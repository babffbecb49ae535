"""The compose file: valid for old and new, and a stack that comes up, works, survives and leaves nothing.

Functions of kind python run in it here (their image is small); llm functions are started the same way, and a test of the
driver with the real engine is tests/docker/test_llm.py's matter.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.conftest import free_port
from tests.docker import standins
from tests.docker.engine import BASE, ROOT, DockerEngine
from thaw.dev.containers import owner

FILE = ROOT / "docker-compose.yml"
UP_S = 300
pytestmark = pytest.mark.timeout(900)  # images are built and a stack comes up within the first test
ONLY_NEW = {"gpus", "develop", "additional_contexts", "dockerfile_inline", "required", "start_interval", "include"}


def compose_file() -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load(FILE.read_text())
    return loaded


def keys_of(value: Any) -> set[str]:
    if isinstance(value, Mapping):
        return set(map(str, value)).union(*(keys_of(v) for v in value.values()))
    if isinstance(value, list):
        return set().union(*(keys_of(v) for v in value))
    return set()


def test_nothing_in_it_is_newer_than_docker_compose_1_29() -> None:
    loaded = compose_file()
    assert {k for k in loaded if not k.startswith("x-")} == {"services", "networks", "volumes"}
    assert keys_of(loaded) & ONLY_NEW == set()
    assert all(len(name) >= 2 for part in ("services", "networks", "volumes") for name in loaded[part])


def test_no_secret_has_a_default_and_no_port_but_the_gateways_is_open() -> None:
    text = FILE.read_text()
    for name in re.findall(r"\$\{(THAW_\w*(?:PASSWORD|KEY|SECRET))([^}]*)\}", text):
        assert name[1] == "" or name[1].startswith(":?"), name
    ports = [p for service in compose_file()["services"].values() for p in service.get("ports", [])]
    assert [p for p in ports if not p.startswith("127.0.0.1:")] == ["${THAW_PORT:-3233}:3233"]


def test_its_images_are_those_that_make_images_builds_and_two_pinned_servers() -> None:
    images = {service["image"] for service in compose_file()["services"].values()}
    ours = {
        match[1] for image in images if (match := re.fullmatch(r"\$\{THAW_IMAGE_PREFIX:-thaw\}/([\w-]+):.*", image))
    }
    assert images - {i for i in images if "THAW_IMAGE_PREFIX" in i} == {standins.VALKEY, standins.SEAWEEDFS}
    assert ours <= {path.name for path in (ROOT / "deploy/images").iterdir()}


def test_a_dependency_layer_is_keyed_by_its_lock_alone() -> None:
    """No file of ours is copied before the packages are installed."""
    for dockerfile in (ROOT / "deploy/images").glob("*/*Dockerfile"):
        lines = dockerfile.read_text().splitlines()
        installs = next((n for n, line in enumerate(lines) if "--require-hashes" in line), None)
        copied = [line.split()[1:-1] for line in lines[: installs or 0] if line.startswith("COPY")]
        assert all(name.endswith(".lock") for names in copied for name in names), dockerfile


class Stack:
    def __init__(self, engine: DockerEngine, directory: Path) -> None:
        self.project = f"thawtest{os.getpid()}"
        self.engine = engine
        self._file = directory / "env"
        env = {**engine.env, "THAW_ENV_FILE": str(self._file), "THAW_PORT": str(free_port()), "THAW_STEM_CELLS": "off",
               "THAW_STORE_PORT": str(free_port()), "THAW_FETCHD_POOL_MB": "128", "THAW_MEMORY_MB": "1024",
               "DOCKER_SOCKET": engine.url.removeprefix("unix://")}  # fmt: skip
        exports = subprocess.run([str(ROOT / "scripts/compose-env.sh")], env=env, capture_output=True, text=True,
                                 check=True).stdout  # fmt: skip
        found = dict(re.findall(r"(?:export )?(\w+)=(\S+)", exports))
        self.env = {**env, **found}

    def compose(self, *arguments: str) -> str:
        command = [
            str(Path(sys.executable).with_name("docker-compose")),
            "--env-file",
            str(self._file),
            "-p",
            self.project,
        ]
        done = subprocess.run([*command, *arguments], env=self.engine.env, cwd=ROOT, timeout=UP_S, text=True,
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT)  # fmt: skip
        assert done.returncode == 0, done.stdout[-3000:]
        return done.stdout

    def thaw(self, *arguments: str) -> str:
        command = [str(Path(sys.executable).with_name("thaw")), *arguments]
        done = subprocess.run(command, env=self.env, cwd=ROOT, timeout=UP_S, capture_output=True, text=True)
        assert done.returncode == 0, (
            done.stdout + done.stderr + self.compose("logs", "--no-color", "--tail", "8")[-6000:]
        )
        return done.stdout

    def result(self, activation_id: str) -> Any:
        """Of an activation that ends some time: nobody announces records to a client, so it is asked for."""
        deadline = time.monotonic() + UP_S
        while True:
            try:
                return json.loads(self.thaw("activation", "result", activation_id))
            except AssertionError:
                if time.monotonic() > deadline:
                    raise
                threading.Event().wait(0.5)

    def kill(self, service: str) -> None:
        """kill -9 of the container's processes from outside, as an out-of-memory killer would."""
        os.kill(self.engine.client.containers.get(f"{self.project}-{service}-1").attrs["State"]["Pid"], 9)

    def owners(self) -> list[str]:
        """The label of the function containers of its two hosts: by where the engine has their volumes."""
        volumes = {f"host-{n}": self.engine.client.volumes.get(f"{self.project}_host-{n}") for n in (1, 2)}
        return [owner(host, Path(volume.attrs["Mountpoint"])) for host, volume in volumes.items()]

    def left(self, owners: list[str]) -> list[str]:
        client = self.engine.client
        ours = [c for name in owners for c in client.containers.list(all=True, filters={"label": f"thaw.owner={name}"})]
        parts = [*client.containers.list(all=True), *client.volumes.list(), *client.networks.list()]
        return [str(p.name) for p in [*ours, *(p for p in parts if self.project in str(p.name))]]


@pytest.fixture(scope="module")
def stack(docker_engine: DockerEngine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    for name in ("gateway", "invoker", "fetchd", "python"):
        docker_engine.build(name)
    standins.build(BASE, docker_engine.env)
    made = Stack(docker_engine, tmp_path_factory.mktemp("stack"))
    try:
        made.compose("up", "-d", "--wait", "--wait-timeout", str(UP_S))
        owners = made.owners()
        yield made
    finally:
        made.compose("down", "-v", "--timeout", "20")
    assert made.left(owners) == []


def test_the_stack_runs_a_function_in_a_container_of_its_own(stack: Stack, tmp_path: Path) -> None:
    code = tmp_path / "where.py"
    code.write_text(
        "import os\ndef main(args):\n    return {'uid': os.getuid(), 'files': sorted(os.listdir('/run/thaw'))}\n"
    )
    stack.thaw("action", "create", "where", str(code))
    found = json.loads(stack.thaw("action", "invoke", "where", "--blocking", "--result"))
    assert found == {"uid": 65534, "files": ["io"]}


def test_a_function_goes_on_when_its_invoker_was_killed(stack: Stack, tmp_path: Path) -> None:
    """The same container: adopted, not made anew."""
    code = tmp_path / "count.py"
    code.write_text("seen = []\ndef main(args):\n    seen.append(1)\n    return {'n': len(seen)}\n")
    stack.thaw("action", "create", "count", str(code))
    assert json.loads(stack.thaw("action", "invoke", "count", "--blocking", "--result")) == {"n": 1}
    for host in ("host-1-invoker", "host-2-invoker"):
        stack.kill(host)
    stack.compose("up", "-d", "--wait", "--wait-timeout", str(UP_S))
    assert json.loads(stack.thaw("action", "invoke", "count", "--blocking", "--result")) == {"n": 2}


@pytest.mark.full
@pytest.mark.parametrize("service", ["state", "gateway", "scheduler", "relay", "store", "host-1-fetchd"])
def test_a_202_ends_in_its_record_whatever_is_killed_after_it(stack: Stack, tmp_path: Path, service: str) -> None:
    code = tmp_path / "slow.py"
    code.write_text("import time\ndef main(args):\n    time.sleep(1)\n    return {'done': True}\n")
    stack.thaw("action", "update", "slow", str(code))
    activation = re.search(r"[0-9a-f]{32}", stack.thaw("action", "invoke", "slow"))
    assert activation is not None
    stack.kill(service)
    stack.compose("up", "-d", "--wait", "--wait-timeout", str(UP_S))
    assert stack.result(activation[0]) == {"done": True}
