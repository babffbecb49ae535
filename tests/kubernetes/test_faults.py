"""Faults of a cluster: running instances go on, starts wait or give a reason, and each end is reported once."""

from __future__ import annotations

import os
import socket
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from invoker.drivers import ownership
from invoker.drivers.base import DriverContext, Exit
from invoker.drivers.kubernetes import driver as kubernetes_driver
from invoker.drivers.kubernetes import running
from invoker.drivers.kubernetes.driver import KubernetesDriver
from invoker.drivers.kubernetes.seen import Seen
from invoker.drivers.programs import PROGRAMS
from invoker.drivers.registry import make_driver
from invoker.drivers.socket_wait import listens
from invoker.settings import InvokerSettings
from tests.container_ends import Ends
from tests.kubernetes.api_server import Refusal, Request
from tests.kubernetes.cluster import FakeCluster
from tests.kubernetes.helpers import LISTENS, WAIT_S, by_hand, cell, runs, spec, up
from thaw.action import KIND_PYTHON
from thaw.errors import PlatformError, Unavailable, WorkerLost
from thaw.logs import Log
from thaw.settings import SettingError


@pytest.fixture(autouse=True)
def simple(monkeypatch: pytest.MonkeyPatch) -> None:
    runs(monkeypatch)


def refuse_writes(cluster: FakeCluster, code: int, reason: str, message: str) -> None:
    def refuse(request: Request) -> None:
        if request.is_write:
            raise Refusal(code, reason, message)

    cluster.api.refuse = refuse


# starts that the cluster refuses -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "reason", "message", "hint"),
    [
        (
            400,
            "BadRequest",
            'admission webhook "pods.acme.io" denied the request: no image of acme',
            "runs the cluster",
        ),
        (403, "Forbidden", 'pods "thaw-one" is forbidden: exceeded quota: small, used: pods=5', "ResourceQuota"),
        (403, "Forbidden", 'User "x" cannot create resource "pods" in API group ""', "permission"),
        (422, "Invalid", 'Pod "thaw-one" is invalid: spec: something', "runs the cluster"),
    ],
)
def test_a_refusal_reaches_the_user_in_the_clusters_own_words(
    cluster: FakeCluster, driver: KubernetesDriver, code: int, reason: str, message: str, hint: str
) -> None:
    refuse_writes(cluster, code, reason, message)
    handle = driver.create(spec())
    with pytest.raises(PlatformError) as refused:
        driver.start(handle, spec())
    assert message in refused.value.message
    assert hint in refused.value.hint
    cluster.api.refuse = lambda request: None
    driver.remove(handle)
    assert not handle.directory.exists()


def test_an_image_that_no_node_can_pull_is_named_at_once(cluster: FakeCluster, driver: KubernetesDriver) -> None:
    cluster.kubelet.trouble = {"reason": "ErrImagePull", "message": "not found"}
    handle = driver.create(spec())
    with pytest.raises(PlatformError, match="the node cannot pull the image thaw/python:test: not found"):
        driver.start(handle, spec())
    driver.remove(handle)
    assert cluster.api.left() == set()


def test_what_never_ran_is_removed_without_a_wait_for_its_node(
    cluster: FakeCluster, driver: KubernetesDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kubernetes_driver, "_KILLED_S", 10 * WAIT_S)
    cluster.kubelet.trouble = {"reason": "ErrImageNeverPull", "message": ""}
    handle = driver.create(spec())
    with pytest.raises(PlatformError, match="the image thaw/python:test is not on this node"):
        driver.start(handle, spec())
    removing = threading.Thread(target=driver.remove, args=(handle,), daemon=True)
    removing.start()
    removing.join(WAIT_S)
    assert not removing.is_alive()
    assert cluster.api.left() == set()


def test_a_start_ends_with_its_fetchd(cluster: FakeCluster, driver: KubernetesDriver, run_dir: Path) -> None:
    path, listener = run_dir / "door", socket.socket(socket.AF_UNIX)
    listener.bind(str(path))

    def end(name: str) -> None:
        path.unlink()
        listener.close()

    cluster.kubelet.before_running = end
    wanted = replace(spec(), descriptor_socket=str(path))
    failed: list[Exception] = []

    def start() -> None:
        try:
            driver.start(driver.create(wanted), wanted)
        except PlatformError as e:
            failed.append(e)

    starting = threading.Thread(target=start, daemon=True)
    starting.start()
    starting.join(WAIT_S / 2)  # half of the time limit of a start here
    assert [str(e) for e in failed] == ["fetchd ended while the container was being made"]


