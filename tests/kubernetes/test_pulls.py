"""The first start on a node pulls an image, and the start's trace says how long that took."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from invoker.drivers.base import Handle, Spec
from invoker.drivers.kubernetes import client, pulls
from invoker.drivers.kubernetes.driver import KubernetesDriver
from invoker.drivers.kubernetes.pulls import seconds_in
from tests.invoker.platform import until
from tests.kubernetes.api_server import Refusal, Request
from tests.kubernetes.cluster import WAIT_S, FakeCluster, Node, cell, spec
from tests.kubernetes.test_invoker import host_in
from thaw.ids import random_hex_id
from thaw.instance import InstanceState
from thaw.tracing.trace import Phase

PULLED = 'Successfully pulled image "acme/python:1" in 412ms ({} including waiting). Image size: 8123456789 bytes.'


@pytest.mark.parametrize(
    ("message", "seconds"),
    [
        (PULLED.format("3.25s"), 3.25),
        (PULLED.format("1m2.5s"), 62.5),
        (PULLED.format("1h0m0.5s"), 3600.5),
        (PULLED.format("532ms"), 0.532),
        (PULLED.format("740.5µs"), 0.0007405),
        (PULLED.format("1.2.3s"), 0.412),
        ('Successfully pulled image "acme/python:1" in 7.5s', 7.5),
        ('Successfully pulled image "acme/python:1" in 7.5s.', 7.5),
        ('Successfully pulled image "acme/python:1" in 1.2.3s', 0.0),
        ('Successfully pulled image "acme/python:1"', 0.0),
        ('Container image "acme/python:1" already present on machine', 0.0),
        ("", 0.0),
    ],
)
def test_what_a_node_says_of_a_pull_is_read(message: str, seconds: float) -> None:
    assert seconds_in(message) == pytest.approx(seconds)


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every start is slow, so it asks for the events of its pod."""
    monkeypatch.setattr(pulls, "_SLOW_S", 0.0)
    monkeypatch.setattr(pulls, "_ANSWERED_S", WAIT_S)


@pytest.mark.usefixtures("simple")
@pytest.mark.parametrize(("wanted", "slow_s"), [(spec(), WAIT_S), (cell(), 0.0)], ids=["not slow", "a stem cell"])
def test_a_start_that_is_not_slow_and_a_stem_cell_ask_nothing(
    node: Node, monkeypatch: pytest.MonkeyPatch, wanted: Spec, slow_s: float
) -> None:
    monkeypatch.setattr(pulls, "_SLOW_S", slow_s)
    node.api.noted["thaw-one"] = PULLED.format("3s")
    assert node.up(wanted).image_pull_s == 0.0
    assert not [r for r in node.api.requests if r.path.endswith("/events")]


@pytest.mark.usefixtures("simple", "slow")
def test_a_start_whose_pull_nobody_explains_does_not_fail(node: Node) -> None:
    refused = node.api.refuse_next(Refusal(403, "Forbidden", "events is forbidden"), "GET", path="/events")
    assert node.up().image_pull_s == 0.0
    assert refused


@pytest.mark.usefixtures("simple", "slow")
def test_an_answer_that_is_none_explains_nothing(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    node.api.noted["thaw-one"] = PULLED.format("1ms")
    monkeypatch.setattr(node.api, "_events_of", lambda query: {"items": None})
    assert node.up().image_pull_s == 0.0


@pytest.mark.usefixtures("simple")
def test_a_start_does_not_wait_for_an_answer_that_does_not_come(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pulls, "_SLOW_S", 0.0)
    monkeypatch.setattr(client, "_EVENTS_S", WAIT_S)
    asked, go_on = threading.Event(), threading.Event()

    def hold(request: Request) -> None:
        if request.path.endswith("/events"):
            asked.set()
            go_on.wait(WAIT_S)

    node.api.noted["thaw-one"] = PULLED.format("1ms")
    node.api.refuse = hold
    try:
        assert node.up().image_pull_s == 0.0
        assert asked.wait(WAIT_S)
    finally:
        go_on.set()


def test_a_start_that_fails_on_a_bug_leaves_no_pod(
    cluster: FakeCluster, valkey_url: str, run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = KubernetesDriver.start

    def fails(driver: KubernetesDriver, handle: Handle, wanted: Spec) -> Handle:
        start(driver, handle, wanted)
        raise ValueError("a bug")

    monkeypatch.setattr(KubernetesDriver, "start", fails)
    with host_in(cluster, valkey_url, run_dir) as host:
        instance_id = random_hex_id()
        host.launch(instance_id=instance_id)
        host.events.instance(instance_id, InstanceState.GONE)
        assert f"thaw-{instance_id}" not in cluster.api.left()


@pytest.mark.usefixtures("slow")
def test_the_trace_of_a_start_has_the_seconds_of_the_pull(cluster: FakeCluster, valkey_url: str, run_dir: Path) -> None:
    with host_in(cluster, valkey_url, run_dir) as host:
        instance_id = random_hex_id()
        cluster.api.noted[f"thaw-{instance_id}"] = PULLED.format("1ms")
        host.launch(instance_id=instance_id)
        group_id = host.events.instance(instance_id, InstanceState.READY).group_id
        until(lambda: any(e.name == Phase.CONTAINER_END for e in host.records.trace(group_id)))
        (end,) = [e for e in host.records.trace(group_id) if e.name == Phase.CONTAINER_END]
    assert end.attrs["image_pull_s"] == 0.001
