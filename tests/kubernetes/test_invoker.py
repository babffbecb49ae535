"""A whole invoker over this driver: a function starts cold and from a stem cell, and its errors reach the record."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from invoker.containers.spare_cells import FORK_BYTES
from invoker.drivers.kubernetes.driver import KubernetesDriver
from invoker.drivers.kubernetes.spec import CLAIMANT, ROLE
from invoker.drivers.programs import PROGRAMS
from relay.protocol.data_port_messages import PreflightFound, PreflightWanted
from tests.invoker import fake_llm
from tests.invoker.fake_fetchd import FakeFetchd
from tests.invoker.platform import Host, opened, until
from tests.kubernetes.api_server import NAMESPACE, Refusal, mark_deleted
from tests.kubernetes.cluster import FakeCluster
from tests.kubernetes.invokers import directory_of
from tests.kubernetes.kubelet import NODE
from thaw.action import KIND_LLM, KIND_PYTHON
from thaw.config import parse_llm_config
from thaw.ids import InstanceId, random_hex_id
from thaw.instance import InstanceState, StartMode

HELLO = "def main(args):\n    print('hello')\n    return {'ok': True}\n"
DENIED = Refusal(400, "BadRequest", 'admission webhook "a.b" denied the request: ask Alice')


def taken_by_another(pod: dict[str, Any]) -> None:
    pod["metadata"]["labels"][ROLE] = "instance"
    pod["metadata"]["annotations"][CLAIMANT] = "another"


@contextmanager
def host_in(cluster: FakeCluster, url: str, run_dir: Path, **settings: Any) -> Iterator[Host]:
    place = {"pod_namespace": NAMESPACE, "node_name": NODE, "pod_logs": str(cluster.directory / "pod-logs")}
    with Host(url, run_dir, **{"driver": "kubernetes", "kubeconfig": cluster.kubeconfig, **place, **settings}) as host:
        host.deploy(HELLO)
        yield host


@pytest.fixture
def host(cluster: FakeCluster, valkey_url: str, run_dir: Path) -> Iterator[Host]:
    with host_in(cluster, valkey_url, run_dir) as made:
        yield made


def stem_cell(host: Host, kind: str = KIND_PYTHON) -> str:
    """Have the host make one; its pod."""
    host.agent.cells.set_target(kind, 1)
    until(lambda: bool(host.agent.cells.view()))
    return f"thaw-{host.agent.cells.view()[0].cell_id}"


def driver_of(host: Host) -> KubernetesDriver:
    assert isinstance(host.agent.driver, KubernetesDriver)
    return host.agent.driver


def test_a_function_runs_in_a_pod_and_its_lines_are_found(cluster: FakeCluster, host: Host) -> None:
    record = host.ready()
    assert record.start_mode is StartMode.COLD
    activation = random_hex_id()
    status, answer = host.run(record.instance_id, {}, activation_id=activation)
    assert (status, answer) == (200, {"ok": True})
    lines = host.logs(record.instance_id, activation)
    assert lines is not None
    assert [line.partition(": ")[2] for line in lines] == ["hello"]
    host.release_after_runs(record.instance_id)
    host.events.instance(record.instance_id, InstanceState.GONE)
    assert cluster.api.left() == set()


def test_a_stem_cell_serves_a_start_and_is_claimed_by_it(cluster: FakeCluster, valkey_url: str, run_dir: Path) -> None:
    with host_in(cluster, valkey_url, run_dir) as host:
        name = stem_cell(host)
        record = host.ready()
        assert record.start_mode is StartMode.PREWARMED
        assert host.run(record.instance_id, {}) == (200, {"ok": True})
        pod = cluster.api.pods()[name]
        assert pod["metadata"]["labels"][ROLE] == "instance"
        assert pod["spec"]["containers"][0]["resources"]["limits"]["memory"] == str(128 << 20)
    assert cluster.api.left() == set()


def test_a_start_whose_stem_cell_another_took_makes_a_pod(cluster: FakeCluster, valkey_url: str, run_dir: Path) -> None:
    with host_in(cluster, valkey_url, run_dir) as host:
        name = stem_cell(host)
        cluster.api.change(name, taken_by_another)
        record = host.ready()
        assert record.start_mode is StartMode.COLD
        assert host.run(record.instance_id, {}) == (200, {"ok": True})
        assert directory_of(run_dir, name).exists()  # the other's now
        cluster.kubelet.kill(name)
    assert cluster.api.left() == {name}


def test_a_start_whose_stem_cell_has_just_gone_removes_what_is_left_of_it(cluster: FakeCluster, host: Host) -> None:
    name, handle = stem_cell(host), host.agent.cells._waiting[0]
    container = driver_of(host)._get(handle)
    hears, cluster.api.on_change = cluster.api.on_change, lambda event: None  # the node hears of it later
    cluster.api.change(name, mark_deleted)
    cluster.api.on_change = hears
    until(lambda: container.pod is not None and container.pod.deleting)
    assert host.ready().start_mode is StartMode.COLD
    assert not handle.directory.exists()


def test_a_start_whose_stem_cell_cannot_have_its_memory_makes_a_pod(cluster: FakeCluster, host: Host) -> None:
    cluster.kubelet.unresized = {"reason": "Infeasible", "message": "too little"}
    driver = driver_of(host)
    small = replace(driver._limits, default_memory_mb=64)  # for stem cells; the function has 128
    driver._limits = driver._bodies._limits = small
    name, record = stem_cell(host), host.ready()
    assert record.start_mode is StartMode.COLD
    assert host.run(record.instance_id, {}) == (200, {"ok": True})
    assert name not in cluster.api.left()


class Listening(FakeFetchd):
    """A node looks whether a pod's socket to fetchd is there, and the driver whether fetchd listens on it."""

    def __init__(self, directory: Path, sockets: ExitStack) -> None:
        super().__init__(directory)
        self._sockets = sockets

    def open_descriptor_socket(self, instance_id: InstanceId, *, deadline_s: float = 0) -> str:
        path = super().open_descriptor_socket(instance_id)
        listener = self._sockets.enter_context(socket.socket(socket.AF_UNIX))
        listener.bind(path)
        listener.listen()
        return path


