"""Two invokers of one node, while one replaces the other: each container is one's or the other's."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
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
from tests.kubernetes.cluster import WAIT_S, FakeCluster, Node, cell, spec, up
from thaw.errors import Unavailable, WorkerLost
from thaw.kubernetes.api import Event

pytestmark = pytest.mark.usefixtures("simple")
Invoker = Callable[..., KubernetesDriver]


@pytest.fixture
def invoker(cluster: FakeCluster, run_dir: Path) -> Iterator[Invoker]:
    """Make the driver of an invoker with this name, whose pod is there."""
    made: list[KubernetesDriver] = []

    def make(name: str, uid: str = "", replaced: Callable[[], None] = lambda: None) -> KubernetesDriver:
        place = {"pod_name": f"invoker-{name}", "pod_uid": uid or cluster.api.add_invoker(f"invoker-{name}")}
        made.append(cluster.driver(run_dir, replaced=replaced, **place))
        cluster.api.wait_watched(len(made))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.fixture
def driver(invoker: Invoker) -> KubernetesDriver:
    return invoker("a")


@pytest.fixture
def successor(driver: KubernetesDriver, invoker: Invoker) -> KubernetesDriver:
    return invoker("b")


def test_a_stem_cell_is_claimed_once(driver: KubernetesDriver, successor: KubernetesDriver) -> None:
    waiting = up(driver, cell())
    successor.adopt(*successor.list_owned())
    assert driver.claim(waiting)
    assert not successor.claim(waiting)
    assert listens(waiting.socket_path)  # the loser has ended nothing
    assert driver.claim(waiting)  # the claim is repeated after a lost answer


def test_a_claim_survives_the_nodes_own_changes(node: Node) -> None:
    waiting = node.up(cell())
    n_reports = 0

    def report(request: Request) -> None:
        nonlocal n_reports
        if request.method == "PATCH" and n_reports < 3:
            n_reports += 1
            node.api.change("thaw-cell", lambda pod: pod["status"].update(podIP=f"10.0.0.{n_reports}"))

    node.api.refuse = report
    assert node.driver.claim(waiting)
    assert n_reports == 3


def test_a_cell_that_is_claimed_while_the_successor_ends_what_is_left_goes_on(
    node: Node, successor: KubernetesDriver
) -> None:
    waiting = node.up(cell())
    (owned,) = successor.list_owned()
    claims: list[bool] = []

    def claim_first(request: Request) -> None:
        if request.method == "DELETE" and not claims:
            claims.append(True)
            claims[0] = node.driver.claim(waiting)

    node.api.refuse = claim_first
    successor.end([owned])
    assert claims == [True]
    assert listens(waiting.socket_path)
    assert "thaw-cell" in node.api.pods()


def test_a_cell_that_the_successor_ended_cannot_be_claimed(node: Node, successor: KubernetesDriver) -> None:
    waiting = node.up(cell())
    (owned,) = successor.list_owned()
    assert successor.end([owned]) == [owned]
    node.ends.wait("cell")
    with pytest.raises(WorkerLost, match="is no more"):
        node.driver.claim(waiting)
    assert node.api.left() == set()


@pytest.mark.parametrize("its_pod_goes_on", [False, True])
def test_a_cell_whose_claimant_was_killed_is_ended(
    cluster: FakeCluster, invoker: Invoker, run_dir: Path, its_pod_goes_on: bool
) -> None:
    """An invoker writes its claim into the pod first.  Its container may be started again in the same pod."""
    uid = cluster.api.add_invoker("invoker-a")
    killed = cluster.driver(run_dir, pod_name="invoker-a", pod_uid=uid)
    cluster.api.wait_watched()
    waiting = up(killed, cell())
    assert killed.claim(waiting)
    killed.close()
    if not its_pod_goes_on:
        cluster.api.vanish("invoker-a")
    again = invoker("a", uid) if its_pod_goes_on else invoker("b")
    (owned,) = again.list_owned()
    assert owned.labels == {"role": "instance"}
    again.end([owned])
    assert cluster.api.left() == set()
    assert not waiting.directory.exists()


def test_what_a_living_invoker_starts_is_left_to_it_until_it_is_no_more(
    node: Node, invoker: Invoker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(later, "_FIRST_PAUSE_S", 0.05)
    monkeypatch.setattr(later, "_LONGEST_PAUSE_S", 0.05)
    waiting = node.up(cell())
    assert node.driver.claim(waiting)
    node.driver.relabel(waiting, {"role": "instance", "record": "{}"})
    node.up(spec("cold"))
    preparing = node.driver.create(spec("preparing"))
    new = invoker("b")
    left = new.list_owned()
    assert {o.handle.container_id: dict(o.labels) for o in left} == {
        "cell": {"role": "instance", "record": "{}"},
        "cold": {"role": "instance"},
    }
    assert new.end(left) == []
    assert preparing.directory.exists()
    assert listens(waiting.socket_path)
    assert node.api.left() == {"thaw-cell", "thaw-cold"}
    node.api.vanish("invoker-a")
    for name in ("thaw-cell", "thaw-cold"):
        node.api.wait_request(lambda r, name=name: r.method == "DELETE" and r.path.endswith(name))


# instances -----------------------------------------------------------------------------------------------------------


def notes(node: Node) -> dict[str, Any]:
    return dict(node.api.pods()["thaw-one"]["metadata"]["annotations"])


def test_an_instance_of_an_invoker_that_lives_is_left_to_it(node: Node, successor: KubernetesDriver) -> None:
    serving = node.up()
    before = notes(node)
    (owned,) = successor.list_owned()
    assert not successor.take_over(owned)
    assert notes(node) == before
    assert successor.end([owned]) == []
    assert listens(serving.socket_path)


def test_an_instance_is_taken_over_once_its_invoker_is_no_more(node: Node, successor: KubernetesDriver) -> None:
    serving, ends = node.up(), Ends(successor)
    (owned,) = successor.list_owned()
    node.api.vanish("invoker-a")
    assert successor.take_over(owned)
    successor.adopt(owned)
    assert successor.take_over(owned), "the answer to the first patch may be lost"
    assert notes(node)[CLAIMANT].startswith("invoker-b/")
    assert listens(serving.socket_path)
    successor.stop(serving, deadline_s=1.0)
    ends.wait("one")
    successor.remove(serving)
    assert node.api.left() == set()


def test_two_successors_do_not_both_take_an_instance_over(
    node: Node, successor: KubernetesDriver, invoker: Invoker
) -> None:
    node.up()
    (owned,) = successor.list_owned()
    other = invoker("c")
    node.api.vanish("invoker-a")
    taken: list[bool] = []

    def other_is_first(request: Request) -> None:
        if request.method == "PATCH" and not taken:
            taken.append(True)
            taken[0] = other.take_over(owned)

    node.api.refuse = other_is_first
    assert not successor.take_over(owned)
    assert taken == [True]
    assert notes(node)[CLAIMANT].startswith("invoker-c/")


@pytest.mark.parametrize("n_reports", [3, 1000])
def test_an_instance_is_taken_over_amid_reports(node: Node, successor: KubernetesDriver, n_reports: int) -> None:
    node.up()
    (owned,) = successor.list_owned()
    node.api.vanish("invoker-a")
    reports = iter(range(n_reports))

    def report(request: Request) -> None:
        if request.method == "PATCH" and (n := next(reports, None)) is not None:
            node.api.change("thaw-one", lambda pod: pod["status"].update(podIP=f"10.0.0.{n}"))

    node.api.refuse = report
    if n_reports == 3:
        assert successor.take_over(owned)
    else:  # and its invoker begins anew, which is better than two that use it
        with pytest.raises(Unavailable, match="changes too often to be taken over"):
            successor.take_over(owned)


def test_an_invoker_whose_instance_was_taken_over_hears_of_it_and_ends_nothing(
    cluster: FakeCluster, invoker: Invoker
) -> None:
    """Its pod's object was removed by force while its process goes on."""
    replaced = threading.Event()
    old = invoker("a", replaced=replaced.set)
    serving, waiting = up(old), up(old, cell())
    cluster.api.vanish("invoker-a")
    new = invoker("b")
    instance = next(o for o in new.list_owned() if o.handle.container_id == "one")
    assert new.take_over(instance)
    new.adopt(instance)
    assert replaced.wait(WAIT_S)
    old.stop(serving, deadline_s=1.0)
    old.remove(serving)
    assert listens(serving.socket_path)
    assert "thaw-one" in cluster.api.left()
    old.stop(waiting, deadline_s=1.0)  # a cell that nobody has claimed is either one's to end
    old.remove(waiting)
    new.stop(serving, deadline_s=1.0)
    new.remove(serving)
    assert cluster.api.left() == set()


