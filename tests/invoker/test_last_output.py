"""A container's output on stderr is kept for an hour after its end, within bounds."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from invoker.containers import last_output, recovery
from invoker.containers.fleet import Fleet
from invoker.containers.last_output import KEPT_S, LastOutput, printed_by
from invoker.containers.memory_ledger import Ledger
from invoker.drivers.activation_logs import SENTINEL
from invoker.drivers.base import Exit, Handle, Owned
from relay.protocol.data_port_messages import EndedOutput
from tests.invoker.platform import Host, until
from tests.relay.samples import INSTANCE
from thaw import wire
from thaw.clock import wall_ms
from thaw.ids import ActionName, InstanceId
from thaw.instance import InstanceRecord, InstanceState
from thaw.logs import Log

NOISY = "import sys\nprint('loading', file=sys.stderr)\ndef main(args):\n    print('about to', file=sys.stderr)\n"
DIES = f"{NOISY}    import time\n    time.sleep(60 if args.get('die') else 0)\n    return {{}}\n"
HELLO = ActionName("guest/hello")


def record(instance_id: str, action: str = HELLO) -> InstanceRecord:
    return replace(INSTANCE, instance_id=InstanceId(instance_id), action=ActionName(action), state=InstanceState.GONE)


@pytest.fixture
def kept(tmp_path: Path) -> LastOutput:
    return LastOutput(tmp_path, Log("test"))


def keep(kept: LastOutput, tmp_path: Path, instance_id: str, text: str, action: str = HELLO) -> None:
    directory = tmp_path / f"c-{instance_id}"
    directory.mkdir(exist_ok=True)
    (directory / "stderr.log").write_text(text)
    kept.keep(record(instance_id, action), printed_by(Handle(instance_id, "llm:vllm", directory)), "it broke")


def files(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "ended").iterdir())


def test_the_end_of_the_output_is_kept_by_action_and_instance(kept: LastOutput, tmp_path: Path) -> None:
    keep(kept, tmp_path, "i1", "one\n")
    keep(kept, tmp_path, "i2", "x" * 70 + "\n" + "two\n" * 40_000)
    keep(kept, tmp_path, "i3", "other", "guest/other")
    keep(kept, tmp_path, "i4", "")
    first, second = kept.of_action(HELLO)
    assert (first.instance_id, first.stderr, first.reason) == ("i1", "one", "it broke")
    assert len(second.stderr) <= last_output.MOST_BYTES
    assert set(second.stderr.splitlines()) == {"two"}
    assert (found := kept.of_instance(InstanceId("i3"))) is not None
    assert found.action == "guest/other"
    assert kept.of_instance(InstanceId("i4")) is None, "it wrote nothing"


def test_lines_of_runs_that_have_ended_are_in_their_records_and_not_kept(kept: LastOutput, tmp_path: Path) -> None:
    keep(kept, tmp_path, "i1", f"of an earlier run\n{SENTINEL}\nof the last\n")
    assert kept.of_action(HELLO)[0].stderr == "of the last"


def test_output_of_a_container_that_is_left_to_another_invoker_is_not_that_of_an_ended_one(
    kept: LastOutput, tmp_path: Path
) -> None:
    class Leaves:
        """A driver whose first container belongs to another invoker, which lives."""

        def on_exit(self, callback: Callable[[Exit], None]) -> None:
            pass

        def end(self, owned: Sequence[Owned]) -> Sequence[Owned]:
            for one in owned:
                shutil.rmtree(one.handle.directory)
            return owned[1:]

    left = []
    for name in ("others", "ours"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "stderr.log").write_text(f"of {name}")
        labels = {"role": "instance", "record": wire.dumps(record(name)).decode()}
        left.append(Owned(Handle(name, "llm:vllm", tmp_path / name), labels, True))
    fleet = Fleet(Leaves(), None, None, Ledger(1), kept, Log("test"))  # type: ignore[arg-type]
    recovery._end(fleet, left, Log("test"))
    assert [(o.stderr, o.reason) for o in kept.of_action(HELLO)] == [("of ours", "its host's invoker was restarted")]


def test_an_invoker_that_comes_back_still_has_it(kept: LastOutput, tmp_path: Path) -> None:
    keep(kept, tmp_path, "i1", "one")
    assert [o.stderr for o in LastOutput(tmp_path, Log("test")).of_action(HELLO)] == ["one"]


def test_after_an_hour_it_is_not_shown_and_with_the_next_end_it_is_removed(kept: LastOutput, tmp_path: Path) -> None:
    keep(kept, tmp_path, "i1", "old")
    (path,) = files(tmp_path)
    ended_ms = wall_ms() - 1000 * KEPT_S - 1
    old = replace(wire.loads(EndedOutput, path.read_bytes()), ended_wall_ms=ended_ms)
    path.unlink()
    (path.parent / f"{ended_ms:015d}-i1").write_bytes(wire.dumps(old))
    assert kept.of_action(HELLO) == ()
    keep(kept, tmp_path, "i2", "new")
    assert [p.name.partition("-")[2] for p in files(tmp_path)] == ["i2"]


def test_all_together_are_bounded_and_the_oldest_go_first(
    kept: LastOutput, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(last_output, "MOST_BYTES_IN_ALL", 3000)
    times = iter(range(wall_ms(), wall_ms() + 1000))
    monkeypatch.setattr(last_output, "wall_ms", lambda: next(times))
    for k in range(9):
        keep(kept, tmp_path, f"i{k}", "x" * 900)
    assert [p.name.partition("-")[2] for p in files(tmp_path)] == ["i7", "i8"]


def test_a_disk_without_room_costs_the_output_alone(kept: LastOutput, tmp_path: Path) -> None:
    (tmp_path / "ended").write_text("a file in the place of the directory")
    keep(kept, tmp_path, "i1", "one")
    assert kept.of_action(HELLO) == ()


# ── on a host ─────────────────────────────────────────────────────────────────────────────────────────────────────


def output(host: Host) -> list[dict[str, str]]:
    return list(json.loads(host.ask("POST", "/output", json.dumps({"action": HELLO}))[1])["outputs"])


def test_a_container_that_died_long_after_its_start_has_left_its_last_words(host: Host) -> None:
    instance_id = host.serving(NOISY).instance_id
    host.run(instance_id, {})
    assert output(host) == [], "it lives"
    os.kill(host.pid(instance_id), signal.SIGKILL)
    host.gone(instance_id)
    until(lambda: host.agent.fleet.find(instance_id) is None)
    assert output(host) == [], "its only run has ended, and its record has the lines"


def test_the_run_in_which_a_container_dies_has_its_lines(host: Host) -> None:
    instance_id = host.serving(DIES).instance_id
    host.run(instance_id, {})
    stderr = host.live(instance_id).handle.stderr
    n_before = stderr.stat().st_size
    with ThreadPoolExecutor(1) as pool:
        run = pool.submit(host.run, instance_id, {"die": True}, activation_id="a" * 32)
        until(lambda: stderr.stat().st_size > n_before)
        os.kill(host.pid(instance_id), signal.SIGKILL)
        assert run.result()[1]["info"]["code"] == "WorkerLost"
    host.gone(instance_id)
    assert host.texts(instance_id, "a" * 32) == ["stderr: about to"]
    (found,) = output(host)
    assert (found["stderr"], "the container ended" in found["reason"]) == ("about to", True)


def test_an_output_is_found_by_its_name_and_a_half_written_one_is_none(
    kept: LastOutput, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for k in range(5):
        keep(kept, tmp_path, f"i{k}", f"text {k}")
    read: list[str] = []
    whole = Path.read_bytes
    monkeypatch.setattr(Path, "read_bytes", lambda path: (read.append(path.name), whole(path))[1])
    assert (found := kept.of_instance(InstanceId("i3"))) is not None
    assert (found.stderr, len(read)) == ("text 3", 1)
    (tmp_path / "ended" / f".{read[0]}x").write_bytes(b"{")
    assert len(kept.of_action(HELLO)) == 5
    keep(kept, tmp_path, "i5", "text 5")
    assert [p.name for p in files(tmp_path) if p.name.startswith(".")] == []


def test_an_output_that_goes_while_others_are_looked_through_costs_none(
    kept: LastOutput, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep(kept, tmp_path, "i1", "text")
    paths = kept._paths
    monkeypatch.setattr(kept, "_paths", lambda: [tmp_path / "ended" / "000000000000001-gone", *paths()])
    monkeypatch.setattr(kept._log, "event", lambda *_, **__: pytest.fail("an output was lost"))
    keep(kept, tmp_path, "i2", "text")
