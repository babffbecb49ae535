"""Starting, restarting and ending processes, with small programs instead of the components."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.full_disk import full_disk
from thaw.dev.components import Component, base_env
from thaw.dev.layout import Layout
from thaw.dev.processes import ProcessId, belonging_to, identify, is_alive, send, wait_gone
from thaw.dev.restarts import Recorded, RestartLog, read_pid_file, write_pid_file
from thaw.dev.supervisor import Supervisor
from thaw.dev.watch import LineReader, wait_for_line
from thaw.errors import PlatformError

READY = 'print("ready", flush=True);'
IDLE = f"import signal; {READY} signal.pause()"
STUBBORN = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); {READY}\nwhile True: signal.pause()"


@pytest.fixture
def layout(tmp_path: Path) -> Iterator[Layout]:
    made = Layout(tmp_path / "state")
    made.make_run_dir()
    yield made
    left = belonging_to(made.homes)
    send(left, signal.SIGKILL)
    made.run_dir.rmdir()
    assert left == set()


def program(layout: Layout, name: str, code: str, tier: int = 0, grace_s: float = 5.0) -> Component:
    return Component(
        name,
        (sys.executable, "-c", code),
        base_env(layout.run_dir),
        "ready",
        tier,
        stop_grace_s=grace_s,
        start_deadline_s=10.0,
    )


class Reports:
    """Records the reports, and can call a function at a report."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, str]] = []
        self.on: dict[tuple[str, str, int], object] = {}

    def __call__(self, component: str, event: str) -> None:
        self.seen.append((component, event.partition(" ")[0]))
        action = self.on.get((component, event.partition(" ")[0], self.seen.count(self.seen[-1])))
        if callable(action):
            action()


def test_components_are_ready_when_their_log_says_so_and_end_by_tier(layout: Layout) -> None:
    reports = Reports()
    with Supervisor(layout, reports) as supervisor:
        both = [program(layout, "first", IDLE, tier=1), program(layout, "second", IDLE, tier=0)]
        supervisor.start(both)
        supervisor.wait_ready(both)
    assert sorted(reports.seen[2:4]) == [("first", "ready"), ("second", "ready")]
    assert reports.seen[4:] == [("second", "stopped"), ("first", "stopped")]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGRTMIN + 1])  # the second signal has no name
def test_a_killed_component_is_started_again_until_the_supervisor_is_asked_to_stop(layout: Layout, number: int) -> None:
    reports = Reports()

    def pid() -> int:
        return int((layout.pids / "it").read_text().split()[0])

    pids: list[int] = []

    def kill() -> None:
        pids.append(pid())
        os.kill(pids[-1], number)

    reports.on[("it", "ready", 2)] = kill
    reports.on[("it", "ready", 3)] = lambda: os.kill(os.getpid(), signal.SIGTERM)
    with Supervisor(layout, reports) as supervisor:
        it = program(layout, "it", IDLE)
        supervisor.start([it])
        supervisor.wait_ready([it])
        kill()
        supervisor.run()
    assert [event for _, event in reports.seen].count("crashed") == 2
    assert len(set(pids)) == 2


def restarts(layout: Layout) -> list[tuple[str, str, str, int, int]]:
    """The lines of the supervisor's log on restarts."""
    events = map(json.loads, layout.supervisor_log.read_text().splitlines())
    return [(e["event"], e["component"], e["cause"], e["count"], e["in_a_row"]) for e in events]


def test_every_restart_is_a_line_with_component_cause_and_count_and_one_that_goes_on_is_named(layout: Layout) -> None:
    reports, stop = Reports(), lambda: os.kill(os.getpid(), signal.SIGTERM)
    reports.on[("loop", "starting", 5)] = stop
    with Supervisor(layout, reports) as supervisor:
        loop, calm = program(layout, "loop", f"{READY} raise SystemExit(3)"), program(layout, "calm", IDLE)
        supervisor.start([calm])
        supervisor.wait_ready([calm])  # a component that ended meanwhile would be an error of the start
        supervisor.start([loop])
        os.kill(int((layout.pids / "calm").read_text().split()[0]), signal.SIGKILL)
        supervisor.run()
        found = {path.name: read_pid_file(path) for path in layout.pids.iterdir()}
    lines = restarts(layout)
    assert [line for line in lines if line[1] == "calm"] == [("restart", "calm", "signal SIGKILL", 1, 1)]
    assert [line for line in lines if line[1] == "loop"] == [
        (
            ("restart", "restart", "restarts_again_and_again", "restarts_again_and_again")[n - 1],
            "loop",
            "exit status 3",
            n,
            n,
        )
        for n in range(1, 5)
    ]
    of_loop, of_calm = found["loop"], found["calm"]
    assert of_loop is not None
    assert of_calm is not None
    assert (of_loop.n_restarts, of_loop.in_a_row, of_loop.cause) == (4, 4, "exit status 3")
    assert (of_calm.n_restarts, of_calm.cause) == (1, "signal SIGKILL")


