"""A real invoker in this process, with a real state server and real containers.  fetchd is a fake on a real socket."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.invoker.platform import Host


@pytest.fixture
def run_dir() -> Iterator[Path]:
    """A directory with a short path, because the path of a socket has at most 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="thaw-", dir="/tmp") as directory:
        yield Path(directory)


@pytest.fixture
def host(valkey_url: str, run_dir: Path) -> Iterator[Host]:
    made = Host(valkey_url, run_dir)
    made.start()
    yield made
    made.stop()
    assert made.processes() == [], "the invoker left processes behind"


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let child processes import from the same checkout as this process."""
    root = Path(__file__).parents[2]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(root), str(root / "runtime-python")]))
