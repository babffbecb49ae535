"""The promises of every container driver.  One suite runs once for each implementation."""

from __future__ import annotations

import os
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from invoker.drivers import process_ids
from invoker.drivers.activation_logs import last_lines
from invoker.drivers.base import Driver, Exit, Handle, Spec
from invoker.drivers.cpu_shares import NoShares
from invoker.drivers.ownership import OwnedContainers
from invoker.drivers.process.driver import ProcessDriver
from invoker.drivers.programs import PROGRAMS
from relay.clients.http_unix import UnixConnection
from tests.container_ends import Ends
from tests.docker.engine import DockerEngine, docker_engine
from tests.kubernetes.cluster import fake_cluster
from thaw.action import KIND_PYTHON
from thaw.errors import PlatformError, WorkerLost
from thaw.logs import Log

__all__ = ["docker_engine"]

WAIT_S = 20.0
ROOT = Path(__file__).parents[2]


@pytest.fixture
def run_dir() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="thaw-", dir="/tmp") as directory:
        yield Path(directory)


@pytest.fixture(params=["process", "docker", "kubernetes"])
def make(
    request: pytest.FixtureRequest, run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[], Driver]]:
    """A function that makes a driver.  Each driver has the same owner."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), str(ROOT / "runtime-python")]))
    if request.param == "process":
        yield lambda: ProcessDriver(run_dir, NoShares(), 2, Log("test"))
    elif request.param == "kubernetes":
        with fake_cluster(tmp_path) as cluster:
            yield lambda: cluster.driver(run_dir)
    else:
        engine: DockerEngine = request.getfixturevalue("docker_engine")
        engine.build("python")
        yield lambda: engine.driver(run_dir)


@pytest.fixture
def driver(make: Callable[[], Driver]) -> Iterator[Driver]:
    made = make()
    yield made
    for owned in made.list_owned():
        made.stop(owned.handle, deadline_s=1.0)
        made.remove(owned.handle)
        assert not process_ids.is_alive(owned.handle.pid, owned.handle.start_ticks)
    made.close()


@pytest.fixture
def exits(driver: Driver) -> Ends:
    return Ends(driver)


def spec(container_id: str = "one", **labels: str) -> Spec:
    return Spec(container_id, KIND_PYTHON, {}, labels)


def up(driver: Driver, wanted: Spec) -> Handle:
    return driver.connect(driver.start(driver.create(wanted), wanted), deadline_s=WAIT_S)


def health(handle: Handle, deadline_s: float = WAIT_S) -> int:
    connection = UnixConnection(handle.socket_path, deadline_s)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status
    finally:
        connection.close()


def test_a_started_container_answers_on_its_socket(driver: Driver) -> None:
    assert health(up(driver, spec())) == 200


def test_create_and_start_are_idempotent_by_container_id(driver: Driver) -> None:
    first = up(driver, spec())
    assert driver.create(spec()) == first
    assert driver.start(first, spec()) == first


def test_stop_and_remove_end_the_whole_tree_and_stop_is_idempotent(driver: Driver, exits: Ends) -> None:
    handle = up(driver, spec())
    group = [int(p.name) for p in Path("/proc").iterdir() if p.name.isdigit() and _group(int(p.name)) == handle.pid]
    assert len(group) >= 2  # the proxy and its child
    driver.stop(handle, deadline_s=WAIT_S)
    driver.stop(handle, deadline_s=WAIT_S)
    exits.wait("one")
    driver.remove(handle)
    assert [pid for pid in group if process_ids.start_ticks(pid) is not None] == []


def test_stop_kills_what_does_not_listen(driver: Driver, exits: Ends) -> None:
    handle = up(driver, spec())
    os.kill(handle.pid, signal.SIGSTOP)
    driver.stop(handle, deadline_s=0.0)
    assert exits.wait("one").killed or exits.wait("one").status == 0


def test_a_killed_container_is_reported_once_with_its_signal(driver: Driver, exits: Ends) -> None:
    handle = up(driver, spec())
    os.kill(handle.pid, signal.SIGKILL)
    assert exits.wait("one") == Exit("one", -9)
    driver.stop(handle, deadline_s=1.0)
    assert len(exits.seen) == 1


def test_connect_ends_when_the_container_does(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PROGRAMS, KIND_PYTHON, ("-c", "raise SystemExit(5)"))
    handle = driver.start(driver.create(spec()), spec())
    with pytest.raises(WorkerLost):
        driver.connect(handle, deadline_s=WAIT_S)


def test_connect_keeps_its_deadline(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PROGRAMS, KIND_PYTHON, ("-c", "import signal; signal.pause()"))
    handle = driver.start(driver.create(spec()), spec())
    with pytest.raises(PlatformError, match="did not answer in time"):
        driver.connect(handle, deadline_s=0.2)


def test_a_stop_wakes_a_connect(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PROGRAMS, KIND_PYTHON, ("-c", "import signal; signal.pause()"))
    handle = driver.start(driver.create(spec()), spec())
    stopping = threading.Thread(target=driver.stop, args=(handle,), kwargs={"deadline_s": 1.0})
    stopping.start()
    with pytest.raises(WorkerLost):
        driver.connect(handle, deadline_s=WAIT_S)
    stopping.join(WAIT_S)


def test_pause_and_unpause_hold_the_process(driver: Driver) -> None:
    handle = up(driver, spec())
    if driver.name == "kubernetes":
        with pytest.raises(PlatformError, match="a pod cannot be paused"):
            driver.pause(handle)
        return
    driver.pause(handle)
    with pytest.raises(TimeoutError):
        health(handle, 0.3)
    driver.unpause(handle)
    assert health(handle) == 200


def test_logs_go_on_at_their_cursor(driver: Driver, monkeypatch: pytest.MonkeyPatch, exits: Ends) -> None:
    monkeypatch.setitem(PROGRAMS, KIND_PYTHON, ("-c", "print('first'); print('second')"))
    handle = driver.start(driver.create(spec()), spec())
    exits.wait("one")
    whole = driver.logs(handle, "stdout", 0)
    assert whole.data == b"first\nsecond\n"
    assert driver.logs(handle, "stdout", 6).data == b"second\n"
    assert driver.logs(handle, "stdout", whole.cursor).data == b""


def test_stats_count_memory(driver: Driver) -> None:
    assert driver.stats(up(driver, spec())).rss_bytes > 1 << 20


def test_another_driver_finds_what_is_owned_and_adopts_it(
    driver: Driver, make: Callable[[], Driver], exits: Ends
) -> None:
    handle = up(driver, spec(role="instance"))
    driver.relabel(handle, {"role": "instance", "record": "r"})
    second = make()
    adopted = Ends(second)
    (owned,) = second.list_owned()
    assert owned.handle == handle
    assert owned.labels == {"role": "instance", "record": "r"}
    assert owned.alive
    assert second.take_over(owned)
    second.adopt(owned)
    second.stop(handle, deadline_s=WAIT_S)
    assert adopted.wait("one").container_id == "one"
    second.remove(handle)
    assert second.list_owned() == ()
    second.close()


def test_a_pid_that_belongs_to_another_process_now_is_not_ours(driver: Driver) -> None:
    handle = up(driver, spec())
    stranger = Handle(handle.container_id, handle.kind, handle.directory, handle.pid, handle.start_ticks + 1)
    process_ids.signal_tree(stranger.pid, stranger.start_ticks, signal.SIGKILL)
    assert health(handle) == 200


def test_a_crash_between_start_and_its_note_is_found_all_the_same(driver: Driver, run_dir: Path) -> None:
    handle = up(driver, spec())
    OwnedContainers(run_dir).write(Handle(handle.container_id, handle.kind, handle.directory), {})
    (owned,) = driver.list_owned()
    assert owned.handle.pid == handle.pid


def test_an_owned_container_that_nobody_adopts_can_be_ended(driver: Driver, make: Callable[[], Driver]) -> None:
    handle = up(driver, spec())
    second = make()
    second.end(second.list_owned())
    assert not process_ids.is_alive(handle.pid, handle.start_ticks)
    assert second.list_owned() == ()
    second.close()


def test_what_a_container_printed_last_is_there_when_its_end_is_reported(
    driver: Driver, monkeypatch: pytest.MonkeyPatch, exits: Ends
) -> None:
    monkeypatch.setitem(PROGRAMS, KIND_PYTHON, ("-c", "raise SystemExit('the last words')"))
    handle = driver.start(driver.create(spec()), spec())
    assert exits.wait("one").status == 1
    assert last_lines(handle) == "the last words"
    assert not driver.more_logs(handle, (0, handle.stderr.stat().st_size), 0.0)


def test_remove_takes_the_files_away(driver: Driver) -> None:
    handle = up(driver, spec())
    driver.stop(handle, deadline_s=WAIT_S)
    driver.remove(handle)
    assert not handle.directory.exists()
    assert driver.list_owned() == ()


def _group(pid: int) -> int:
    try:
        return os.getpgid(pid)
    except ProcessLookupError:
        return 0
