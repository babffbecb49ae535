"""Two invokers of one node, while one replaces the other: each container is one's or the other's."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from invoker.drivers.kubernetes import later
from invoker.drivers.kubernetes.driver import KubernetesDriver
from invoker.drivers.kubernetes.spec import CLAIMANT
from invoker.drivers.socket_wait import listens
from tests.container_ends import Ends
from tests.kubernetes.api_server import Request
from tests.kubernetes.cluster import FakeCluster
from tests.kubernetes.helpers import WAIT_S, cell, runs, spec, up
from thaw.errors import Unavailable, WorkerLost
from thaw.kubernetes.api import Event


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


# instances -----------------------------------------------------------------------------------------------------------


def pod_of(cluster: FakeCluster, name: str = "thaw-one") -> dict[str, Any]:
    found: dict[str, Any] = cluster.api.pods()[name]
    return found


def test_an_instance_of_an_invoker_that_lives_is_left_to_it(
    cluster: FakeCluster, driver: KubernetesDriver, successor: KubernetesDriver
) -> None:
    serving = up(driver, spec())
    before = pod_of(cluster)["metadata"]["annotations"]
    (owned,) = successor.list_owned()
    assert not successor.take_over(owned)
    assert pod_of(cluster)["metadata"]["annotations"] == before
    assert successor.end([owned]) == []
    assert listens(serving.socket_path)


def test_an_instance_is_taken_over_once_its_invoker_is_no_more(
    cluster: FakeCluster, driver: KubernetesDriver, successor: KubernetesDriver
) -> None:
    serving, ends = up(driver, spec()), Ends(successor)
    (owned,) = successor.list_owned()
    cluster.api.vanish("invoker-a")
    assert successor.take_over(owned)
    successor.adopt(owned)
    assert successor.take_over(owned), "the answer to the first patch may be lost"
    assert pod_of(cluster)["metadata"]["annotations"][CLAIMANT].startswith("invoker-b/")
    assert listens(serving.socket_path)
    successor.stop(serving, deadline_s=1.0)
    ends.wait("one")
    successor.remove(serving)
    assert cluster.api.left() == set()


def test_two_successors_do_not_both_take_an_instance_over(
    cluster: FakeCluster, driver: KubernetesDriver, successor: KubernetesDriver, run_dir: Path
) -> None:
    up(driver, spec())
    (owned,) = successor.list_owned()
    other = cluster.driver(run_dir, pod_name="invoker-c", pod_uid=cluster.api.add_invoker("invoker-c"))
    cluster.api.vanish("invoker-a")
    taken: list[bool] = []

    def other_is_first(request: Request) -> None:
        if request.method == "PATCH" and not taken:
            taken.append(True)
            taken[0] = other.take_over(owned)

    cluster.api.refuse = other_is_first
    assert not successor.take_over(owned)
    assert taken == [True]
    assert pod_of(cluster)["metadata"]["annotations"][CLAIMANT].startswith("invoker-c/")
    other.close()


@pytest.mark.parametrize("n_reports", [3, 1000])
def test_an_instance_is_taken_over_though_its_node_reports_meanwhile(
    cluster: FakeCluster, driver: KubernetesDriver, successor: KubernetesDriver, n_reports: int
) -> None:
    up(driver, spec())
    (owned,) = successor.list_owned()
    cluster.api.vanish("invoker-a")
    reports = iter(range(n_reports))

    def report(request: Request) -> None:
        if request.method == "PATCH" and (n := next(reports, None)) is not None:
            cluster.api.change("thaw-one", lambda pod: pod["status"].update(podIP=f"10.0.0.{n}"))

    cluster.api.refuse = report
    if n_reports == 3:
        assert successor.take_over(owned)
    else:  # and its invoker begins anew, which is better than two that use it
        with pytest.raises(Unavailable, match="changes too often to be taken over"):
            successor.take_over(owned)


def test_an_invoker_whose_instance_was_taken_over_hears_of_it_and_ends_nothing(
    cluster: FakeCluster, run_dir: Path
) -> None:
    """Its pod's object was removed by force while its process goes on."""
    replaced = threading.Event()
    uid = cluster.api.add_invoker("invoker-a")
    old = cluster.driver(run_dir, replaced=replaced.set, pod_name="invoker-a", pod_uid=uid)
    cluster.api.wait_watched()
    serving, waiting = up(old, spec()), up(old, cell())
    cluster.api.vanish("invoker-a")
    new = cluster.driver(run_dir, pod_name="invoker-b", pod_uid=cluster.api.add_invoker("invoker-b"))
    cluster.api.wait_watched(2)
    instance = next(o for o in new.list_owned() if o.handle.container_id == "one")
    assert new.take_over(instance)
    new.adopt(instance)
    assert replaced.wait(WAIT_S)
    old.stop(serving, deadline_s=1.0)
    old.remove(serving)
    assert listens(serving.socket_path)
    assert "deletionTimestamp" not in pod_of(cluster)["metadata"]
    old.stop(waiting, deadline_s=1.0)  # a cell that nobody has claimed is either one's to end
    old.remove(waiting)
    old.close()
    new.stop(serving, deadline_s=1.0)
    new.remove(serving)
    assert cluster.api.left() == set()
    new.close()


def test_a_late_report_of_the_time_before_an_instance_was_taken_over_ends_no_invoker(
    cluster: FakeCluster, driver: KubernetesDriver, run_dir: Path
) -> None:
    replaced = threading.Event()
    uid = cluster.api.add_invoker("invoker-b")
    new = cluster.driver(run_dir, replaced=replaced.set, pod_name="invoker-b", pod_uid=uid)
    serving = up(driver, spec())
    before = driver._get(serving).pod
    assert before is not None
    cluster.api.vanish("invoker-a")
    (owned,) = new.list_owned()
    assert new.take_over(owned)
    new.adopt(owned)
    new._take(Event("MODIFIED", before.version, before))
    container = new._get(serving)
    assert not container.is_anothers
    assert not replaced.is_set()
    new._take(Event("MODIFIED", "1000000", replace(before, version="1000000")))
    assert replaced.wait(WAIT_S)
    new.close()


def test_an_invoker_that_has_not_heard_yet_does_not_end_what_was_taken_over(
    cluster: FakeCluster, driver: KubernetesDriver, successor: KubernetesDriver
) -> None:
    serving = up(driver, spec())
    (owned,) = successor.list_owned()
    cluster.api.vanish("invoker-a")
    container = driver._get(serving)
    seen = container.pod
    assert successor.take_over(owned)
    with container.lock:
        container.pod = seen
    driver.stop(serving, deadline_s=1.0)
    driver.remove(serving)
    assert listens(serving.socket_path)
    assert serving.directory.exists()


def test_a_cell_that_the_successor_has_claimed_is_not_ended_by_an_invoker_that_stops(
    driver: KubernetesDriver, successor: KubernetesDriver
) -> None:
    waiting = up(driver, cell())
    adopted(successor)
    assert successor.claim(waiting)
    driver.stop(waiting, deadline_s=1.0)
    driver.remove(waiting)
    assert listens(waiting.socket_path)
    assert waiting.directory.exists()
