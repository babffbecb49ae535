"""Two invokers of one node, while one replaces the other: a stem cell is one's or the other's."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from invoker.drivers.kubernetes import later
from invoker.drivers.kubernetes.driver import KubernetesDriver
from invoker.drivers.socket_wait import listens
from tests.kubernetes.api_server import Request
from tests.kubernetes.cluster import FakeCluster
from tests.kubernetes.helpers import Ends, cell, runs, spec, up
from thaw.errors import WorkerLost


@pytest.fixture(autouse=True)
def simple(monkeypatch: pytest.MonkeyPatch) -> None:
    runs(monkeypatch)


@pytest.fixture
def driver(cluster: FakeCluster, run_dir: Path) -> Iterator[KubernetesDriver]:
    made = cluster.driver(run_dir, pod_name="invoker-a", pod_uid=cluster.api.add_invoker("invoker-a"))
    cluster.api.wait_watched()
    yield made
    made.close()


@pytest.fixture
def successor(cluster: FakeCluster, driver: KubernetesDriver, run_dir: Path) -> Iterator[KubernetesDriver]:
    made = cluster.driver(run_dir, pod_name="invoker-b", pod_uid=cluster.api.add_invoker("invoker-b"))
    cluster.api.wait_watched(2)
    yield made
    made.close()


def adopted(successor: KubernetesDriver) -> None:
    (owned,) = successor.list_owned()
    successor.adopt(owned)


def test_a_stem_cell_is_claimed_once(driver: KubernetesDriver, successor: KubernetesDriver) -> None:
    waiting = up(driver, cell())
    adopted(successor)
    assert driver.claim(waiting)
    assert not successor.claim(waiting)
    assert listens(waiting.socket_path)  # the loser has ended nothing
    assert driver.claim(waiting)  # the claim is repeated after a lost answer


def test_a_claim_survives_the_nodes_own_changes(cluster: FakeCluster, driver: KubernetesDriver) -> None:
    waiting = up(driver, cell())
    n_reports = 0

    def report(request: Request) -> None:
        nonlocal n_reports
        if request.method == "PATCH" and n_reports < 3:
            n_reports += 1
            cluster.api.change("thaw-cell", lambda pod: pod["status"].update(podIP=f"10.0.0.{n_reports}"))

    cluster.api.refuse = report
    assert driver.claim(waiting)
    assert n_reports == 3


def test_a_cell_that_is_claimed_while_the_successor_ends_what_is_left_goes_on(
    cluster: FakeCluster, driver: KubernetesDriver, successor: KubernetesDriver
) -> None:
    waiting = up(driver, cell())
    (owned,) = successor.list_owned()
    claims: list[bool] = []

    def claim_first(request: Request) -> None:
        if request.method == "DELETE" and not claims:
            claims.append(True)
            claims[0] = driver.claim(waiting)

    cluster.api.refuse = claim_first
    successor.end([owned])
    assert claims == [True]
    assert listens(waiting.socket_path)
    assert "thaw-cell" in cluster.api.pods()


def test_a_cell_that_the_successor_ended_cannot_be_claimed(
    cluster: FakeCluster, driver: KubernetesDriver, successor: KubernetesDriver
) -> None:
    ends = Ends(driver)
    waiting = up(driver, cell())
    (owned,) = successor.list_owned()
    assert successor.end([owned]) == [owned]
    ends.wait("cell")
    with pytest.raises(WorkerLost, match="is no more"):
        driver.claim(waiting)
    assert cluster.api.left() == set()


@pytest.mark.parametrize("its_pod_goes_on", [False, True])
def test_a_cell_whose_claimant_was_killed_is_ended(cluster: FakeCluster, run_dir: Path, its_pod_goes_on: bool) -> None:
    """An invoker writes its claim into the pod first.  Its container may be started again in the same pod."""
    first = {"pod_name": "invoker-a", "pod_uid": cluster.api.add_invoker("invoker-a")}
    killed = cluster.driver(run_dir, **first)
    cluster.api.wait_watched()
    waiting = up(killed, cell())
    assert killed.claim(waiting)
    killed.close()
    if not its_pod_goes_on:
        cluster.api.vanish("invoker-a")
    own = first if its_pod_goes_on else {"pod_name": "invoker-b", "pod_uid": cluster.api.add_invoker("invoker-b")}
    again = cluster.driver(run_dir, **own)
    (owned,) = again.list_owned()
    assert owned.labels == {"role": "instance"}
    again.end([owned])
    assert cluster.api.left() == set()
    assert not waiting.directory.exists()
    again.close()


def test_what_a_living_invoker_starts_is_left_to_it_until_it_is_no_more(
    cluster: FakeCluster, run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(later, "_FIRST_PAUSE_S", 0.05)
    monkeypatch.setattr(later, "_LONGEST_PAUSE_S", 0.05)
    old = cluster.driver(run_dir, pod_name="invoker-a", pod_uid=cluster.api.add_invoker("invoker-a"))
    cluster.api.wait_watched()
    waiting = up(old, cell())
    assert old.claim(waiting)
    old.relabel(waiting, {"role": "instance", "record": "{}"})
    up(old, spec("cold"))
    preparing = old.create(spec("preparing"))
    new = cluster.driver(run_dir, pod_name="invoker-b", pod_uid=cluster.api.add_invoker("invoker-b"))
    left = new.list_owned()
    assert {o.handle.container_id: dict(o.labels) for o in left} == {
        "cell": {"role": "instance", "record": "{}"},
        "cold": {"role": "instance"},
    }
    assert new.end(left) == []
    assert preparing.directory.exists()
    assert listens(waiting.socket_path)
    assert cluster.api.left() == {"thaw-cell", "thaw-cold"}
    cluster.api.vanish("invoker-a")
    for name in ("thaw-cell", "thaw-cold"):
        cluster.api.wait_request(lambda r, name=name: r.method == "DELETE" and r.path.endswith(name))
    new.close()
    old.close()
