"""What a follower copies of the engine's log into a container's two files."""

from __future__ import annotations

import socket
import struct
import threading
import time
from pathlib import Path

import pytest

from invoker import docker_logs
from invoker.docker_logs import LogFollower
from invoker.driver import Handle
from invoker.logs import SENTINEL, SentinelSplitter

END = SENTINEL + "\n"


def serve(listener: socket.socket, lines: list[str]) -> None:
    """The engine's answer to one follower."""
    connection, _ = listener.accept()
    with connection:
        connection.recv(65536)
        connection.sendall(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        for line in lines:
            text = f"2026-01-02T03:04:05.0Z {line}".encode()
            frame = struct.pack(">BxxxI", 1, len(text)) + text
            connection.sendall(b"%x\r\n%s\r\n" % (len(frame), frame))
        connection.sendall(b"0\r\n\r\n")


def test_the_end_of_a_run_that_printed_too_much_is_still_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(docker_logs, "FILE_LIMIT_BYTES", 100)
    monkeypatch.setattr(docker_logs, "SENTINELS_BYTES", 3 * len(END))
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
