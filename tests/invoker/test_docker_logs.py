"""The lines that a follower copies from the engine's log into a container's two files."""

from __future__ import annotations

import socket
import struct
import threading
import time
from pathlib import Path

import pytest

from invoker.drivers import log_files
from invoker.drivers.activation_logs import SENTINEL, SentinelSplitter
from invoker.drivers.base import Handle
from invoker.drivers.docker.logs import LogFollower, Repeats

END = SENTINEL + "\n"


def serve(listener: socket.socket, lines: list[str]) -> None:
    """Send the engine's answer to one follower."""
    connection, _ = listener.accept()
    with connection:
        connection.recv(65536)
        connection.sendall(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        for n, line in enumerate(lines):
            text = f"2026-01-02T03:04:05.{n:09}Z {line}".encode()
            frame = struct.pack(">BxxxI", 1, len(text)) + text
            connection.sendall(b"%x\r\n%s\r\n" % (len(frame), frame))
        connection.sendall(b"0\r\n\r\n")


def test_the_end_of_a_run_that_printed_too_much_is_still_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_files, "FILE_LIMIT_BYTES", 100)
    monkeypatch.setattr(log_files, "SENTINELS_BYTES", 3 * len(END))
    lines = [*(f"{n:031}\n" for n in range(9)), END, END, *(SENTINEL + END for _ in range(9))]
    handle = Handle("c", "k", tmp_path)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "engine"))
        listener.listen()
        threading.Thread(target=serve, args=(listener, lines), daemon=True).start()
        follower = LogFollower(
            str(tmp_path / "engine"), "c", handle, lambda: False, lambda _: False, lambda: None, since=time.time()
        )
        follower.wait_ended(10)
    data = handle.stdout.read_bytes()
    assert SentinelSplitter(1000).feed(data)[:2] == [[f"{n:031}" for n in range(4)], []]
    assert len(data) <= 100 + 4 * len(END)


NOW = "9.000000000"
OUT, ERR = 1, 2


def is_repeated(repeats: Repeats, *frames: tuple[int, float, bytes], now: str = NOW) -> list[bool]:
    return [repeats.has(stream, f"{at:.9f}", text, now=now) for stream, at, text in frames]


def test_what_the_engine_sends_again_after_it_rotated_its_file_is_left_out() -> None:
    """There are two streams, and the last frame of each comes again too."""
    repeats = Repeats()
    first = [(OUT, 1.0, b"a\n"), (OUT, 2.0, b"b\n"), (ERR, 2.1, b"end\n"), (OUT, 2.2, b"end\n")]
    assert is_repeated(repeats, *first) == [False] * 4
    assert is_repeated(repeats, *first[1:]) == [True] * 3
    assert is_repeated(repeats, (ERR, 2.3, b"c\n"), (OUT, 2.4, b"d\n")) == [False] * 2


def test_the_pieces_of_one_long_line_share_a_time_stamp_and_are_all_kept_once() -> None:
    repeats = Repeats()
    pieces = [(OUT, 1.0, b"x"), (OUT, 1.0, b"x"), (OUT, 1.0, b"x\n")]
    assert is_repeated(repeats, *pieces) == [False] * 3
    assert is_repeated(repeats, *pieces) == [True] * 3
    assert is_repeated(repeats, (OUT, 1.1, b"y\n")) == [False]


def test_lines_are_kept_when_the_clock_was_set_back() -> None:
    repeats = Repeats()
    assert is_repeated(repeats, (OUT, 8.0, b"a\n")) == [False]
    assert is_repeated(repeats, (OUT, 3.0, b"b\n"), (OUT, 3.1, b"c\n"), now="3.200000000") == [False, False]
