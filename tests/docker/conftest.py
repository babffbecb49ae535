"""The engine, and a run directory that is short enough for sockets."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docker.engine import DockerEngine, docker_engine

__all__ = ["docker_engine"]


@pytest.fixture
def own_engine(docker_engine: DockerEngine) -> Iterator[DockerEngine]:
    """An engine that may be killed, because scripts/engine.sh started it."""
    if not (Path(docker_engine.url.removeprefix("unix://")).parent / "exec").exists():
        pytest.fail("this engine is somebody's: unset DOCKER_HOST, so that the tests start one of their own")
    with docker_engine.unused():
        yield docker_engine
        docker_engine.forget_sockets()  # the test has no references to them any more
        docker_engine.connect()


@pytest.fixture
def run_dir() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="thaw-", dir="/tmp") as directory:
        yield Path(directory)
