"""Two invokers of one node, while one replaces the other: a stem cell is one's or the other's."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from invoker.drivers.kubernetes.driver import KubernetesDriver
from invoker.drivers.socket_wait import listens
from tests.kubernetes.api_server import Request
from tests.kubernetes.cluster import FakeCluster
from tests.kubernetes.helpers import Ends, cell, runs, up


@pytest.fixture(autouse=True)
def simple(monkeypatch: pytest.MonkeyPatch) -> None:
    runs(monkeypatch)


@pytest.fixture
def successor(cluster: FakeCluster, driver: KubernetesDriver, run_dir: Path) -> Iterator[KubernetesDriver]:
    made = cluster.driver(run_dir)
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
    assert driver.claim(waiting)  # an answer that was lost is asked for again


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
    successor.end(owned)
    assert claims == [True]
    assert listens(waiting.socket_path)
    assert "thaw-cell" in cluster.api.pods()


def test_a_cell_that_the_successor_ended_cannot_be_claimed(
    cluster: FakeCluster, driver: KubernetesDriver, successor: KubernetesDriver
) -> None:
    ends = Ends(driver)
    waiting = up(driver, cell())
    (owned,) = successor.list_owned()
    successor.end(owned)
    ends.wait("cell")
    assert not driver.claim(waiting)
    assert cluster.api.left() == set()
