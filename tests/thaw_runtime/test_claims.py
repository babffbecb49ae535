"""Stem cells of both kinds wait with small limits and are claimed with other limits.  The engine is the real one, and is
claimed when it is ready.

The limits are files of a control group, which a mount namespace puts in place of the machine's own files.  A claim
changes them as a container engine does.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.thaw_runtime.conftest import ROOT, Container, Zygote, forked_container
from tests.thaw_runtime.fake_descriptor_socket import FakeDescriptorSocket
from tests.thaw_runtime.models import real_model
from tests.thaw_runtime.test_vllm import CAPITAL, answer
from thaw.dev.known_answers import FRANCE

pytestmark = pytest.mark.vllm

GIB = 1 << 30
READY_S = 120.0
UNDER = 'mount --bind "$0" /sys/fs/cgroup && exec "$@"'


class Group:
    """The files of a control group that uses 300 MiB."""

    def __init__(self, directory: Path, limit: int) -> None:
        self.directory = directory
        directory.mkdir()
        (directory / "memory.current").write_text(str(300 << 20))
        self.limit(limit)

    def limit(self, n_bytes: int) -> None:
        (self.directory / "memory.max").write_text(str(n_bytes))

    def runs(self, *command: str) -> list[str]:
        return ["unshare", "--mount", "sh", "-c", UNDER, str(self.directory), *command]


LOOK = """
import functools, gc, json
from thaw_runtime.engine.vllm import env as engine_env
engine_env.prepare()
from thaw_runtime.engine.vllm import configuration, warm
from thaw.dev.known_answers import FRANCE
warm.warm_up()
configuration.forget_surroundings()
caches = [o for o in gc.get_objects() if isinstance(o, functools._lru_cache_wrapper) and o.cache_info().currsize]
print("KEPT", json.dumps(sorted({f"{c.__wrapped__.__module__}.{c.__wrapped__.__qualname__}" for c in caches})))
"""
OF_THE_CODE = (
    "vllm.config.vllm.",
    "vllm.logger.",
    "vllm.model_executor.models.registry.",
    "vllm.transformers_utils.",
    "vllm.utils.flashinfer.",
    "vllm.utils.func_utils.",
    "vllm.utils.import_utils.",
    "vllm.platforms.interface.in_wsl",
)
"""Caches that vLLM may keep: the available packages, models and kernel.  No claim changes these."""


@pytest.fixture
def group(tmp_path: Path) -> Group:
    """The control group of a waiting stem cell, with less memory than the engine's KV cache takes (docs/docker.md)."""
    return Group(tmp_path / "cgroup", 512 << 20)


@pytest.fixture
def descriptor_socket(tmp_path: Path) -> Iterator[FakeDescriptorSocket]:
    made = FakeDescriptorSocket(real_model(), tmp_path / "socket")
    yield made
    made.close()


def wait_ready(cell: Container) -> None:
    """Wait until the stem cell is ready.  It writes a line to stderr, and no message announces this to a test."""
    bell = threading.Event()
    for _ in range(int(READY_S / 0.05)):
        said = [json.loads(line) for line in cell.err.read_text().splitlines() if line.startswith("{")]
        if any(line["event"] == "ready" for line in said):
            return
        assert cell.process.poll() is None, cell.err.read_text()
        bell.wait(0.05)
    raise AssertionError("the cell was never ready")


def test_nothing_that_vllm_has_looked_up_about_its_surroundings_outlives_a_claim() -> None:
    """A cache that a newer vLLM adds is either known not to depend on a claim, or has to be forgotten."""
    env = dict(os.environ, PYTHONPATH=f"{ROOT}:{ROOT / 'runtime-python'}")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", LOOK],
        env=env,
        capture_output=True,
        text=True,
        timeout=READY_S,
        check=False,
    )
    line = next((line for line in done.stdout.splitlines() if line.startswith("KEPT ")), None)
    assert line is not None, done.stderr[-2000:]
    kept = json.loads(line.removeprefix("KEPT "))
    assert [name for name in kept if name.startswith("vllm.") and not name.startswith(OF_THE_CODE)] == []


def test_a_cell_that_is_a_container_and_ready_starts_under_the_limits_of_its_claim(
    group: Group, descriptor_socket: FakeDescriptorSocket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("THAW_WARM", "on")
    cell = Container(group.runs(sys.executable, "-m", "thaw_runtime.llm.main"), tmp_path, descriptor_socket)
    try:
        wait_ready(cell)
        group.limit(4 * GIB)
        status, reply = cell.init()
        assert status == 200, reply
        assert answer(cell, CAPITAL) == FRANCE.text
    finally:
        cell.close()


def test_every_fork_of_a_zygote_starts_under_the_limits_of_its_own_claim(
    group: Group, descriptor_socket: FakeDescriptorSocket, tmp_path: Path
) -> None:
    """Two claims succeed, and between them is one whose host grants less memory than was promised.

    This is not a developer's error.
    """
    zygote = Zygote(tmp_path, group.runs)
    try:
        for name, limit, outcome in (("a", 4 * GIB, 200), ("b", 512 << 20, 500), ("c", 3 * GIB, 200)):
            group.limit(limit)
            with forked_container(zygote, tmp_path / name, descriptor_socket) as container:
                status, reply = container.init()
                assert status == outcome, reply
                if outcome == 200:
                    assert answer(container, CAPITAL) == FRANCE.text
                else:
                    assert reply["info"]["code"] == "PlatformError"
                    assert "less memory than it promised" in reply["error"]
                    assert reply["info"]["hint"]
    finally:
        zygote.close()
