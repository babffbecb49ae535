"""Faults of an engine and of its containers: each gives a clear error, and the host stays healthy."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from invoker.drivers.activation_logs import FILE_LIMIT_BYTES, LogCollector, last_lines
from invoker.drivers.base import Exit, Spec
from invoker.drivers.confined import Limits
from invoker.drivers.docker.client import Engine
from invoker.drivers.docker.driver import DockerDriver
from invoker.drivers.docker.images import Images
from invoker.drivers.programs import PROGRAMS
from tests.container_ends import Ends
from tests.docker.engine import ROOT, DockerEngine
from tests.docker.inside import WAIT_S, ask, load, post, up
from thaw.action import KIND_PYTHON
from thaw.errors import PlatformError, Unavailable, WorkerLost
from thaw.logs import Log

MIB = 1 << 20


@pytest.fixture
def driver(docker_engine: DockerEngine, run_dir: Path) -> Iterator[DockerDriver]:
    made = docker_engine.driver(run_dir, pids=24)
    yield made
    made.end(made.list_owned())
    made.close()


@pytest.fixture
def ends(driver: DockerDriver) -> Ends:
    return Ends(driver)


# the engine ---------------------------------------------------------------------------------------------------------


def test_no_engine_is_said_with_what_to_do(run_dir: Path) -> None:
    with pytest.raises(Unavailable, match="no engine at") as caught:
        DockerDriver(Engine(f"unix://{run_dir}/none"), run_dir, "h", Images({}), Limits(1), Log("test"))
    assert caught.value.hint == "start Docker, or set DOCKER_HOST to its socket"


def test_a_socket_without_permission_is_said_with_what_to_do(run_dir: Path) -> None:
    """A process without permission is needed, because root may use any socket."""
    code = f"""
import os
from invoker.drivers.docker.client import Engine
from thaw.errors import Unavailable
os.setgid(65534); os.setuid(65534)
try:
    Engine("unix://{run_dir}/s").check()
except Unavailable as e:
    print(e.message); print(e.hint)
"""
    run_dir.chmod(0o755)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"{run_dir}/s")
        os.chmod(f"{run_dir}/s", 0o600)
        listener.listen()
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert done.stdout.splitlines() == [
        f"no permission on the engine's socket {run_dir}/s",
        "add this user to the group docker, or run the invoker as root",
    ], done.stderr


def test_an_engine_that_does_not_answer_is_given_up(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("invoker.drivers.docker.client.CALL_S", 0.2)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"{run_dir}/s")
        listener.listen()
        engine = Engine(f"unix://{run_dir}/s")
        with pytest.raises(PlatformError, match="the engine did not answer in time"):
            engine.check()
        engine.close()


def test_only_an_engine_on_this_machine_will_do() -> None:
    with pytest.raises(PlatformError, match="is not a unix socket"):
        Engine("tcp://10.0.0.1:2375")


def test_an_image_that_is_missing_fails_the_start_and_leaves_nothing(
    docker_engine: DockerEngine, run_dir: Path
) -> None:
    images = Images({KIND_PYTHON: "thaw-test/never-built:1"}, pull_s=0)
    driver = DockerDriver(Engine(docker_engine.url), run_dir, "h", images, Limits(1), Log("test"))
    with pytest.raises(PlatformError, match=r"the image thaw-test/never-built:1 is not on this host") as caught:
        driver.create(Spec("x", KIND_PYTHON))
    assert caught.value.hint == "make images, or docker pull"
    assert driver.list_owned() == ()
    assert list((run_dir / "c").iterdir()) == []
    driver.close()


def test_a_pull_that_hangs_is_given_up(docker_engine: DockerEngine, run_dir: Path) -> None:
    """The registry accepts connections and sends nothing."""
    with socket.create_server(("127.0.0.1", 0)) as registry:
        image = f"127.0.0.1:{registry.getsockname()[1]}/thaw/python:1"
        images = Images({KIND_PYTHON: image}, pull_s=0.5)
        driver = DockerDriver(Engine(docker_engine.url), run_dir, "h", images, Limits(1), Log("test"))
        with pytest.raises(PlatformError, match=r"pulling .* took longer than 0.5 s"):
            driver.create(Spec("x", KIND_PYTHON))
        driver.close()


def test_two_invokers_on_one_engine_do_not_see_each_others_containers(
    docker_engine: DockerEngine, driver: DockerDriver, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Two installations on one machine have the same host name and different run directories."""
    mine = up(driver, "same-name")
    other_dir = Path(f"/tmp/thaw-o{os.getpid()}")
    other_dir.mkdir()
    other = docker_engine.driver(other_dir)
    theirs = up(other, "same-name")
    assert [o.handle.pid for o in driver.list_owned()] == [mine.pid]
    assert [o.handle.pid for o in other.list_owned()] == [theirs.pid]
    other.end(other.list_owned())
    assert post(mine, "/init", {"code": "def main(args): return {}"})[0] == 200
    other.close()
    (other_dir / "relays").rmdir()
    (other_dir / "packages").rmdir()
    (other_dir / "c").rmdir()
    other_dir.rmdir()


