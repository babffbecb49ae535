"""A whole invoker over this driver: a function starts cold and from a stem cell, and its errors reach the record."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from invoker.drivers.kubernetes.driver import KubernetesDriver
from invoker.drivers.kubernetes.spec import CLAIMANT, ROLE
from tests.invoker.platform import Host, until
from tests.kubernetes.api_server import NAMESPACE, Refusal, Request
from tests.kubernetes.cluster import FakeCluster
from tests.kubernetes.kubelet import NODE
from thaw.action import KIND_PYTHON
from thaw.ids import random_hex_id
from thaw.instance import InstanceState, StartMode

HELLO = "def main(args):\n    print('hello')\n    return {'ok': True}\n"


def by_hand(pod: dict[str, Any]) -> None:
    """What ``kubectl delete`` does to a pod."""
    pod["metadata"] |= {"deletionTimestamp": "2026-01-01T00:00:00Z", "deletionGracePeriodSeconds": 1}


@contextmanager
def host_in(cluster: FakeCluster, url: str, run_dir: Path, **settings: Any) -> Iterator[Host]:
    chosen = {
        "driver": "kubernetes",
        "kubeconfig": cluster.kubeconfig,
        "pod_namespace": NAMESPACE,
        "node_name": NODE,
        "pod_logs": str(cluster.directory / "pod-logs"),
        **settings,
    }
    with Host(url, run_dir, **chosen) as host:
        host.deploy(HELLO)
        yield host


def test_a_function_runs_in_a_pod_and_its_lines_are_found(cluster: FakeCluster, valkey_url: str, run_dir: Path) -> None:
    with host_in(cluster, valkey_url, run_dir) as host:
        record = host.ready()
        assert record.start_mode is StartMode.COLD
        activation = random_hex_id()
        status, answer = host.run(record.instance_id, {}, activation_id=activation)
        assert (status, answer) == (200, {"ok": True})
        lines = host.logs(record.instance_id, activation)
        assert lines is not None
        assert [line.partition(": ")[2] for line in lines] == ["hello"]
        host.release(record.instance_id)
        host.events.instance(record.instance_id, InstanceState.GONE)
    assert cluster.api.left() == set()


def test_a_stem_cell_serves_a_start_and_is_claimed_by_it(cluster: FakeCluster, valkey_url: str, run_dir: Path) -> None:
    with host_in(cluster, valkey_url, run_dir) as host:
        cells = host.agent.cells
        cells.set_target(KIND_PYTHON, 1)
        until(lambda: bool(cells.view()))
        name = f"thaw-{cells.view()[0].cell_id}"
        record = host.ready()
        assert record.start_mode is StartMode.PREWARMED
        assert host.run(record.instance_id, {}) == (200, {"ok": True})
        pod = cluster.api.pods()[name]
        assert pod["metadata"]["labels"][ROLE] == "instance"
        assert pod["spec"]["containers"][0]["resources"]["limits"]["memory"] == str(128 << 20)
    assert cluster.api.left() == set()


def test_a_start_whose_stem_cell_another_invoker_took_makes_a_pod(
    cluster: FakeCluster, valkey_url: str, run_dir: Path
) -> None:
    def taken(pod: dict[str, Any]) -> None:
        pod["metadata"]["labels"][ROLE] = "instance"
        pod["metadata"]["annotations"][CLAIMANT] = "another"

    with host_in(cluster, valkey_url, run_dir) as host:
        cells = host.agent.cells
        cells.set_target(KIND_PYTHON, 1)
        until(lambda: bool(cells.view()))
        cell_id = cells.view()[0].cell_id
        cluster.api.change(f"thaw-{cell_id}", taken)
        record = host.ready()
        assert record.start_mode is StartMode.COLD
        assert host.run(record.instance_id, {}) == (200, {"ok": True})
        assert (run_dir / "c" / hashlib.sha256(cell_id.encode()).hexdigest()[:12]).exists()  # the other's now
        cluster.kubelet.kill(f"thaw-{cell_id}")
    assert cluster.api.left() == {f"thaw-{cell_id}"}


def test_a_start_whose_stem_cell_has_just_gone_removes_what_is_left_of_it(
    cluster: FakeCluster, valkey_url: str, run_dir: Path
) -> None:
    with host_in(cluster, valkey_url, run_dir) as host:
        cells = host.agent.cells
        cells.set_target(KIND_PYTHON, 1)
        until(lambda: bool(cells.view()))
        handle, driver = cells._waiting[0], host.agent.driver
        assert isinstance(driver, KubernetesDriver)
        container = driver._get(handle)
        hears, cluster.api.on_change = cluster.api.on_change, lambda event: None  # the node hears of it later
        cluster.api.change(f"thaw-{handle.container_id}", by_hand)
        cluster.api.on_change = hears
        until(lambda: container.pod is not None and container.pod.deleting)
        record = host.ready()
        assert record.start_mode is StartMode.COLD
        assert not handle.directory.exists()


def test_a_start_whose_stem_cell_cannot_have_its_memory_makes_a_pod(
    cluster: FakeCluster, valkey_url: str, run_dir: Path
) -> None:
    cluster.kubelet.unresized = {"reason": "Infeasible", "message": "too little"}
    with host_in(cluster, valkey_url, run_dir) as host:
        cells, driver = host.agent.cells, host.agent.driver
        assert isinstance(driver, KubernetesDriver)
        driver._limits = replace(driver._limits, default_memory_mb=64)  # of a stem cell; the function has 128
        cells.set_target(KIND_PYTHON, 1)
        until(lambda: bool(cells.view()))
        cell_id = cells.view()[0].cell_id
        record = host.ready()
        assert record.start_mode is StartMode.COLD
        assert host.run(record.instance_id, {}) == (200, {"ok": True})
        assert f"thaw-{cell_id}" not in cluster.api.left()


def test_an_image_that_cannot_be_pulled_is_the_starts_error(
    cluster: FakeCluster, valkey_url: str, run_dir: Path
) -> None:
    cluster.kubelet.trouble = {"reason": "ErrImagePull", "message": "manifest unknown"}
    with host_in(cluster, valkey_url, run_dir, image_python="acme/none:1") as host:
        gone = host.events.instance(host.launch(), InstanceState.GONE)
        assert gone.error is not None
        assert gone.error.message == "the node cannot pull the image acme/none:1: manifest unknown"
    assert cluster.api.left() == set()


def test_a_webhooks_text_is_the_starts_error(cluster: FakeCluster, valkey_url: str, run_dir: Path) -> None:
    def refuse(request: Request) -> None:
        if request.method == "POST":
            raise Refusal(400, "BadRequest", 'admission webhook "a.b" denied the request: ask Alice')

    cluster.api.refuse = refuse
    with host_in(cluster, valkey_url, run_dir) as host:
        gone = host.events.instance(host.launch(), InstanceState.GONE)
        assert gone.error is not None
        assert "denied the request: ask Alice" in gone.error.message
