from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kubernetes_real.own_cluster import OwnCluster

HERE = Path(__file__).parent


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Only ``-m kubernetes`` runs these tests: a run of all tests must not use a cluster that KUBECONFIG names."""
    if config.getoption("-m") == "kubernetes":
        return
    left_out = [item for item in items if item.path.is_relative_to(HERE)]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in set(left_out)]


@pytest.fixture(scope="session")
def own_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OwnCluster | None]:
    """A cluster on this machine, with the images of this checkout, or None if KUBECONFIG names another one."""
    if os.environ.get("KUBECONFIG"):
        yield None
        return
    cluster = OwnCluster()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", f"{Path(cluster.run('kubectl')).parent}:{os.environ['PATH']}")
        try:
            patch.setenv("KUBECONFIG", cluster.run("up", "2"))
            cluster.load(tmp_path_factory.mktemp("images") / "images.tar")
            yield cluster
        finally:
            cluster.run("down")
    assert subprocess.run(["pgrep", "-f", cluster.home], capture_output=True).stdout == b"", "a process is left"
