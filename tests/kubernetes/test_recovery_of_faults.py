"""A request that the cluster refuses for a while is repeated: nothing is lost, and the tenant gets no error."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from invoker.drivers.base import Exit
from invoker.drivers.kubernetes import driver as kubernetes_driver
from invoker.drivers.kubernetes import later
from invoker.drivers.kubernetes.driver import KubernetesDriver
from tests.container_ends import Ends
from tests.kubernetes.api_server import Refusal, Request
from tests.kubernetes.cluster import FakeCluster
from tests.kubernetes.helpers import WAIT_S, runs, spec, up
from thaw.errors import PlatformError, Unavailable


@pytest.fixture(autouse=True)
def simple(monkeypatch: pytest.MonkeyPatch) -> None:
    runs(monkeypatch)
    monkeypatch.setattr(later, "_FIRST_PAUSE_S", 0.05)


def refuse_first(cluster: FakeCluster, method: str, times: int, refusal: Refusal) -> list[Request]:
    """Refuse the first requests of this method. Return the list of refused requests, which grows."""
    refused: list[Request] = []

    def refuse(request: Request) -> None:
        if request.method == method and len(refused) < times:
            refused.append(request)
            raise refusal

    cluster.api.refuse = refuse
    return refused


# writes --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("code", "reason"), [(500, "InternalError"), (409, "Conflict")])
def test_a_pod_whose_deletion_is_refused_is_deleted_later(
    cluster: FakeCluster, driver: KubernetesDriver, code: int, reason: str
) -> None:
    handle = up(driver, spec())
    refused = refuse_first(cluster, "DELETE", 3, Refusal(code, reason, "webhook timed out"))
    with pytest.raises(Unavailable):
        driver.stop(handle, deadline_s=1.0)
    driver.remove(handle)
    assert not handle.directory.exists()
    cluster.api.wait_pod(lambda pod: "deletionTimestamp" in pod["metadata"])
    assert len(refused) == 3


def test_a_quota_that_others_write_at_the_same_time_is_asked_again(
    cluster: FakeCluster, driver: KubernetesDriver
) -> None:
    text = 'Operation cannot be fulfilled on resourcequotas "q": the object has been modified'
    refused = refuse_first(cluster, "POST", 2, Refusal(409, "Conflict", text))
    up(driver, spec())
    assert len(refused) == 2


def test_a_namespace_that_is_missing_is_the_platforms_error(cluster: FakeCluster, driver: KubernetesDriver) -> None:
    refuse_first(cluster, "POST", 1, Refusal(404, "NotFound", 'namespaces "functions" not found'))
    handle = driver.create(spec())
    with pytest.raises(PlatformError, match='namespaces "functions" not found') as failed:
        driver.start(handle, spec())
    assert failed.value.http_status == 500
    assert "THAW_POD_NAMESPACE" in failed.value.hint
    driver.remove(handle)
    assert not handle.directory.exists()


def test_the_end_of_a_pod_that_ends_while_it_is_adopted_is_reported(
    cluster: FakeCluster, driver: KubernetesDriver, run_dir: Path
) -> None:
    up(driver, spec())
    again = cluster.driver(run_dir)
    ends = Ends(again)
    (owned,) = again.list_owned()
    cluster.api.vanish("thaw-one")
    again.adopt(owned)
    assert ends.wait("one") == Exit("one", None, "its pod was deleted")
    again.close()


def test_pods_that_do_not_end_keep_no_invoker_from_starting(
    cluster: FakeCluster, driver: KubernetesDriver, run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("one", "two", "three"):
        up(driver, spec(name))
    monkeypatch.setattr(kubernetes_driver, "_KILLED_S", 0.3)
    cluster.api.on_change = lambda event: None  # the node hears of nothing
    again = cluster.driver(run_dir)
    refuse_first(cluster, "DELETE", 1, Refusal(500, "InternalError", "etcd has no leader"))
    again.end(again.list_owned())
    for name in ("one", "two", "three"):
        cluster.api.wait_pod(lambda p, name=name: p["metadata"]["name"] == f"thaw-{name}" and is_deleted(p))
    again.close()


def test_a_stop_ends_at_its_deadline_when_the_cluster_does_not_answer(
    cluster: FakeCluster, driver: KubernetesDriver
) -> None:
    handle = up(driver, spec())
    answers = threading.Event()
    failed: list[PlatformError] = []

    def wait(request: Request) -> None:
        if request.method == "DELETE":
            answers.wait(2 * WAIT_S)

    def stop() -> None:
        try:
            driver.stop(handle, deadline_s=0.1)
        except PlatformError as e:
            failed.append(e)

    cluster.api.refuse = wait
    stopping = threading.Thread(target=stop)
    stopping.start()
    stopping.join(WAIT_S)
    answers.set()
    stopping.join()
    assert [type(e) for e in failed] == [Unavailable]


# the watch -----------------------------------------------------------------------------------------------------------


def test_a_list_that_could_not_be_followed_up_is_read_again(cluster: FakeCluster, driver: KubernetesDriver) -> None:
    """The server has forgotten the watch's version, and refuses the request for a pod that the list lacks."""
    ends = Ends(driver)
    up(driver, spec())
    vanished, refused = threading.Event(), threading.Event()

    def refuse(request: Request) -> None:
        if request.path.endswith("thaw-one") and not refused.is_set():
            refused.set()
            raise Refusal(500, "InternalError", "etcd leader changed")
        if request.is_watch:
            vanished.wait(WAIT_S)

    cluster.api.refuse = refuse
    cluster.api.cut_watches()
    cluster.api.vanish("thaw-one")
    cluster.api.forget()
    vanished.set()
    assert ends.wait("one") == Exit("one", None, "its pod was deleted")
    assert refused.is_set()


def test_a_version_that_the_cluster_refuses_is_given_up(cluster: FakeCluster, driver: KubernetesDriver) -> None:
    """An example is a version that is larger than any of a restored cluster: it would be refused for ever."""
    ends = Ends(driver)
    up(driver, spec())
    listed = threading.Event()

    def refuse(request: Request) -> None:
        if request.is_watch and not listed.is_set():
            raise Refusal(504, "Timeout", "Too large resource version: 900, current: 101")
        if request.path.endswith("/pods") and not request.is_watch:
            listed.set()

    cluster.api.refuse = refuse
    cluster.api.cut_watches()
    assert listed.wait(WAIT_S)
    cluster.kubelet.kill("thaw-one")
    assert ends.wait("one").killed


def test_a_stream_that_is_cut_does_not_mean_that_the_cluster_is_away(
    cluster: FakeCluster, driver: KubernetesDriver, capsys: pytest.CaptureFixture[str]
) -> None:
    may_go_on = threading.Event()

    def wait(request: Request) -> None:
        may_go_on.wait(WAIT_S)

    cluster.api.refuse = wait
    cluster.api.cut_watches()
    may_go_on.set()
    cluster.api.wait_watched(2)
    assert driver.reachable()
    assert "cluster_away" not in capsys.readouterr().err


def is_deleted(pod: object) -> bool:
    return isinstance(pod, dict) and "deletionTimestamp" in pod["metadata"]