@pytest.fixture
def engine(cluster: FakeCluster, valkey_url: str, run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Host]:
    """A host whose fetchd is in this process and that has a stem cell of an engine."""
    monkeypatch.setitem(PROGRAMS, KIND_LLM, (fake_llm.__file__,))
    with ExitStack() as sockets, host_in(cluster, valkey_url, run_dir, memory_mb=8192) as host:
        fetchd = Listening(run_dir, sockets)
        host.agent.fleet.fetch = host.agent.cells._fetch = host.agent.port.preflights._fetch = fetchd
        stem_cell(host, KIND_LLM)
        yield host


def preflight(host: Host) -> PreflightFound:
    config = parse_llm_config({"kind": KIND_LLM, "model": {"uri": "s3://models/m"}})
    return host.agent.port.preflights.check(PreflightWanted(config, 20_000, True, "guest"))


def test_a_preflight_asks_a_stem_cell_that_no_other_invoker_can_take_meanwhile(
    cluster: FakeCluster, engine: Host, run_dir: Path
) -> None:
    (cell,) = engine.agent.cells.view()
    (question,) = run_dir.glob("door-*.init")
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(preflight, engine)
        with opened(question) as asked:  # opens when the container has the question
            pod = cluster.api.pods()[f"thaw-{cell.cell_id}"]
            asked.write('{"engine": "toy 1.0", "max_model_len": 512, "notes": []}')
        assert answer.result().engine == "toy 1.0"
    assert pod["metadata"]["labels"][ROLE] == "instance"
    assert pod["spec"]["containers"][0]["resources"]["limits"]["memory"] == str(cell.n_bytes + FORK_BYTES)
    assert f"thaw-{cell.cell_id}" not in cluster.api.left()


def test_a_preflight_whose_stem_cell_is_anothers_refuses_no_deploy(cluster: FakeCluster, engine: Host) -> None:
    name = f"thaw-{engine.agent.cells.view()[0].cell_id}"
    cluster.api.change(name, taken_by_another)
    found = preflight(engine)
    assert (found.unchecked, found.busy) == ("the host has no stem cell of the engine now", True)
    until(lambda: bool(engine.agent.cells.view()))
    cluster.api.refuse_next(DENIED, "PATCH")
    assert "ask Alice" in preflight(engine).unchecked
    cluster.api.refuse = lambda request: None
    cluster.kubelet.kill(name)


def test_what_the_cluster_says_is_the_starts_error(cluster: FakeCluster, valkey_url: str, run_dir: Path) -> None:
    cluster.kubelet.trouble = {"reason": "ErrImagePull", "message": "manifest unknown"}
    with host_in(cluster, valkey_url, run_dir, image_python="acme/none:1") as host:
        unpulled = host.events.instance(host.launch(), InstanceState.GONE)
        cluster.api.refuse_next(DENIED, "POST")
        denied = host.events.instance(host.launch(), InstanceState.GONE)
    assert unpulled.error is not None
    assert unpulled.error.message == "the node cannot pull the image acme/none:1: manifest unknown"
    assert denied.error is not None
    assert "denied the request: ask Alice" in denied.error.message
    assert cluster.api.left() == set()
