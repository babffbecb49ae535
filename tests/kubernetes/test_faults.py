"""Faults of a cluster: running instances go on, starts wait or give a reason, and each end is reported once.

A request that the cluster refuses for a while is repeated: nothing is lost, and the tenant gets no error.
"""

from __future__ import annotations

import os
import re
import socket
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from invoker.drivers import ownership
from invoker.drivers.base import DriverContext, Exit
from invoker.drivers.kubernetes import driver as kubernetes_driver
from invoker.drivers.kubernetes import later, running
from invoker.drivers.kubernetes.driver import KubernetesDriver
from invoker.drivers.kubernetes.seen import Seen
from invoker.drivers.registry import make_driver
from invoker.drivers.socket_wait import listens
from invoker.settings import InvokerSettings
from tests.container_ends import Ends
from tests.kubernetes.api_server import WRITES, Refusal, Request, mark_deleted
from tests.kubernetes.cluster import LISTENS, WAIT_S, FakeCluster, Node, cell, meanwhile, runs, spec, up
from thaw.errors import PlatformError, Unavailable, WorkerLost
from thaw.logs import Log
from thaw.settings import SettingError

pytestmark = pytest.mark.usefixtures("simple")


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the cluster refused is repeated soon."""
    monkeypatch.setattr(later, "_FIRST_PAUSE_S", 0.05)


PUSH_IT = "push the image to where the cluster's nodes pull from"


# starts that the cluster refuses -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "reason", "message", "hint"),
    [
        (400, "BadRequest", 'admission webhook "a.io" denied the request: no image of acme', "runs the cluster"),
        (403, "Forbidden", 'pods "thaw-one" is forbidden: exceeded quota: small, used: pods=5', "ResourceQuota"),
        (403, "Forbidden", 'User "x" cannot create resource "pods" in API group ""', "permission"),
        (422, "Invalid", 'Pod "thaw-one" is invalid: spec: something', "runs the cluster"),
    ],
)
def test_a_refusal_has_the_clusters_own_words(node: Node, code: int, reason: str, message: str, hint: str) -> None:
    node.api.refuse_next(Refusal(code, reason, message), *WRITES)
    assert hint in node.refused(re.escape(message)).hint


@pytest.mark.parametrize(
    ("reason", "said", "hint"),
    [
        ("ErrImagePull", "pull the image thaw/python:test: not found", PUSH_IT),
        ("CreateContainerError", "start the container: not found", "kubectl describe pod thaw-one"),
    ],
)
def test_what_keeps_a_container_from_being_made_is_said_at_once(node: Node, reason: str, said: str, hint: str) -> None:
    node.kubelet.trouble = {"reason": reason, "message": "not found"}
    assert node.refused(f"the node cannot {said}").hint == hint
    assert node.api.left() == set()


def test_what_never_ran_is_removed_without_a_wait_for_its_node(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kubernetes_driver, "_KILLED_S", 10 * WAIT_S)
    node.kubelet.trouble = {"reason": "ErrImageNeverPull", "message": ""}
    handle = node.driver.create(spec())
    with pytest.raises(PlatformError, match="the image thaw/python:test is not on this node"):
        node.driver.start(handle, spec())
    meanwhile(node.driver.remove, handle).result(WAIT_S)
    assert node.api.left() == set()


def test_a_start_ends_with_its_fetchd(node: Node, run_dir: Path) -> None:
    path, listener = run_dir / "door", socket.socket(socket.AF_UNIX)
    listener.bind(str(path))

    def end(name: str) -> None:
        path.unlink()
        listener.close()

    node.kubelet.before_running = end
    starting = meanwhile(node.up, replace(spec(), descriptor_socket=str(path)))
    failed = starting.exception(WAIT_S / 2)  # half of the time limit of a start here
    assert str(failed) == "fetchd ended while the container was being made"


def test_a_pod_for_which_there_is_no_room_says_so_at_the_deadline(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "_PLACED_S", 2.0)
    node.kubelet.unplaced = "0/1 nodes are available: 1 Insufficient memory."
    node.refused("no room on node-1: 0/1 nodes are available: 1 Insufficient memory", Unavailable)
    assert node.api.left() == set()


def test_a_pod_that_is_evicted_before_it_runs_is_tried_elsewhere(node: Node) -> None:
    def evicted(name: str) -> None:
        node.api.change(name, lambda p: p["status"].update(phase="Failed", reason="OutOfmemory", message="too much"))
        let_go.wait(WAIT_S)

    let_go = threading.Event()
    node.kubelet.before_running = evicted
    try:
        with pytest.raises(Unavailable, match="did not start the container: OutOfmemory: too much"):
            node.driver.start(node.driver.create(spec()), spec())
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


def test_a_start_for_which_no_inotify_is_left_fails_at_once(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    tries = 0

    def none_left(*_: object) -> socket.socket:
        nonlocal tries
        tries += 1
        raise PlatformError("cannot watch the directory: Too many open files")

    monkeypatch.setattr(running, "wait_socket_until", none_left)
    node.kubelet.before_running = lambda name: node.api.wait_request(lambda r: r.method == "DELETE")
    node.refused("Too many open files")
    assert tries < 5


def test_a_start_that_is_given_up_ends_its_wait(node: Node) -> None:
    node.kubelet.unplaced = "no room"
    handle = node.driver.create(spec())
    starting = meanwhile(node.driver.start, handle, spec())
    node.api.wait_pod(lambda pod: pod["status"].get("conditions"))
    node.driver.stop(handle, deadline_s=1.0)
    assert isinstance(starting.exception(WAIT_S), WorkerLost)
    node.driver.remove(handle)
    assert node.api.left() == set()


def test_a_namespace_that_is_missing_is_the_platforms_error(node: Node) -> None:
    node.api.refuse_next(Refusal(404, "NotFound", 'namespaces "functions" not found'), "POST", times=1)
    failed = node.refused('namespaces "functions" not found')
    assert failed.http_status == 500
    assert "THAW_POD_NAMESPACE" in failed.hint


# ends ----------------------------------------------------------------------------------------------------------------


def out_of_memory(node: Node) -> None:
    node.kubelet.kill("thaw-one", reason="OOMKilled")


def evicted(node: Node) -> None:
    node.kubelet.evict("thaw-one", "The node was low on resource: memory.")


def deleted_by_force(node: Node) -> None:
    node.api.vanish("thaw-one")


def deleted_and_ends_by_itself(node: Node) -> None:
    node.api.change("thaw-one", mark_deleted)


@pytest.mark.parametrize(
    ("end", "expected"),
    [
        (out_of_memory, Exit("one", -9, "out of memory: its limit is 256 MiB", True)),
        (evicted, Exit("one", None, "Evicted: The node was low on resource: memory.")),
        (deleted_by_force, Exit("one", None, "its pod was deleted")),
        (deleted_and_ends_by_itself, Exit("one", -15, "its pod was deleted")),
    ],
)
def test_an_end_is_reported_once_with_its_reason(node: Node, end: Callable[[Node], None], expected: Exit) -> None:
    handle = node.up()
    end(node)
    assert node.ends.wait("one") == expected
    node.driver.stop(handle, deadline_s=1.0)
    node.driver.remove(handle)
    assert len(node.ends.seen) == 1


def test_an_end_before_the_start_has_returned_is_reported(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    runs(monkeypatch, "raise SystemExit(3)")
    node.driver.start(node.driver.create(spec()), spec())
    assert node.ends.wait("one").status == 3


def test_the_end_of_a_pod_that_ends_while_it_is_adopted_is_reported(node: Node, run_dir: Path) -> None:
    node.up()
    again = node.cluster.driver(run_dir)
    ends = Ends(again)
    (owned,) = again.list_owned()
    node.api.vanish("thaw-one")
    again.adopt(owned)
    assert ends.wait("one") == Exit("one", None, "its pod was deleted")
    again.close()


# deletions that the cluster refuses ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("code", "reason"), [(500, "InternalError"), (409, "Conflict")])
def test_a_pod_whose_deletion_is_refused_is_deleted_later(node: Node, code: int, reason: str) -> None:
    handle = node.up()
    refusals = node.api.refuse_next(Refusal(code, reason, "webhook timed out"), "DELETE", times=3)
    with pytest.raises(Unavailable):
        node.driver.stop(handle, deadline_s=1.0)
    node.driver.remove(handle)
    assert not handle.directory.exists()
    node.api.wait_pod(lambda pod: "deletionTimestamp" in pod["metadata"])
    assert len(refusals) == 3


def test_pods_that_do_not_end_keep_no_invoker_from_starting(
    node: Node, run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("one", "two", "three"):
        node.up(spec(name))
    monkeypatch.setattr(kubernetes_driver, "_KILLED_S", 0.3)
    node.api.on_change = lambda event: None  # the node hears of nothing
    again = node.cluster.driver(run_dir)
    node.api.refuse_next(Refusal(500, "InternalError", "etcd has no leader"), "DELETE", times=1)
    again.end(again.list_owned())
    node.api.wait_until(lambda: node.api.left() == set())
    again.close()


def test_a_stop_ends_at_its_deadline_when_the_cluster_does_not_answer(node: Node) -> None:
    handle, answers = node.up(), threading.Event()
    node.api.refuse = lambda request: request.method == "DELETE" and answers.wait(2 * WAIT_S)
    stopping = meanwhile(lambda: node.driver.stop(handle, deadline_s=0.1))
    assert isinstance(stopping.exception(WAIT_S), Unavailable)
    answers.set()


# the API server away, watches cut ------------------------------------------------------------------------------------


def test_while_the_api_server_is_away_what_runs_goes_on_and_a_start_waits(node: Node) -> None:
    running_one = node.up(spec("running"))
    node.api.go_away()
    assert listens(running_one.socket_path)
    late = meanwhile(node.up, spec("late"))
    node.kubelet.kill("thaw-running")  # its end is heard of later
    node.api.come_back()
    assert late.result(WAIT_S).container_id == "late"
    assert node.ends.wait("running").killed


def test_a_start_gives_up_at_its_deadline_when_the_api_server_stays_away(cluster: FakeCluster, run_dir: Path) -> None:
    driver = cluster.driver(run_dir, start_s=0.3)
    cluster.api.wait_watched()
    cluster.api.go_away()
    Node(cluster, driver).refused("cannot create the pod: the API server is away", Unavailable)
    driver.close()
    cluster.api.come_back()


def test_a_pod_that_could_not_be_removed_is_deleted_when_the_api_server_is_back(node: Node) -> None:
    handle = node.up()
    node.api.go_away()
    node.driver.remove(handle)
    assert not handle.directory.exists()
    node.api.come_back()
    node.api.wait_request(lambda r: r.method == "DELETE")


def test_a_watch_that_is_cut_goes_on_where_it_was(node: Node) -> None:
    node.up()
    n_lists = len(lists(node))
    node.api.cut_watches()
    node.kubelet.kill("thaw-one")
    assert node.ends.wait("one").killed
    assert len(lists(node)) == n_lists  # nothing was read a second time


def test_events_that_the_cluster_has_forgotten_are_read_from_a_list(node: Node) -> None:
    for name in ("one", "two", "three"):
        node.up(spec(name))
    node.api.refuse_next(Refusal(503, "ServiceUnavailable", "not now"), "GET")
    node.api.cut_watches()
    node.kubelet.kill("thaw-one")
    node.api.vanish("thaw-two")
    node.api.wait_pod(lambda pod: pod["status"]["phase"] == "Failed")
    node.api.forget()
    node.api.refuse = lambda request: None
    assert node.ends.wait("one").killed
    assert node.ends.wait("two") == Exit("two", None, "its pod was deleted")
    assert {e.container_id for e in node.ends.seen} == {"one", "two"}


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
    up(driver)
    created.set()
    cluster.api.wait_watched()
    cluster.kubelet.kill("thaw-one")
    assert ends.wait("one").killed
    driver.close()


def test_a_list_that_could_not_be_followed_up_is_read_again(node: Node) -> None:
    """The server has forgotten the watch's version, and refuses the request for a pod that the list lacks."""
    node.up()
    vanished, refusals = threading.Event(), threading.Event()

    def refuse(request: Request) -> None:
        if request.path.endswith("thaw-one") and not refusals.is_set():
            refusals.set()
            raise Refusal(500, "InternalError", "etcd leader changed")
        if request.is_watch:
            vanished.wait(WAIT_S)

    node.api.refuse = refuse
    node.api.cut_watches()
    node.api.vanish("thaw-one")
    node.api.forget()
    vanished.set()
    assert node.ends.wait("one") == Exit("one", None, "its pod was deleted")
    assert refusals.is_set()


