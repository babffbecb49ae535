"""Lines to activations by the sentinel contract."""

from __future__ import annotations

from pathlib import Path

from invoker.driver import Handle, LogChunk
from invoker.logs import KEPT_ACTIVATIONS, SENTINEL, LogCollector, SentinelSplitter, last_lines

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


def collector(files: Files, limit: int = 10_000) -> LogCollector:
    return LogCollector(Handle("c", "k", Path()), files.read, files.truncate, limit)


def test_the_splitter_gives_the_same_at_every_cut() -> None:
    data = b"one\n\ntwo" + END + b"three\n" + END
    for cut in range(len(data) + 1):
        splitter = SentinelSplitter(1000)
        assert splitter.feed(data[:cut]) + splitter.feed(data[cut:]) == [["one", "two"], ["three"]]


def test_lines_beyond_the_limit_are_replaced_by_one_that_says_so() -> None:
    splitter = SentinelSplitter(10)
    (lines,) = splitter.feed(b"12345\n" * 5 + END)
    assert lines == ["12345", "Logs were truncated because the total bytes size exceeds the limit of 10 bytes."]
    assert splitter.feed(b"next\n" + END) == [["next"]]


def test_a_line_without_end_is_not_kept_whole() -> None:
    splitter = SentinelSplitter(10)
    for _ in range(1000):
        splitter.feed(b"x" * 100)
    assert len(splitter._part) < 200
    assert len(splitter.feed(b"\n" + END)) == 1


def test_both_streams_go_to_the_run_that_ended() -> None:
    files = Files()
    logs = collector(files)
    files.data = {"stdout": b"a\n" + END + b"b\n" + END, "stderr": END + b"e\n" + END}
    logs.run_ended("1")
    logs.run_ended("2")
    assert texts(logs.lines("1")) == ["stdout: a"]
    assert texts(logs.lines("2")) == ["stdout: b", "stderr: e"]
    assert logs.lines("unknown") == []


def test_lines_that_arrive_late_are_there_at_the_next_look() -> None:
    files = Files()
    logs = collector(files)
    logs.run_ended("1")
    assert logs.lines("1") == []
    files.data["stdout"] = b"late\n" + END
    assert texts(logs.lines("1")) == ["stdout: late"]


def test_what_was_printed_before_is_skipped() -> None:
    files = Files()
    logs = collector(files)
    files.data["stderr"] = b"old\n" + END + b"half"
    logs.skip()
    logs.run_ended("1")
    files.data["stderr"] += b"new\n" + END
    assert texts(logs.lines("1")) == ["stderr: new"]


def test_old_activations_and_large_files_are_let_go() -> None:
    files = Files()
    logs = collector(files, 10 << 20)
    for n in range(KEPT_ACTIVATIONS + 5):
        logs.run_ended(str(n))
        files.data["stdout"] += b"x" * 20_000 + b"\n" + END
        logs.lines(str(n))
    assert logs.lines("0") == []
    assert files.truncated >= 3
    assert len(logs.lines(str(KEPT_ACTIVATIONS + 4))) == 1


def test_last_lines_of_a_failed_start_are_bounded(tmp_path: Path) -> None:
    handle = Handle("c", "k", tmp_path)
    assert last_lines(handle) == ""
    handle.stderr.write_text("\n".join(f"line {n}" for n in range(1000)) + f"\n{SENTINEL}\n")
    assert last_lines(handle, 2) == "line 998\nline 999"
