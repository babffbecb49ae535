"""The llm stem cell is forked from, restarted when it dies, given up for memory, and found again after a crash."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from invoker.drivers import process_ids
from invoker.drivers.exit_watch import ExitWatch
from invoker.drivers.ownership import find_by_socket
from invoker.drivers.process import zygote
from invoker.drivers.process.zygote import Zygote
from invoker.drivers.socket_wait import wait_listens, wait_socket
from relay.clients.channel import Channel
from tests.invoker import bare_zygote, fake_zygote
from tests.invoker.platform import WAIT_S, until
from thaw.errors import PlatformError
from thaw.logs import Log


@pytest.fixture
def exits() -> Iterator[ExitWatch]:
    made = ExitWatch()
    yield made
    made.close()


@pytest.fixture
def made(run_dir: Path, exits: ExitWatch, monkeypatch: pytest.MonkeyPatch) -> Zygote:
    """A zygote that nobody wants yet."""
    monkeypatch.setattr(zygote, "PROGRAM", [fake_zygote.__file__])
    return _make(run_dir, exits)


@pytest.fixture
def cell(run_dir: Path, made: Zygote) -> Iterator[Zygote]:
    made.want()
    until(lambda: made.ready)
    yield made
    made.give_up()
    assert not (run_dir / "zygote.pid").exists()


def _make(run_dir: Path, exits: ExitWatch) -> Zygote:
    return Zygote(run_dir, dict(os.environ), exits, Log("test"))


def _env(run_dir: Path) -> dict[str, str]:
    return {"THAW_SOCKET": str(run_dir / "s"), "THAW_DOOR": str(run_dir / "d")}


def _fork(cell: Zygote, run_dir: Path) -> int:
    return cell.fork("one", _env(run_dir), run_dir / "out", run_dir / "err")


def _pid(run_dir: Path) -> int:
    return int((run_dir / "zygote.pid").read_text().split()[0])


def test_a_fork_is_a_container_and_its_end_has_a_status(cell: Zygote, run_dir: Path) -> None:
    pid = _fork(cell, run_dir)
    assert os.getsid(pid) == pid
    os.kill(pid, signal.SIGKILL)
    assert cell.status_of(pid, 10.0) == -9


def test_one_that_dies_is_started_again_and_says_when_it_is_ready(cell: Zygote, run_dir: Path) -> None:
    first, ready = _pid(run_dir), threading.Event()
    cell.want(ready.set)
    os.kill(first, signal.SIGKILL)
    assert ready.wait(WAIT_S)
    assert cell.ready
    assert _pid(run_dir) != first


def test_who_waits_for_one_that_warms_up_goes_on_when_it_is_ready(made: Zygote) -> None:
    made.wait_warm(30.0)  # no stem cell is being made, so this does not wait
    assert not made.ready
    made.want()
    until(lambda: made.ready or made._warming)
    made.wait_warm(30.0)
    assert made.ready
    made.give_up()


def test_one_that_imports_says_in_how_long_it_is_ready_by_what_the_last_one_took(
    made: Zygote, monkeypatch: pytest.MonkeyPatch
) -> None:
    cell, imports = made, threading.Event()
    start = cell._start

    def start_when_told() -> None:
        assert imports.wait(WAIT_S)
        start()

    monkeypatch.setattr(cell, "_start", start_when_told)
    assert cell.ready_in_s is None  # no stem cell is wanted
    said, took_s = list[float | None](), list[float]()
    for _ in range(2):
        imports.clear()
        cell.want()
        until(lambda: cell.ready_in_s is not None)
        said.append(cell.ready_in_s)
        imports.set()
        until(lambda: cell.ready)
        assert cell.ready_in_s is None
        took_s.append(cell._import_s)
        cell.give_up()
    first, second = said
    assert zygote._OVERDUE_S <= first <= zygote._FIRST_IMPORT_S
    assert zygote._OVERDUE_S <= second <= max(zygote._OVERDUE_S, took_s[0])


def test_one_that_takes_longer_than_the_last_is_never_said_to_be_ready_already(made: Zygote) -> None:
    made._warming, made._import_s = True, 0.001  # it has been warming since this machine was booted
    assert made.ready_in_s == zygote._OVERDUE_S


def test_without_one_a_fork_is_refused(made: Zygote, run_dir: Path) -> None:
    with pytest.raises(PlatformError, match="not ready"):
        _fork(made, run_dir)


def test_one_that_does_not_answer_is_replaced_before_it_forks_what_nobody_waits_for(
    cell: Zygote, run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, ready = _pid(run_dir), threading.Event()
    cell.want(ready.set)
    ticks = process_ids.start_ticks(first) or 0
    os.kill(first, signal.SIGSTOP)
    with monkeypatch.context() as short, pytest.raises(PlatformError, match="no answer"):
        short.setattr(zygote, "_FORK_S", 0.1)
        _fork(cell, run_dir)
    assert process_ids.wait_gone(first, ticks, WAIT_S)
    assert ready.wait(WAIT_S)
    pid = _fork(cell, run_dir)
    os.kill(pid, signal.SIGKILL)
    assert cell.status_of(pid, 10.0) == -9


def test_one_that_was_given_up_can_be_wanted_again(cell: Zygote, run_dir: Path) -> None:
    first = _pid(run_dir)
    cell.give_up()
    assert not cell.ready
    assert process_ids.start_ticks(first) is None
    cell.want()
    until(lambda: cell.ready)
    assert _pid(run_dir) != first


def test_the_next_invoker_connects_to_it(cell: Zygote, run_dir: Path, exits: ExitWatch) -> None:
    first = _pid(run_dir)
    cell.leave()
    second = _make(run_dir, exits)
    second.want()
    until(lambda: second.ready)
    assert _pid(run_dir) == first
    second.give_up()


def test_the_next_invoker_may_not_want_it(cell: Zygote, run_dir: Path, exits: ExitWatch) -> None:
    first = _pid(run_dir)
    cell.leave()
    _make(run_dir, exits).give_up()
    assert process_ids.start_ticks(first) is None


def test_hosts_of_one_machine_fork_theirs_from_one_process(run_dir: Path, exits: ExitWatch) -> None:
    common, made = str(run_dir / "common.s"), []
    parent = subprocess.Popen([sys.executable, "-P", bare_zygote.__file__, common])
    for name in ("a", "b"):
        (run_dir / name).mkdir()
        made.append(Zygote(run_dir / name, {"TMPDIR": str(run_dir / name)}, exits, Log("test"), common))
    try:
        for cell in made:
            cell.want()
        until(lambda: all(cell.ready for cell in made))
        pids = [_pid(run_dir / name) for name in ("a", "b")]
        assert [_parent(pid) for pid in pids] == [parent.pid] * 2
        assert [os.getsid(pid) for pid in pids] == pids
        parent.kill()
        parent.wait(10)
        assert all(cell.ready for cell in made), "theirs go on without it"
        assert [process_ids.start_ticks(pid) is not None for pid in pids] == [True, True]
    finally:
        parent.kill()
        for cell in made:
            cell.give_up()
        parent.wait(10)


Bare = tuple["subprocess.Popen[bytes]", str]


@pytest.fixture
def bare(run_dir: Path) -> Iterator[Bare]:
    """Yield a process that runs a zygote's own loop, and its socket."""
    path = str(run_dir / "bare.s")
    process, never = subprocess.Popen([sys.executable, "-P", bare_zygote.__file__, path]), os.eventfd(0)
    wait_socket(path, process.pid, WAIT_S, never).close()
    os.close(never)
    yield process, path
    process.kill()
    process.wait(WAIT_S)


