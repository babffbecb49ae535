"""The error of an activation whose container cannot be made: one sentence and what to do.  The host stays healthy."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from invoker.drivers.programs import PROGRAMS
from tests.docker.engine import ROOT, DockerEngine
from tests.invoker.platform import WAIT_S, Host
from thaw.action import KIND_PYTHON
from thaw.errors import ErrorInfo
from thaw.instance import InstanceState

HELLO = "def main(args):\n    return {'ok': True}\n"


@contextmanager
def host_with(engine: DockerEngine, url: str, run_dir: Path, **settings: Any) -> Iterator[Host]:
    image = engine.build("python")
    chosen = {"driver": "docker", "docker_host": engine.url, "image_python": image, "image_pull_s": 0.0, **settings}
    with Host(url, run_dir, **chosen) as host:
        host.deploy(HELLO)
        yield host
    assert engine.containers(f"thaw-{host.agent.driver.owner}") == []  # type: ignore[attr-defined]


def failed(host: Host) -> ErrorInfo:
    """The error of a start that fails.  The start leaves nothing."""
    gone = host.events.instance(host.launch(), InstanceState.GONE)
    assert gone.error is not None
    live = host.agent.fleet.find(gone.instance_id)
    assert live is None or live.gone.wait(WAIT_S)
    assert host.agent.fleet.ledger.holders() == {}
    return gone.error


def goes_on(host: Host) -> None:
    record = host.ready()
    assert host.run(record.instance_id, {})[0] == 200
    host.release_after_runs(record.instance_id)
    host.events.instance(record.instance_id, InstanceState.GONE)


def test_an_image_that_is_missing(docker_engine: DockerEngine, valkey_url: str, run_dir: Path) -> None:
    with host_with(docker_engine, valkey_url, run_dir, image_python="thaw-test/never-built:1") as host:
        error = failed(host)
    assert (error.code, error.message) == ("PlatformError", "the image thaw-test/never-built:1 is not on this host")
    assert error.hint == "make images, or docker pull"


def test_a_pull_that_hangs(docker_engine: DockerEngine, valkey_url: str, run_dir: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as registry:
        image = f"127.0.0.1:{registry.getsockname()[1]}/thaw/python:1"
        with host_with(docker_engine, valkey_url, run_dir, image_python=image, image_pull_s=0.5) as host:
            error = failed(host)
    assert error.message == f"pulling {image} took longer than 0.5 s"
    assert error.hint.startswith("make images builds Thaw's own")


PROGRAMS_OF_WOE = {
    "exits at once": (
        "import sys; sys.exit('no such model')",
        "InitFailed",
        "ended while it started (status 1): no such",
    ),
    "never listens and ignores SIGTERM": (
        "import signal; signal.signal(15, signal.SIG_IGN)\nwhile True: signal.pause()",
        "PlatformError",
        "did not answer in time",
    ),
    "eats its memory": (
        "held = []\nwhile True: held.append(bytearray(1 << 20))",
        "WorkerLost",
        "out of memory: its limit is 128 MiB",
    ),
    "prints without end and never listens": ("while True: print('x' * 999)", "PlatformError", "did not answer in time"),
}


@pytest.mark.parametrize(
    "woe", [pytest.param(w, marks=pytest.mark.full if "never listens" in w else ()) for w in PROGRAMS_OF_WOE]
)
def test_a_container_that(
    docker_engine: DockerEngine, valkey_url: str, run_dir: Path, monkeypatch: pytest.MonkeyPatch, woe: str
) -> None:
    code, name, sentence = PROGRAMS_OF_WOE[woe]
    with host_with(docker_engine, valkey_url, run_dir) as host:
        with monkeypatch.context() as patched:
            patched.setitem(PROGRAMS, KIND_PYTHON, ("-c", code))
            patched.setattr("invoker.containers.start.CONTAINER_ANSWERS_S", 2.0)
            patched.setattr("invoker.containers.fleet.STOP_S", 0.2)
            error = failed(host)
        assert (error.code, bool(re.search(re.escape(sentence), error.message))) == (name, True), error
        goes_on(host)


def test_a_disk_that_is_full_where_the_host_keeps_its_sockets(
    docker_engine: DockerEngine, valkey_url: str, run_dir: Path
) -> None:
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", run_dir], check=True)
    try:
        with host_with(docker_engine, valkey_url, run_dir) as host:
            ballast = run_dir / "ballast"
            with ballast.open("wb", buffering=0) as file, pytest.raises(OSError, match="No space left"):
                while True:
                    file.write(b"x" * 4096)
            error = failed(host)
            assert error.message == f"cannot write to {run_dir}/c: No space left on device"
            assert error.hint == "make room where THAW_RUN_DIR is"
            ballast.unlink()
            goes_on(host)
    finally:
        subprocess.run(["umount", run_dir], check=True)


@pytest.fixture
def small_engine(docker_engine: DockerEngine, tmp_path: Path) -> Iterator[DockerEngine]:
    """An engine of its own with a small disk, in a network namespace of its own, with the image of functions."""
    image = docker_engine.build("python")
    home = Path(tempfile.mkdtemp(prefix="thaw-e", dir="/tmp"))
    (home / "data").mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=600m", "tmpfs", home / "data"], check=True)
    env = {**os.environ, "THAW_ENGINE_DIR": str(home)}
    subprocess.run(
        ["unshare", "--net", ROOT / "scripts/engine.sh", "up"], env=env, check=True, stdout=subprocess.DEVNULL
    )
    engine = DockerEngine(f"unix://{home}/docker.sock", ours=True)
    try:
        with (tmp_path / "image.tar").open("w+b") as file:
            file.writelines(docker_engine.client.images.get(image).save(named=True))
            file.seek(0)
            engine.client.images.load(file)
        engine.has(image)
        yield engine
    finally:
        engine.close()


@pytest.mark.full
def test_a_disk_that_is_full_where_the_engine_keeps_its_containers(
    small_engine: DockerEngine, valkey_url: str, run_dir: Path
) -> None:
    with host_with(small_engine, valkey_url, run_dir) as host:
        goes_on(host)
        ballast = Path(small_engine.script_env["THAW_ENGINE_DIR"], "data", "ballast")
        with ballast.open("wb", buffering=0) as file, pytest.raises(OSError, match="No space left"):
            while True:
                file.write(b"x" * (1 << 20))
        error = failed(host)
        assert "no space left on device" in error.message
        assert error.hint == "make room on the engine's disk: docker system prune"
        ballast.unlink()
        goes_on(host)