def test_a_late_report_from_before_an_instance_was_taken_over_ends_no_invoker(node: Node, invoker: Invoker) -> None:
    replaced = threading.Event()
    new = invoker("b", replaced=replaced.set)
    serving = node.up()
    before = node.driver._get(serving).pod
    assert before is not None
    node.api.vanish("invoker-a")
    (owned,) = new.list_owned()
    assert new.take_over(owned)
    new.adopt(owned)
    new._take(Event("MODIFIED", before.version, before))
    container = new._get(serving)
    assert not container.is_anothers
    assert not replaced.is_set()
    new._take(Event("MODIFIED", "1000000", replace(before, version="1000000")))
    assert replaced.wait(WAIT_S)


def test_an_invoker_that_has_not_heard_yet_ends_nothing_taken_over(node: Node, successor: KubernetesDriver) -> None:
    serving = node.up()
    (owned,) = successor.list_owned()
    node.api.vanish("invoker-a")
    container = node.driver._get(serving)
    seen = container.pod
    assert successor.take_over(owned)
    with container.lock:
        container.pod = seen
    node.driver.stop(serving, deadline_s=1.0)
    node.driver.remove(serving)
    assert listens(serving.socket_path)
    assert serving.directory.exists()


def test_a_cell_that_the_successor_has_claimed_is_not_ended_by_an_invoker_that_stops(
    driver: KubernetesDriver, successor: KubernetesDriver
) -> None:
    waiting = up(driver, cell())
    successor.adopt(*successor.list_owned())
    assert successor.claim(waiting)
    driver.stop(waiting, deadline_s=1.0)
    driver.remove(waiting)
    assert listens(waiting.socket_path)
    assert waiting.directory.exists()