def _connect(path: str) -> tuple[Channel, dict[str, Any]]:
    channel = Channel.connect(path, timeout_s=WAIT_S)
    return channel, channel.receive()[0]


def _order_fork(channel: Channel, run_dir: Path) -> None:
    files = {"stdout": str(run_dir / "o"), "stderr": str(run_dir / "e")}
    channel.send({"op": "fork", "instance_id": "one", "env": _env(run_dir), **files})


def _stopped(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED)


def test_a_fork_that_nobody_hears_of_is_ended_and_the_zygote_goes_on(bare: Bare, run_dir: Path) -> None:
    process, path = bare
    killed, _ = _connect(path)
    other, _ = _connect(path)
    _stopped(process)
    _order_fork(killed, run_dir)
    killed.close()
    process.send_signal(signal.SIGCONT)
    event = other.receive()[0]
    assert (event["op"], event["instance_id"], event["status"]) == ("exited", "one", -signal.SIGKILL)
    other.close()


def test_a_client_that_has_gone_before_it_was_greeted_does_not_end_the_zygote(bare: Bare) -> None:
    process, path = bare
    _stopped(process)
    Channel.connect(path).close()
    process.send_signal(signal.SIGCONT)
    channel, ready = _connect(path)
    assert ready["pid"] == process.pid
    channel.close()


def test_a_fork_whose_pid_was_not_written_down_is_found_by_its_socket(bare: Bare, run_dir: Path) -> None:
    channel, _ = _connect(bare[1])
    _order_fork(channel, run_dir)
    pid, path = channel.receive()[0]["pid"], _env(run_dir)["THAW_SOCKET"]
    never = os.eventfd(0)
    try:
        wait_socket(path, pid, WAIT_S, never).close()
        assert find_by_socket(path) == (pid, process_ids.start_ticks(pid))
    finally:
        os.close(never)
        os.killpg(pid, signal.SIGKILL)
        assert channel.receive()[0]["status"] == -signal.SIGKILL
        channel.close()


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def _watches() -> int:
    links = []
    for entry in Path("/proc/self/fd").iterdir():
        try:
            links.append(os.readlink(entry))
        except FileNotFoundError:  # the descriptor of the listing itself
            continue
    return links.count("anon_inode:inotify")


def test_a_wait_for_a_socket_in_a_directory_that_is_not_there_costs_no_descriptor(run_dir: Path) -> None:
    before = _watches()
    for _ in range(3):
        with pytest.raises(PlatformError, match="cannot watch .*: No such file or directory"):
            wait_listens(str(run_dir / "none" / "f"))
    assert _watches() == before