# containers that misbehave ------------------------------------------------------------------------------------------


def start(driver: DockerDriver, monkeypatch: pytest.MonkeyPatch, code: str, memory_mb: int = 128) -> Spec:
    monkeypatch.setitem(PROGRAMS, KIND_PYTHON, ("-c", code))
    wanted = Spec("bad", KIND_PYTHON, memory_bytes=memory_mb * MIB)
    driver.start(driver.create(wanted), wanted)
    return wanted


def test_one_that_exits_at_once_fails_its_start_with_its_words(
    driver: DockerDriver, monkeypatch: pytest.MonkeyPatch, ends: Ends
) -> None:
    wanted = start(driver, monkeypatch, "import sys; print('no such model', file=sys.stderr); sys.exit(3)")
    handle = driver.create(wanted)
    with pytest.raises(WorkerLost, match="ended before it answered"):
        driver.connect(handle, deadline_s=WAIT_S)
    assert ends.wait("bad") == Exit("bad", 3)
    assert last_lines(handle) == "no such model"


def test_one_that_never_listens_and_ignores_sigterm_is_killed(
    driver: DockerDriver, monkeypatch: pytest.MonkeyPatch, ends: Ends
) -> None:
    wanted = start(driver, monkeypatch, "import signal; signal.signal(15, signal.SIG_IGN)\nwhile True: signal.pause()")
    handle = driver.create(wanted)
    with pytest.raises(PlatformError, match="did not answer in time"):
        driver.connect(handle, deadline_s=0.5)
    driver.stop(handle, deadline_s=0.2)
    assert ends.wait("bad").killed


def test_one_that_puts_a_link_in_its_sockets_place_is_refused(
    driver: DockerDriver, monkeypatch: pytest.MonkeyPatch, run_dir: Path
) -> None:
    """If the invoker followed the link, it would reach a socket of the host."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"{run_dir}/secret")
        listener.listen()
        wanted = start(
            driver, monkeypatch, f"import os, signal; os.symlink('{run_dir}/secret', '/run/thaw/io/s'); signal.pause()"
        )
        with pytest.raises(WorkerLost, match="something else in its socket's place"):
            driver.connect(driver.create(wanted), deadline_s=WAIT_S)


def test_one_that_prints_100_mb_costs_a_bounded_part_of_the_disk_and_its_lines_still_come(
    driver: DockerDriver, docker_engine: DockerEngine
) -> None:
    """The proxy limits the output of one run.  The next run's lines are complete."""
    handle = up(driver, "loud")
    load(
        handle,
        """
def main(args):
    for _ in range(args["lines"]):
        print("x" * 999)
    return {"done": True}
""",
    )
    collector = LogCollector(handle, driver.logs, driver.truncate_logs, 10 * MIB, driver.more_logs)
    assert ask(handle, lines=100_000) == {"done": True}
    collector.run_ended("a" * 32)
    lines = collector.lines("a" * 32)
    assert sum(map(len, lines)) < 12 * MIB
    assert "Logs were truncated" in lines[-1]
    assert ask(handle, lines=2) == {"done": True}
    collector.run_ended("b" * 32)
    assert [line.partition(": ")[2] for line in collector.lines("b" * 32)] == ["x" * 999] * 2
    assert handle.stdout.stat().st_size <= FILE_LIMIT_BYTES


def test_one_that_forks_without_end_hits_its_limit_and_the_host_goes_on(driver: DockerDriver) -> None:
    handle = up(driver, "forks")
    load(
        handle,
        """
import time
def main(args):
    children = []
    try:
        while len(children) < 1000:
            pid = os.fork()
            if pid == 0:
                time.sleep(60)
                os._exit(0)
            children.append(pid)
    except OSError as e:
        return {"stopped_by": type(e).__name__, "children": len(children)}
    return {"stopped_by": "nothing", "children": len(children)}
""",
    )
    found = ask(handle)
    assert found["stopped_by"] == "BlockingIOError"
    assert found["children"] < 24
    assert post(up(driver, "neighbour"), "/init", {"code": "def main(args): return {}"})[0] == 200


