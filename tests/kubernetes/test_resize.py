"""The limits of a claimed stem cell, and the cases in which the cluster or the node refuses them."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from invoker.drivers.kubernetes.driver import KubernetesDriver
from tests.kubernetes.api_server import Refusal, Request
from tests.kubernetes.cluster import FakeCluster
from tests.kubernetes.helpers import cell, runs, up
from thaw.errors import PlatformError

LARGE = 8 << 30


@pytest.fixture(autouse=True)
def simple(monkeypatch: pytest.MonkeyPatch) -> None:
    runs(monkeypatch)


def resources(cluster: FakeCluster) -> dict[str, Any]:
    found: dict[str, Any] = cluster.api.pods()["thaw-cell"]["spec"]["containers"][0]["resources"]
    return {kind: {k: v for k, v in amounts.items() if k != "ephemeral-storage"} for kind, amounts in found.items()}


def test_a_cluster_that_cannot_resize_keeps_a_limit_that_is_large_enough(
    cluster: FakeCluster, driver: KubernetesDriver
) -> None:
    cluster.api.can_resize = False
    waiting = up(driver, cell())
    driver.limit(waiting, 1.0, 128 << 20)
    with pytest.raises(PlatformError, match="the stem cell's memory cannot grow"):
        driver.limit(waiting, 1.0, 8 << 30)


def test_a_cluster_that_never_takes_memory_away_bounds_the_rest(cluster: FakeCluster, driver: KubernetesDriver) -> None:
    """Kubernetes 1.33 behaves like this."""

    def refuse(request: Request) -> None:
        if request.path.endswith("/resize"):
            limits = request.body["spec"]["containers"][0]["resources"]["limits"]
            if "memory" in limits:
                raise Refusal(422, "Invalid", "memory limits cannot be decreased")

    waiting = up(driver, cell())
    cluster.api.refuse = refuse
    driver.limit(waiting, 0.1, 128 << 20)
    assert resources(cluster) == {
        "requests": {"cpu": "10m", "memory": str(128 << 20)},
        "limits": {"cpu": "200m", "memory": str(2048 << 20)},
    }


def test_more_memory_is_there_when_the_limit_is_set(cluster: FakeCluster, driver: KubernetesDriver) -> None:
    waiting = up(driver, cell())
    returned, early = threading.Event(), []
    cluster.kubelet.before_resizing = lambda: early.append(returned.wait(0.5))
    driver.limit(waiting, 1.0, LARGE)
    returned.set()
    assert early == [False]


@pytest.mark.parametrize("reason", ["Deferred", "Infeasible"])
def test_a_node_that_cannot_give_more_memory_says_so_at_once(
    cluster: FakeCluster, driver: KubernetesDriver, reason: str
) -> None:
    waiting = up(driver, cell())
    cluster.kubelet.unresized = {"reason": reason, "message": "Node didn't have enough capacity"}
    with pytest.raises(PlatformError, match=f"memory cannot grow: {reason}: Node didn't have enough capacity"):
        driver.limit(waiting, 1.0, LARGE)


def test_limits_that_the_node_does_not_grant_are_logged(
    cluster: FakeCluster, driver: KubernetesDriver, capsys: pytest.CaptureFixture[str]
) -> None:
    waiting = up(driver, cell())
    cluster.kubelet.unresized = {"reason": "Deferred", "message": "later"}
    driver.limit(waiting, 0.1, 128 << 20)
    cluster.api.wait_pod(lambda pod: bool(pod["status"].get("conditions")))
    driver.stop(waiting, deadline_s=5.0)  # its events come after that
    said = capsys.readouterr().err
    assert said.count("limit_not_applied") == 1
    assert "Deferred: later" in said