def test_a_pod_for_which_the_node_has_no_room_says_so_at_the_deadline(
    cluster: FakeCluster, driver: KubernetesDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running, "_PLACED_S", 2.0)
    cluster.kubelet.unplaced = "0/1 nodes are available: 1 Insufficient memory."
    handle = driver.create(spec())
    with pytest.raises(Unavailable, match="no room on node-1: 0/1 nodes are available: 1 Insufficient memory"):
        driver.start(handle, spec())
    driver.remove(handle)
    assert cluster.api.left() == set()


def test_a_pod_that_is_evicted_before_it_runs_is_tried_elsewhere(
    cluster: FakeCluster, driver: KubernetesDriver
) -> None:
    def evicted(name: str) -> None:
        cluster.api.change(name, lambda p: p["status"].update(phase="Failed", reason="OutOfmemory", message="too much"))
        raised.set()
        let_go.wait(WAIT_S)

    raised, let_go = threading.Event(), threading.Event()
    cluster.kubelet.before_running = evicted
    try:
        with pytest.raises(Unavailable, match="did not start the container: OutOfmemory: too much"):
            driver.start(driver.create(spec()), spec())
    finally:
        let_go.set()


def test_a_host_without_a_nodes_name_says_which_setting_is_missing(cluster: FakeCluster, run_dir: Path) -> None:
    settings = InvokerSettings("redis://x", "h", str(run_dir), "f", driver="kubernetes", kubeconfig=cluster.kubeconfig)
    with pytest.raises(SettingError, match="THAW_NODE_NAME is not set"):
        make_driver(DriverContext(settings, run_dir, Log("test")))


def test_a_host_that_is_no_pod_and_has_no_kubeconfig_says_so(run_dir: Path) -> None:
    settings = InvokerSettings("redis://x", "h", str(run_dir), "f", driver="kubernetes", node_name="n")
    with pytest.raises(PlatformError, match="there are no credentials of a cluster"):
        make_driver(DriverContext(settings, run_dir, Log("test")))


def test_a_container_that_cannot_be_made_is_not_blamed_on_its_image(
    cluster: FakeCluster, driver: KubernetesDriver
) -> None:
    cluster.kubelet.trouble = {"reason": "CreateContainerError", "message": "context deadline exceeded"}
    with pytest.raises(PlatformError, match="cannot start the container: context deadline exceeded") as failed:
        driver.start(driver.create(spec()), spec())
    assert failed.value.hint == "kubectl describe pod thaw-one"