def test_one_that_eats_its_memory_is_killed_alone_and_its_end_says_why(
    driver: DockerDriver, monkeypatch: pytest.MonkeyPatch, ends: Ends
) -> None:
    neighbour = up(driver, "neighbour")
    start(driver, monkeypatch, "held = []\nwhile True: held.append(bytearray(1 << 20))", memory_mb=64)
    end = ends.wait("bad")
    assert end.killed
    assert end.reason == "out of memory: its limit is 64 MiB"
    assert post(neighbour, "/init", {"code": "def main(args): return {}"})[0] == 200


def test_a_function_that_eats_its_memory_fails_its_run(driver: DockerDriver) -> None:
    handle = up(driver, "eats", memory_bytes=64 * MIB)
    load(handle, "def main(args):\n    held = []\n    while True: held.append(bytearray(1 << 20))\n")
    status, reply = post(handle, "/run", {})
    assert (status, reply["error"]) == (502, "The action used more memory than its limit of 64 MiB (limits.memory).")
    assert reply["info"]["code"] == "MemoryTooSmall"


def test_one_that_fills_what_it_can_write_fills_its_own_memory_only(driver: DockerDriver) -> None:
    handle = up(driver, "fills", memory_bytes=64 * MIB)
    load(
        handle,
        """
def main(args):
    found = {}
    for place in ("/tmp", "/run/thaw/io", "/dev/shm", "/app", "/var/tmp"):
        found[place] = attempt(lambda: os.open(place + "/x", os.O_CREAT | os.O_WRONLY))
    return found
""",
    )
    writable = {place for place, came in ask(handle).items() if came.startswith("reached")}
    assert writable == {"/tmp", "/dev/shm"}  # both are in memory and count for the container


def test_limits_of_a_waiting_container_can_be_changed(driver: DockerDriver, docker_engine: DockerEngine) -> None:
    handle = up(driver, "cell", memory_bytes=256 * MIB)
    driver.limit(handle, 0.25, 512 * MIB)
    limits = docker_engine.client.containers.get(driver._name(handle)).attrs["HostConfig"]
    assert (limits["Memory"], limits["MemorySwap"]) == (512 * MIB, 512 * MIB)
    assert limits["CpuQuota"] == 50_000  # a quarter of two cores
    driver.limit(handle, 1.0, 128 * MIB)
    assert docker_engine.client.containers.get(driver._name(handle)).attrs["HostConfig"]["CpuQuota"] == 200_000


# a restart of the engine while containers run -----------------------------------------------------------------------


@pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning"
)  # the SDK forgets a socket that cannot connect
def test_an_engine_that_is_killed_and_restarted_loses_no_container_and_no_run(
    own_engine: DockerEngine, run_dir: Path
) -> None:
    driver = own_engine.driver(run_dir)
    ends = Ends(driver)
    lives, dies, late = up(driver, "lives"), up(driver, "dies"), up(driver, "late")
    load(
        lives,
        "import time\ndef main(args):\n    time.sleep(args['s'])\n    print('awake')\n    return {'slept': args['s']}\n",
    )
    collector = LogCollector(lives, driver.logs, driver.truncate_logs, MIB, driver.more_logs)
    answers: list[object] = []
    running = threading.Thread(target=lambda: answers.append(ask(lives, s=1.0)))
    running.start()
    own_engine.script("crash")
    with pytest.raises(Unavailable, match="the engine is away"):
        driver.create(Spec("new", KIND_PYTHON))
    os.kill(dies.pid, 9)
    driver.remove(late)  # this is impossible now and happens when the engine is back
    running.join(WAIT_S)
    assert answers == [{"slept": 1.0}]
    collector.run_ended("a" * 32)
    own_engine.script("up")
    assert ends.wait("dies").container_id == "dies"
    assert ask(lives, s=0.0) == {"slept": 0.0}
    collector.run_ended("b" * 32)
    deadline = time.monotonic() + WAIT_S
    while not (lines := collector.lines("b" * 32)):  # each call waits for the next line
        assert time.monotonic() < deadline
    assert lines[0].endswith("stdout: awake")
    assert {o.handle.container_id for o in driver.list_owned()} == {"lives", "dies"}
    driver.end(driver.list_owned())
    assert own_engine.containers() == []
    driver.close()


@pytest.mark.full
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_engine_without_live_restore_ends_them_when_it_comes_back_and_that_is_reported(
    own_engine: DockerEngine, run_dir: Path
) -> None:
    driver = own_engine.driver(run_dir)
    ends = Ends(driver)
    up(driver, "lost")
    own_engine.script("crash")
    own_engine.script("up", THAW_ENGINE_LIVE_RESTORE="false")
    try:
        ends.wait("lost")
        assert post(up(driver, "new"), "/init", {"code": "def main(args): return {}"})[0] == 200
    finally:
        driver.end(driver.list_owned())
        driver.close()
        own_engine.script("crash")
        own_engine.script("up")
    assert own_engine.containers() == []