def test_a_version_that_the_cluster_refuses_is_given_up(node: Node) -> None:
    """An example is a version that is larger than any of a restored cluster: it would be refused for ever."""
    node.up()
    listed = threading.Event()

    def refuse(request: Request) -> None:
        if request.is_watch and not listed.is_set():
            raise Refusal(504, "Timeout", "Too large resource version: 900, current: 101")
        if request.path.endswith("/pods") and not request.is_watch:
            listed.set()

    node.api.refuse = refuse
    node.api.cut_watches()
    assert listed.wait(WAIT_S)
    node.kubelet.kill("thaw-one")
    assert node.ends.wait("one").killed


def test_a_stream_that_is_cut_does_not_mean_an_absent_cluster(node: Node, capsys: pytest.CaptureFixture[str]) -> None:
    may_go_on = threading.Event()
    node.api.refuse = lambda request: may_go_on.wait(WAIT_S)
    node.api.cut_watches()
    may_go_on.set()
    node.api.wait_watched(2)
    assert node.driver.reachable()
    assert "cluster_away" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("code", "reason", "message"),
    [
        (429, "TooManyRequests", "too many requests, please try again later"),
        (409, "Conflict", 'Operation cannot be fulfilled on resourcequotas "q": the object has been modified'),
    ],
    ids=["overloaded", "others write the quota at the same time"],
)
def test_a_cluster_that_is_busy_is_asked_again(node: Node, code: int, reason: str, message: str) -> None:
    refusals = node.api.refuse_next(Refusal(code, reason, message), "POST", times=2)
    node.up()
    assert len(refusals) == 2