def test_a_start_for_which_no_inotify_is_left_fails_at_once(
    cluster: FakeCluster, driver: KubernetesDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries = 0

    def none_left(*_: object) -> socket.socket:
        nonlocal tries
        tries += 1
        raise PlatformError("cannot watch the directory: Too many open files")

    monkeypatch.setattr(running, "wait_socket_until", none_left)
    cluster.kubelet.before_running = lambda name: cluster.api.wait_request(lambda r: r.method == "DELETE")
    handle = driver.create(spec())
    with pytest.raises(PlatformError, match="Too many open files"):
        driver.start(handle, spec())
    driver.remove(handle)
    assert tries < 5


def test_a_start_that_is_given_up_ends_its_wait(cluster: FakeCluster, driver: KubernetesDriver) -> None:
    cluster.kubelet.unplaced = "no room"
    handle = driver.create(spec())
    failed: list[Exception] = []

    def start() -> None:
        try:
            driver.start(handle, spec())
        except PlatformError as e:
            failed.append(e)

    thread = threading.Thread(target=start)
    thread.start()
    cluster.api.wait_pod(lambda pod: pod["status"].get("conditions"))
    driver.stop(handle, deadline_s=1.0)
    thread.join(WAIT_S)
    assert [type(e) for e in failed] == [WorkerLost]
    driver.remove(handle)
    assert cluster.api.left() == set()


# ends ----------------------------------------------------------------------------------------------------------------


def test_out_of_memory_is_said_with_the_limit(cluster: FakeCluster, driver: KubernetesDriver) -> None:
    ends = Ends(driver)
    up(driver, spec())
    cluster.kubelet.kill("thaw-one", reason="OOMKilled")
    assert ends.wait("one") == Exit("one", -9, "out of memory: its limit is 256 MiB", True)


def test_an_evicted_pod_says_what_the_node_was_short_of(cluster: FakeCluster, driver: KubernetesDriver) -> None:
    ends = Ends(driver)
    up(driver, spec())
    cluster.kubelet.evict("thaw-one", "The node was low on resource: memory.")
    end = ends.wait("one")
    assert end.reason == "Evicted: The node was low on resource: memory."


def test_a_pod_that_somebody_deletes_by_hand_is_reported_once(cluster: FakeCluster, driver: KubernetesDriver) -> None:
    ends = Ends(driver)
    handle = up(driver, spec())
    cluster.api.vanish("thaw-one")  # as kubectl delete --force does
    assert ends.wait("one") == Exit("one", None, "its pod was deleted")
    driver.stop(handle, deadline_s=1.0)
    driver.remove(handle)
    assert len(ends.seen) == 1


def test_a_pod_that_is_deleted_by_hand_and_ends_by_itself_is_one_that_was_deleted(
    cluster: FakeCluster, driver: KubernetesDriver
) -> None:
    ends = Ends(driver)
    up(driver, spec())
    cluster.api.change("thaw-one", by_hand)
    assert ends.wait("one").reason == "its pod was deleted"


# the API server away, watches cut ------------------------------------------------------------------------------------


def test_while_the_api_server_is_away_what_runs_goes_on_and_a_start_waits(
    cluster: FakeCluster, driver: KubernetesDriver
) -> None:
    ends = Ends(driver)
    running_one = up(driver, spec("running"))
    cluster.api.go_away()
    assert listens(running_one.socket_path)
    started: list[str] = []
    thread = threading.Thread(target=lambda: started.append(up(driver, spec("late")).container_id))
    thread.start()
    cluster.kubelet.kill("thaw-running")  # its end is heard of later
    cluster.api.come_back()
    thread.join(WAIT_S)
    assert started == ["late"]
    assert ends.wait("running").killed


def test_a_start_gives_up_at_its_deadline_when_the_api_server_stays_away(cluster: FakeCluster, run_dir: Path) -> None:
    driver = cluster.driver(run_dir, start_s=0.3)
    cluster.api.wait_watched()
    cluster.api.go_away()
    handle = driver.create(spec())
    with pytest.raises(Unavailable, match="cannot create the pod: the API server is away"):
        driver.start(handle, spec())
    driver.remove(handle)
    driver.close()
    cluster.api.come_back()


def test_a_pod_that_could_not_be_removed_is_deleted_when_the_api_server_is_back(
    cluster: FakeCluster, driver: KubernetesDriver
) -> None:
    handle = up(driver, spec())
    cluster.api.go_away()
    driver.remove(handle)
    assert not handle.directory.exists()
    cluster.api.come_back()
    cluster.api.wait_request(lambda r: r.method == "DELETE")


def test_a_watch_that_is_cut_goes_on_where_it_was(cluster: FakeCluster, driver: KubernetesDriver) -> None:
    ends = Ends(driver)
    up(driver, spec())
    n_lists = len(lists(cluster))
    cluster.api.cut_watches()
    cluster.kubelet.kill("thaw-one")
    assert ends.wait("one").killed
    assert len(lists(cluster)) == n_lists  # nothing was read a second time


def test_events_that_the_cluster_has_forgotten_are_read_from_a_list(
    cluster: FakeCluster, driver: KubernetesDriver
) -> None:
    ends = Ends(driver)
    up(driver, spec("one"))
    up(driver, spec("two"))
    up(driver, spec("three"))
    refuse_watches(cluster)
    cluster.api.cut_watches()
    cluster.kubelet.kill("thaw-one")
    cluster.api.vanish("thaw-two")
    cluster.api.wait_pod(lambda pod: pod["status"]["phase"] == "Failed")
    cluster.api.forget()
    cluster.api.refuse = lambda request: None
    assert ends.wait("one").killed
    assert ends.wait("two") == Exit("two", None, "its pod was deleted")
    assert {e.container_id for e in ends.seen} == {"one", "two"}


def test_a_pod_that_is_made_while_a_list_is_read_has_not_ended(cluster: FakeCluster, run_dir: Path) -> None:
    """The watch's list lacks the pod. Then the driver asks for the pod by name before it is made, and gets the answer
    after that."""
    may_list, asked, created = threading.Event(), threading.Event(), threading.Event()

    def later(request: Request) -> None:
        if len(lists(cluster)) > 1:  # the driver's own list is the first one
            may_list.wait(WAIT_S)

    def get_of_a_pod_that_is_made_meanwhile(name: str) -> Seen:
        try:
            return get(name)
        finally:
            asked.set()
            created.wait(WAIT_S)

    cluster.api.refuse = later
    driver = cluster.driver(run_dir)
    get = driver._cluster.get
    driver._cluster.get = get_of_a_pod_that_is_made_meanwhile  # type: ignore[method-assign]
    ends = Ends(driver)
    handle = driver.create(spec())
    driver._get(handle).asked = True
    may_list.set()
    assert asked.wait(WAIT_S)
    up(driver, spec())
    created.set()
    cluster.api.wait_watched()
    cluster.kubelet.kill("thaw-one")
    assert ends.wait("one").killed
    driver.close()


def test_an_overloaded_api_server_is_asked_again(cluster: FakeCluster, driver: KubernetesDriver) -> None:
    n_refused = 0

    def refuse(request: Request) -> None:
        nonlocal n_refused
        if request.method == "POST" and n_refused < 2:
            n_refused += 1
            raise Refusal(429, "TooManyRequests", "too many requests, please try again later")

    cluster.api.refuse = refuse
    up(driver, spec())
    assert n_refused == 2


def test_a_pod_whose_creation_was_not_answered_is_found(cluster: FakeCluster, driver: KubernetesDriver) -> None:
    up(driver, spec())
    first = cluster.api.pods()["thaw-one"]["metadata"]["uid"]
    body = next(r.body for r in cluster.api.requests if r.method == "POST")
    assert driver._pods.make(body).uid == first


def test_a_pod_of_another_host_with_the_same_name_is_left_alone(
    cluster: FakeCluster, driver: KubernetesDriver, tmp_path: Path
) -> None:
    up(driver, spec())
    other = cluster.driver(tmp_path / "o", host_id="another")
    with pytest.raises(PlatformError, match="there is a pod thaw-one that is not this host's"):
        other.start(other.create(spec()), spec())
    assert other.list_owned() == ()
    other.close()


def test_the_process_of_a_container_that_starts_slowly_is_known_when_it_answers(
    cluster: FakeCluster, driver: KubernetesDriver, run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process belongs to another user, so an invoker may not read its environment."""
    monkeypatch.setattr(ownership, "_started_for", lambda path: pytest.fail("read the environment of all processes"))
    runs(monkeypatch, "import time; time.sleep(0.3)\n" + LISTENS)
    driver.create(spec("begun"))
    driver.list_owned()
    handle = up(driver, spec())
    assert handle.pid == cluster.kubelet.pid("thaw-one")
    assert driver.stats(handle).rss_bytes > 1 << 20
    driver.relabel(handle, {"role": "instance"})
    assert f'"pid":{handle.pid}' in (handle.directory / "owner.json").read_text().replace(" ", "")


# requests and logs ---------------------------------------------------------------------------------------------------


def test_a_start_costs_one_write_and_a_claimed_one_two(cluster: FakeCluster, driver: KubernetesDriver) -> None:
    up(driver, spec("made"))
    waiting = up(driver, cell())
    before = len(cluster.api.writes)
    assert before == 2
    assert driver.claim(waiting)
    driver.relabel(waiting, {"role": "instance", "record": "r" * 500})
    driver.limit(waiting, 0.5, 128 << 20)
    assert [(r.method, r.path.rpartition("/")[2]) for r in cluster.api.writes[before:]] == [
        ("PATCH", "thaw-cell"),
        ("PATCH", "resize"),
    ]
    limits = cluster.api.pods()["thaw-cell"]["spec"]["containers"][0]["resources"]["limits"]
    assert limits == {"cpu": "1000m", "memory": str(128 << 20), "ephemeral-storage": "1Gi"}


def test_nothing_is_asked_while_nothing_happens(cluster: FakeCluster, driver: KubernetesDriver) -> None:
    up(driver, spec())
    before = len(cluster.api.requests)
    for _ in range(20):
        cluster.api.change("thaw-one", lambda pod: pod["metadata"].setdefault("annotations", {}).update(other="x"))
    assert len(cluster.api.requests) == before


def test_a_container_that_puts_a_link_in_its_sockets_place_is_refused(
    cluster: FakeCluster, driver: KubernetesDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    handle = driver.create(spec())
    driver.start(handle, spec())
    elsewhere = handle.directory / "io" / "other"
    driver.connect(handle, deadline_s=WAIT_S)
    os.rename(handle.socket_path, elsewhere)
    os.symlink(elsewhere, handle.socket_path)
    with pytest.raises(WorkerLost, match="something else in its socket's place"):
        driver.connect(handle, deadline_s=WAIT_S)


def test_an_end_before_the_start_has_returned_is_reported(
    cluster: FakeCluster, driver: KubernetesDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(PROGRAMS, KIND_PYTHON, ("-c", "raise SystemExit(3)"))
    ends = Ends(driver)
    driver.start(driver.create(spec()), spec())
    assert ends.wait("one").status == 3


def lists(cluster: FakeCluster) -> list[Request]:
    return [r for r in cluster.api.requests if r.method == "GET" and r.path.endswith("/pods")]


def refuse_watches(cluster: FakeCluster) -> None:
    def refuse(request: Request) -> None:
        if request.method == "GET":
            raise Refusal(503, "ServiceUnavailable", "not now")

    cluster.api.refuse = refuse
