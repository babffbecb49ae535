"""The limiter between the output of a child process and its log."""

from __future__ import annotations

import os

import pytest

from thaw_runtime.action.streams import Drain, LineLimiter
from thaw_runtime.action.wire import SENTINEL

END = SENTINEL.encode() + b"\n"
TEXT = b"one\ntwo\n"


def test_the_sentinel_stands_on_a_line_of_its_own_wherever_the_text_was_cut() -> None:
    for cut in range(len(TEXT) + 1):
        limiter = LineLimiter()
        assert limiter.feed(TEXT[:cut]) + limiter.feed(TEXT[cut:]) + limiter.end_run() == TEXT + END, cut
    limiter = LineLimiter()
    assert limiter.feed(b"no line end") + limiter.end_run() + limiter.end_run() == b"no line end\n" + END + END


@pytest.mark.parametrize("size", [1, 7, 64, 1000])
def test_beyond_the_limit_nothing_passes_until_the_run_ends(size: int) -> None:
    limiter = LineLimiter(100)
    data = b"x" * 500 + b"\n"
    out = b"".join(limiter.feed(data[at : at + size]) for at in range(0, len(data), size)) + limiter.end_run()
    assert out.startswith(b"x" * 100 + b"\nLogs were truncated")
    assert out.endswith(b"bytes.\n" + END)
    assert limiter.feed(b"next\n") + limiter.end_run() == b"next\n" + END


def test_a_runs_end_carries_what_was_printed_before_it_and_nothing_blocks() -> None:
    (source, printed), (log, target) = os.pipe(), os.pipe()
    drain = Drain(source, target)
    for text in (b"a line\n" * 3, b"", b"x" * 20_000):
        os.write(printed, text)
        drain.end_run()
        end = END if not text or text.endswith(b"\n") else b"\n" + END
        assert os.read(log, 1 << 16) == text + end
    os.close(printed)
    assert not drain.some()
    drain.end_run()
    assert os.read(log, 1 << 16) == END
    for fd in (source, log, target):
        os.close(fd)


@pytest.mark.parametrize(
    "text", [END, b"x" + END, END + END, b"a\n" + END + b"b\n", SENTINEL.encode(), END[:-1] + b"\r\n"]
)
@pytest.mark.parametrize("size", [1, 2, 36, 37, 38, 1000])
def test_what_a_function_prints_is_no_end_of_its_run(text: bytes, size: int) -> None:
    """A caller may have it print the mark, and the lines behind it would be those of the next caller."""
    limiter = LineLimiter()
    for _ in range(2):
        fed = b"".join(limiter.feed(text[at : at + size]) for at in range(0, len(text), size)) + limiter.end_run()
        lines = fed.split(b"\n")
        assert [line.endswith(SENTINEL.encode()) for line in lines] == [False] * (len(lines) - 2) + [True, False]
        assert fed.replace(b" \n", b"\n").removesuffix(END).rstrip(b"\n") == text.rstrip(b"\n")


def test_a_mark_in_too_much_text_ends_no_run_either() -> None:
    limiter = LineLimiter(100)
    assert limiter.feed(END + b"x" * 200).startswith(
        END[:-1] + b" \n" + b"x" * (99 - len(END)) + b"\nLogs were truncated"
    )
    assert limiter.feed(b"y") == b""