def test_a_pod_whose_creation_was_not_answered_is_found(node: Node) -> None:
    node.up()
    first = node.api.pods()["thaw-one"]["metadata"]["uid"]
    body = next(r.body for r in node.api.requests if r.method == "POST")
    assert node.driver._pods.make(body).uid == first


def test_a_pod_of_another_host_with_the_same_name_is_left_alone(node: Node, tmp_path: Path) -> None:
    node.up()
    other = node.cluster.driver(tmp_path / "o", host_id="another")
    with pytest.raises(PlatformError, match="there is a pod thaw-one that is not this host's"):
        up(other)
    assert other.list_owned() == ()
    other.close()


def test_the_process_of_a_container_that_starts_slowly_is_known_when_it_answers(
    node: Node, run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process belongs to another user, so an invoker may not read its environment."""
    monkeypatch.setattr(ownership, "_started_for", lambda path: pytest.fail("read the environment of all processes"))
    runs(monkeypatch, "import time; time.sleep(0.3)\n" + LISTENS)
    node.driver.create(spec("begun"))
    node.driver.list_owned()
    handle = node.up()
    assert handle.pid == node.kubelet.pid("thaw-one")
    assert node.driver.stats(handle).rss_bytes > 1 << 20
    node.driver.relabel(handle, {"role": "instance"})
    assert f'"pid":{handle.pid}' in (handle.directory / "owner.json").read_text().replace(" ", "")


# requests and logs ---------------------------------------------------------------------------------------------------


def test_a_start_costs_one_write_and_a_claimed_one_two(node: Node) -> None:
    node.up(spec("made"))
    waiting = node.up(cell())
    before = len(node.api.writes)
    assert before == 2
    assert node.driver.claim(waiting)
    node.driver.relabel(waiting, {"role": "instance", "record": "r" * 500})
    node.driver.limit(waiting, 0.5, 128 << 20)
    assert [(r.method, r.path.rpartition("/")[2]) for r in node.api.writes[before:]] == [
        ("PATCH", "thaw-cell"),
        ("PATCH", "resize"),
    ]
    limits = node.api.pods()["thaw-cell"]["spec"]["containers"][0]["resources"]["limits"]
    assert limits == {"cpu": "1000m", "memory": str(128 << 20), "ephemeral-storage": "1Gi"}


def test_nothing_is_asked_while_nothing_happens(node: Node) -> None:
    node.up()
    before = len(node.api.requests)
    for _ in range(20):
        node.api.change("thaw-one", lambda pod: pod["metadata"].setdefault("annotations", {}).update(other="x"))
    assert len(node.api.requests) == before


def test_a_container_that_puts_a_link_in_its_sockets_place_is_refused(driver: KubernetesDriver) -> None:
    handle = up(driver)
    elsewhere = handle.directory / "io" / "other"
    os.rename(handle.socket_path, elsewhere)
    os.symlink(elsewhere, handle.socket_path)
    with pytest.raises(WorkerLost, match="something else in its socket's place"):
        driver.connect(handle, deadline_s=WAIT_S)


def lists(cluster: FakeCluster | Node) -> list[Request]:
    return [r for r in cluster.api.requests if r.method == "GET" and r.path.endswith("/pods")]
