from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from invoker.drivers.kubernetes.driver import KubernetesDriver
from tests.kubernetes.cluster import FakeCluster, Node, fake_cluster, runs

ROOT = Path(__file__).parents[2]


@pytest.fixture
def run_dir() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="thaw-", dir="/tmp") as directory:
        yield Path(directory)


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCluster]:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), str(ROOT / "runtime-python")]))
    with fake_cluster(tmp_path) as made:
        yield made


@pytest.fixture
def driver(cluster: FakeCluster, run_dir: Path) -> Iterator[KubernetesDriver]:
    made = cluster.driver(run_dir)
    cluster.api.wait_watched()
    yield made
    made.close()


@pytest.fixture
def node(cluster: FakeCluster, driver: KubernetesDriver) -> Node:
    return Node(cluster, driver)


@pytest.fixture
def simple(monkeypatch: pytest.MonkeyPatch) -> None:
    """Containers take connections and do nothing else."""
    runs(monkeypatch)
