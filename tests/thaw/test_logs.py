"""Logging never raises, whatever stderr is, and reports how much it could not write."""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.full_disk import full_disk
from thaw import logs
from thaw.logs import Log

ONE_LINE = "from thaw.logs import Log; Log('test').event('hello'); print('goes on')"


@pytest.fixture(autouse=True)
def _nothing_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "_n_lost", 0)


class Stderr(io.StringIO):
    """A stderr that can refuse a line after a part of it, as a full disk does."""

    error: OSError | None = None

    def write(self, text: str) -> int:
        if self.error is not None:
            super().write(text[:5])
            raise self.error
        return super().write(text)


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), BrokenPipeError(32, "Broken pipe")])
def test_lines_that_cannot_be_written_are_counted_and_told_with_the_next(error: OSError) -> None:
    log, stderr = Log("test"), Stderr()
    with contextlib.redirect_stderr(stderr):
        stderr.error = error
        log.event("one")
        log.event("two")
        stderr.error = None
        log.event("three")
        log.event("four")
    whole = [json.loads(line) for line in stderr.getvalue().splitlines()[-3:]]
    assert [(e["event"], e.get("n")) for e in whole] == [("log_lines_lost", 2), ("three", None), ("four", None)]
    assert {e["component"] for e in whole} == {"test"}


def test_after_a_full_disk_the_log_counts_exactly_the_lines_that_are_not_in_it(tmp_path: Path) -> None:
    n_events, log = 40, Log("test")
    with full_disk(tmp_path / "small") as disk, (disk.path / "log").open("a") as stderr:
        with contextlib.redirect_stderr(stderr):
            disk.fill()
            for _ in range(n_events):
                log.event("early", padding="x" * 300)
            disk.free()
            log.event("late")
        lines = [json.loads(line) for line in (disk.path / "log").read_text().splitlines() if line.endswith("}")]
    lost = [e["n"] for e in lines if e["event"] == "log_lines_lost"]
    n_there = sum(e["event"] == "early" for e in lines)
    assert lost == [n_events - n_there]
    assert lines[-1]["event"] == "late"


def test_values_that_json_does_not_know_are_written_as_text() -> None:
    class Broken:
        def __str__(self) -> str:
            raise RuntimeError

    circle: list[object] = []
    circle.append(circle)
    stderr = Stderr()
    with contextlib.redirect_stderr(stderr):
        Log("test").event("odd", path=Path("/a"), keys={(1, 2): 3}, circle=circle, broken=Broken())
    event = json.loads(stderr.getvalue())
    assert (event["path"], event["keys"], event["circle"]) == ("/a", "{(1, 2): 3}", "[[...]]")
    assert event["broken"] == "a Broken that cannot be written"


def test_a_process_goes_on_over_a_full_disk_a_closed_pipe_and_without_a_stderr() -> None:
    reader, broken = os.pipe()
    os.close(reader)
    with open("/dev/full", "w") as full:
        done = [
            subprocess.run([sys.executable, "-c", ONE_LINE], stderr=full, stdout=subprocess.PIPE, text=True),
            subprocess.run([sys.executable, "-c", ONE_LINE], stderr=broken, stdout=subprocess.PIPE, text=True),
            subprocess.run(
                ["sh", "-c", 'exec "$0" -c "$1" 2>&-', sys.executable, ONE_LINE], stdout=subprocess.PIPE, text=True
            ),
        ]
    os.close(broken)
    assert [one.stdout for one in done] == ["goes on\n"] * 3