def test_restarts_on_a_full_disk_are_written_down_when_there_is_room_and_the_pid_files_at_once(tmp_path: Path) -> None:
    with full_disk(tmp_path / "disk") as disk:
        write_pid_file(disk.path / "it", Recorded(ProcessId(1, 2)))
        log = RestartLog(disk.path / "supervisor.log")
        log.event("restart", component="it", count=1)
        disk.fill()
        for n in range(2, 200):
            log.event("restart", component="it", cause="exit status 1" * 10, count=n)
        write_pid_file(disk.path / "it", Recorded(ProcessId(3, 4), 199, 199, "exit status 1"))
        disk.free()
        assert read_pid_file(disk.path / "it") == Recorded(ProcessId(3, 4), 199, 199, "exit status 1")
        log.flush()
        written = [json.loads(line)["count"] for line in (disk.path / "supervisor.log").read_text().splitlines()]
    assert written == list(range(1, 200))


def test_a_pid_file_that_could_not_be_written_is_no_process(tmp_path: Path) -> None:
    for text in ("", "12", "x y 0 0", "\0" * 160):
        (tmp_path / "it").write_text(text)
        assert read_pid_file(tmp_path / "it") is None


def test_a_component_that_ends_while_it_starts_is_an_error_with_its_last_words(layout: Layout) -> None:
    with Supervisor(layout, Reports()) as supervisor:
        broken = program(layout, "broken", "raise SystemExit('no such setting')")
        supervisor.start([broken])
        with pytest.raises(
            PlatformError, match=r"broken ended while it started \(exit status 1\): no such setting"
        ) as e:
            supervisor.wait_ready([broken])
    assert e.value.hint == f"its log: {layout.log('broken')}"


def test_one_that_ignores_the_signal_is_killed_after_its_grace(layout: Layout) -> None:
    with Supervisor(layout, Reports()) as supervisor:
        stubborn = program(layout, "stubborn", STUBBORN, grace_s=0.2)
        supervisor.start([stubborn])
        supervisor.wait_ready([stubborn])
    assert belonging_to(layout.homes) == set()


def test_what_a_component_has_started_in_a_session_of_its_own_ends_with_it(layout: Layout) -> None:
    child = (
        "import subprocess, sys, signal\n"
        f"p = subprocess.Popen([sys.executable, '-c', {IDLE!r}], start_new_session=True)\n"
    )
    with Supervisor(layout, Reports()) as supervisor:
        parent = program(layout, "parent", child + "signal.pause()")
        supervisor.start([parent])
        supervisor.wait_ready([parent])
        assert len(belonging_to(layout.homes)) == 2
    assert belonging_to(layout.homes) == set()


def test_children_die_with_a_killed_supervisor(layout: Layout, tmp_path: Path) -> None:
    code = f"""
import sys
from pathlib import Path
from thaw.dev.components import Component, base_env
from thaw.dev.layout import Layout
from thaw.dev.supervisor import Supervisor
layout = Layout(Path({str(layout.root)!r}))
with Supervisor(layout, lambda *_: None) as s:
    c = Component("it", (sys.executable, "-c", {IDLE!r}), base_env(layout.run_dir), "ready", 0)
    s.start([c]); s.wait_ready([c]); print("up", flush=True); s.run()
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as supervisor:
        assert supervisor.stdout is not None
        assert supervisor.stdout.readline() == "up\n"
        children = belonging_to(layout.homes)
        assert len(children) == 1
        supervisor.kill()
    assert wait_gone(children, 30.0) == set()


def test_a_pid_with_another_start_time_is_another_process() -> None:
    me = identify(os.getpid())
    assert me is not None
    assert is_alive(me)
    assert not is_alive(type(me)(me.pid, me.start_ticks + 1))


def test_lines_are_given_whole_and_once(tmp_path: Path) -> None:
    path = tmp_path / "log"
    reader = LineReader(path)
    assert reader.lines() == []
    with path.open("a") as f:
        f.write("one\ntw")
        f.flush()
        assert reader.lines() == ["one"]
        f.write("o\n")
        f.flush()
        assert reader.lines() == ["two"]
    path.write_text("new\n")
    assert reader.lines() == ["new"]


def test_waiting_for_a_line_ends_when_it_is_written_and_not_before(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.touch()
    assert not wait_for_line(path, "ready", 0.05)

    def write() -> None:
        with path.open("a") as f:
            f.write("not yet\nready\n")

    timer = threading.Timer(0.05, write)
    timer.start()
    assert wait_for_line(path, "ready", 10)
    timer.join()


def test_a_run_directory_of_somebody_else_is_refused(layout: Layout, monkeypatch: pytest.MonkeyPatch) -> None:
    with tempfile.TemporaryDirectory() as foreign:
        monkeypatch.setattr(tempfile, "tempdir", foreign)
        os.symlink("/", layout.run_dir)
        with pytest.raises(PlatformError, match="belongs to somebody else"):
            layout.make_run_dir()
        monkeypatch.undo()
