"""The limits of a claimed stem cell, and the cases in which the cluster or the node refuses them."""

from __future__ import annotations

import threading

import pytest

from invoker.drivers.base import Handle
from invoker.drivers.kubernetes.driver import KubernetesDriver
from tests.kubernetes.api_server import Refusal, Request
from tests.kubernetes.cluster import Node, cell, up
from thaw.errors import PlatformError

LARGE = 8 << 30
pytestmark = pytest.mark.usefixtures("simple")


@pytest.fixture
def waiting(driver: KubernetesDriver) -> Handle:
    return up(driver, cell())


def test_a_cluster_that_cannot_resize_keeps_a_limit_that_is_large_enough(node: Node, waiting: Handle) -> None:
    node.api.can_resize = False
    node.driver.limit(waiting, 1.0, 128 << 20)
    with pytest.raises(PlatformError, match="the stem cell's memory cannot grow"):
        node.driver.limit(waiting, 1.0, LARGE)


def test_a_cluster_that_never_takes_memory_away_bounds_the_rest(node: Node, waiting: Handle) -> None:
    """Kubernetes 1.33 behaves like this."""

    def refuse(request: Request) -> None:
        if request.path.endswith("/resize"):
            limits = request.body["spec"]["containers"][0]["resources"]["limits"]
            if "memory" in limits:
                raise Refusal(422, "Invalid", "memory limits cannot be decreased")

    node.api.refuse = refuse
    node.driver.limit(waiting, 0.1, 128 << 20)
    found = node.api.pods()["thaw-cell"]["spec"]["containers"][0]["resources"]
    assert found["requests"].items() >= {"cpu": "10m", "memory": str(128 << 20)}.items()
    assert found["limits"].items() >= {"cpu": "200m", "memory": str(2048 << 20)}.items()


def test_more_memory_is_there_when_the_limit_is_set(node: Node, waiting: Handle) -> None:
    returned, early = threading.Event(), []
    node.kubelet.before_resizing = lambda: early.append(returned.wait(0.5))
    node.driver.limit(waiting, 1.0, LARGE)
    returned.set()
    assert early == [False]


@pytest.mark.parametrize("reason", ["Deferred", "Infeasible"])
def test_a_node_that_cannot_give_more_memory_says_so_at_once(node: Node, waiting: Handle, reason: str) -> None:
    node.kubelet.unresized = {"reason": reason, "message": "Node didn't have enough capacity"}
    with pytest.raises(PlatformError, match=f"memory cannot grow: {reason}: Node didn't have enough capacity"):
        node.driver.limit(waiting, 1.0, LARGE)


def test_limits_that_the_node_does_not_grant_are_logged(
    node: Node, waiting: Handle, capsys: pytest.CaptureFixture[str]
) -> None:
    node.kubelet.unresized = {"reason": "Deferred", "message": "later"}
    node.driver.limit(waiting, 0.1, 128 << 20)
    node.api.wait_pod(lambda pod: bool(pod["status"].get("conditions")))
    node.driver.stop(waiting, deadline_s=5.0)  # its events come after that
    said = capsys.readouterr().err
    assert said.count("limit_not_applied") == 1
    assert "Deferred: later" in said
