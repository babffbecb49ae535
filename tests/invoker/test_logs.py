"""The sentinel contract assigns lines of a log to activations."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from invoker.drivers.activation_logs import (
    FILE_LIMIT_BYTES,
    KEPT_ACTIVATIONS,
    KEPT_LIMITS,
    SENTINEL,
    STREAMS,
    LogCollector,
    SentinelSplitter,
    last_lines,
)
from invoker.drivers.base import Handle, LogChunk

END = f"{SENTINEL}\n".encode()


def texts(lines: list[str]) -> list[str]:
    return [line.partition("Z ")[2] for line in lines]


class Files:
    def __init__(self) -> None:
        self.data = {"stdout": b"", "stderr": b""}
        self.truncated = 0

    def read(self, handle: Handle, stream: str, cursor: int) -> LogChunk:
        data = self.data[stream][cursor:]
        return LogChunk(data, cursor + len(data))

    def truncate(self, handle: Handle, stream: str) -> None:
        self.data[stream] = b""
        self.truncated += 1


def collected(limit: int = 10_000, *more: Any) -> tuple[Files, LogCollector]:
    files = Files()
    return files, LogCollector(Handle("c", "k", Path()), files.read, files.truncate, limit, *more)


def test_the_splitter_gives_the_same_at_every_cut() -> None:
    data = b"one\n\ntwo" + END + b"three\n" + END
    for cut in range(len(data) + 1):
        splitter = SentinelSplitter(1000)
        assert splitter.feed(data[:cut]) + splitter.feed(data[cut:]) == [["one", "two"], ["three"]]


def test_lines_beyond_the_limit_are_replaced_by_one_that_says_so() -> None:
    splitter = SentinelSplitter(50)
    (lines,) = splitter.feed(b"12345\n" * 5 + END)
    assert lines == ["12345", "Logs were truncated because the total bytes size exceeds the limit of 50 bytes."]
    assert splitter.feed(b"next\n" + END) == [["next"]]


def test_a_line_without_end_is_not_kept_whole() -> None:
    splitter = SentinelSplitter(10)
    for _ in range(1000):
        splitter.feed(b"x" * 100)
    assert len(splitter._part) < 200
    assert len(splitter.feed(b"\n" + END)) == 1


def test_both_streams_go_to_the_run_that_ended() -> None:
    files, logs = collected()
    files.data = {"stdout": b"a\n" + END + b"b\n" + END, "stderr": END + b"e\n" + END}
    logs.run_ended("1")
    logs.run_ended("2")
    assert texts(logs.lines("1")) == ["stdout: a"]
    assert texts(logs.lines("2")) == ["stdout: b", "stderr: e"]
    assert logs.lines("unknown") == []


def test_lines_that_arrive_late_are_there_at_the_next_look() -> None:
    files, logs = collected()
    logs.run_ended("1")
    assert logs.lines("1") == []
    files.data["stdout"] = b"late\n" + END
    assert texts(logs.lines("1")) == ["stdout: late"]


def test_what_was_printed_before_is_skipped() -> None:
    files, logs = collected()
    files.data["stderr"] = b"old\n" + END + b"half"
    logs.skip()
    logs.run_ended("1")
    files.data["stderr"] += b"new\n" + END
    assert texts(logs.lines("1")) == ["stderr: new"]


def test_old_activations_and_large_files_are_let_go() -> None:
    files, logs = collected(10 << 20)
    for n in range(KEPT_ACTIVATIONS + 5):
        logs.run_ended(str(n))
        files.data["stdout"] += b"x" * 20_000 + b"\n" + END
        logs.lines(str(n))
    assert logs.lines("0") == []
    assert files.truncated >= 3
    assert len(logs.lines(str(KEPT_ACTIVATIONS + 4))) == 1


def test_short_lines_make_no_record_that_is_larger_than_the_limit() -> None:
    files, logs = collected(10_000)
    files.data["stdout"] = b"a\n" * 5_000 + END
    logs.run_ended("1")
    lines = logs.lines("1")
    assert "Logs were truncated" in lines[-1]
    assert sum(len(line) + 1 for line in lines[:-1]) <= 10_000


def test_what_is_kept_is_bounded_in_bytes_and_can_be_asked_for_again() -> None:
    files, logs = collected(1 << 20)
    n_runs = 20
    for n in range(n_runs):
        logs.run_ended(str(n))
        files.data["stdout"] += b"x" * 1_000_000 + b"\n" + END
    first = logs.lines("0")
    assert len(first) == 1, "the one that is asked for is there, however many came after it"
    assert logs.lines("0") == first
    assert len(logs.lines(str(n_runs - 1))) == 1
    assert sum(len(line) for n in range(n_runs) for line in logs.lines(str(n))) < 5 << 20


def test_a_run_that_ends_twice_is_counted_once() -> None:
    files, logs = collected(1 << 20)
    for _ in range(20):
        logs.run_ended("again")
        files.data["stdout"] += b"x" * 1_000_000 + b"\n" + END
        logs.lines("again")
    logs.run_ended("other")
    files.data["stdout"] += b"said\n" + END
    assert len(logs.lines("again")) == 1
    assert texts(logs.lines("other")) == ["stdout: said"]


def test_sentinels_of_a_functions_own_and_a_stream_that_it_closed_cost_no_more_with_every_run() -> None:
    files, logs = collected()
    for n in range(3):
        files.data["stdout"] = END * 10_000
        logs._cursors["stdout"] = 0
        logs.run_ended(str(n))
        logs.lines(str(n))
    assert len(logs._unclaimed["stdout"]) <= KEPT_ACTIVATIONS
    for n in range(2 * KEPT_ACTIVATIONS):
        logs.run_ended(str(n))
    assert len(logs._waiting["stderr"]) <= KEPT_ACTIVATIONS


def test_marks_that_an_images_function_prints_shift_no_later_run() -> None:
    """A caller had a shared function print its text, with the mark in it."""
    files = Files()
    logs = LogCollector(Handle("c", "k", Path()), files.read, files.truncate, 10_000, of_image=True)
    for name, text in (("first", b"x\n" + END + b"what the first one wrote\n"), ("second", b"a\n"), ("third", b"b\n")):
        logs.run_began(name)
        files.data["stdout"] += text + END
        files.data["stderr"] += END
        logs.run_ended(name)
    assert [texts(logs.lines(name)) for name in ("first", "second", "third")] == [
        ["stdout: x"],
        ["stdout: a"],
        ["stdout: b"],
    ]


def test_lines_of_an_image_that_are_on_their_way_when_the_next_run_begins_are_still_the_last_runs() -> None:
    files = Files()
    logs = LogCollector(Handle("c", "k", Path()), files.read, files.truncate, 10_000, of_image=True)
    logs.run_began("first")
    logs.run_ended("first")
    logs.run_began("second")
    files.data = {"stdout": b"late\n" + END + b"next\n" + END, "stderr": END + END}
    logs.run_ended("second")
    assert [texts(logs.lines(name)) for name in ("first", "second")] == [["stdout: late"], ["stdout: next"]]


def test_whoever_asks_for_lines_that_are_on_their_way_waits_for_more_of_that_container_until_the_deadline() -> None:
    asked: list[tuple[str, tuple[int, int]]] = []
    coming = [("stdout", b"a\n" + END), ("stderr", b"e\n"), ("stderr", END)]

    def more(handle: Handle, cursors: tuple[int, int], within_s: float) -> bool:
        asked.append((handle.container_id, cursors))
        assert 0 < within_s <= 60.0
        stream, data = coming.pop(0)
        files.data[stream] += data
        return True

    files, logs = collected(10_000, more)
    logs.run_ended("one")
    assert texts(logs.lines("one", time.monotonic() + 60.0)) == ["stdout: a", "stderr: e"]
    n = 2 + len(END)
    assert asked == [("c", (0, 0)), ("c", (n, 0)), ("c", (n, 2))]
    assert texts(logs.lines("one")) == ["stdout: a", "stderr: e"]  # no line is missing
    assert logs.lines("unknown") == []
    assert len(asked) == 3


def test_when_nothing_more_comes_there_is_what_has_come() -> None:
    files, logs = collected(10_000, lambda *_: False)
    files.data["stderr"] = b"e\n" + END
    logs.run_ended("one")
    assert texts(logs.lines("one")) == ["stderr: e"]


@pytest.mark.parametrize("ends", ["lost", "ended"])
def test_lines_of_a_run_are_waited_for_until_it_has_ended_and_no_longer(ends: str) -> None:
    _, logs = collected()
    logs.run_began("one")
    with ThreadPoolExecutor(1) as pool:
        reader = pool.submit(logs.lines, "one", time.monotonic() + 60.0)
        logs.run_lost("one") if ends == "lost" else logs.run_ended("one")
        assert reader.result(10) == []


def test_of_a_run_that_was_said_to_have_ended_twice_the_first_output_counts() -> None:
    files, logs = collected()
    logs.run_ended("one")
    logs.run_ended("one")
    files.data = {"stdout": b"a\n" + END + b"b\n" + END, "stderr": END + END}
    assert texts(logs.lines("one")) == ["stdout: a"]


def test_the_second_stream_of_a_run_whose_lines_were_let_go_is_dropped() -> None:
    files, logs = collected(100)
    most = len(STREAMS) * max(KEPT_LIMITS * 100, FILE_LIMIT_BYTES)
    logs.run_ended("one")
    files.data["stdout"] = END
    logs.lines("one")
    logs._kept_bytes += most + 1  # as if other runs had printed a lot
    logs.run_ended("two")
    files.data["stdout"] += b"b\n" + END
    logs.lines("two")
    logs._kept_bytes -= most + 1
    files.data["stderr"] = b"late\n" + END + b"e\n" + END
    assert logs.lines("one") == []
    assert texts(logs.lines("two")) == ["stdout: b", "stderr: e"]


def test_last_lines_of_a_failed_start_are_bounded(tmp_path: Path) -> None:
    handle = Handle("c", "k", tmp_path)
    assert last_lines(handle) == ""
    handle.stderr.write_text("\n".join(f"line {n}" for n in range(1000)) + f"\n{SENTINEL}\n")
    assert last_lines(handle, 2) == "line 998\nline 999"


def test_of_a_last_line_that_is_too_long_its_end_is_told(tmp_path: Path) -> None:
    handle = Handle("c", "k", tmp_path)
    handle.stderr.write_text("x" * 100 + "0123456789\n")
    assert last_lines(handle, n_bytes=7) == "456789"
