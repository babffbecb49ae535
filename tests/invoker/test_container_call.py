"""A container's answer is bounded in time and in size, no matter how its code behaves."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from invoker.containers.call import MOST_BYTES, ContainerCall
from invoker.containers.consolidate import health_of
from invoker.containers.init import InitCall
from tests.invoker.platform import WAIT_S
from thaw.errors import InitFailed, WorkerLost


class Container:
    """Takes one request and answers it.  With ``for_ever`` the answer never ends."""

    def __init__(self, path: Path, answer: bytes, *, for_ever: bytes = b"") -> None:
        self.path = str(path)
        self._answer, self._for_ever = answer, for_ever
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(self.path)
        self._listener.listen()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        sock, _ = self._listener.accept()
        with sock, contextlib.suppress(OSError):  # the caller has closed the connection
            sock.recv(65536)
            sock.sendall(self._answer)
            while self._for_ever:
                sock.sendall(self._for_ever)

    def close(self) -> None:
        self._thread.join(WAIT_S)
        assert not self._thread.is_alive()
        self._listener.close()


def body(data: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(data), data)


DEEP = body(b"[" * 200_000)
STRANGE = [body(b"[]"), body(b"null"), body(b"{"), body(b"\xff"), DEEP, body(b" " * (MOST_BYTES + 1))]


@contextlib.contextmanager
def answering(run_dir: Path, answer: bytes, *, for_ever: bytes = b"") -> Iterator[str]:
    container = Container(run_dir / "s", answer, for_ever=for_ever)
    yield container.path
    container.close()


def test_an_object_is_an_answer(run_dir: Path) -> None:
    with answering(run_dir, body(b'{"state": "ready"}')) as path:
        assert ContainerCall(path, WAIT_S).ask("GET", "/health") == (200, {"state": "ready"})


@pytest.mark.parametrize("answer", STRANGE)
def test_an_init_that_answers_strangely_has_failed(run_dir: Path, answer: bytes) -> None:
    with answering(run_dir, answer) as path, pytest.raises(InitFailed, match="cannot be read"):
        InitCall(path, WAIT_S).post(b"{}")


@pytest.mark.parametrize("answer", [b"", body(b'{"ok": true}')[:-1]])
def test_an_init_that_is_cut_short_has_lost_its_container(run_dir: Path, answer: bytes) -> None:
    with answering(run_dir, answer) as path, pytest.raises(WorkerLost):
        InitCall(path, WAIT_S).post(b"{}")


@pytest.mark.parametrize("answer", [*STRANGE, b""])
def test_a_container_that_answers_strangely_is_not_adopted(run_dir: Path, answer: bytes) -> None:
    with answering(run_dir, answer) as path:
        assert (health_of(path) or {}).get("state") != "ready"


def test_an_answer_without_end_is_read_no_further_than_the_limit(run_dir: Path) -> None:
    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    with answering(run_dir, head, for_ever=b"400\r\n" + b"x" * 1024 + b"\r\n") as path, pytest.raises(InitFailed):
        InitCall(path, WAIT_S).post(b"{}")


def test_the_deadline_is_that_of_the_whole_exchange(run_dir: Path) -> None:
    """A head that never ends makes every single wait short, so only a deadline for the whole exchange ends it."""
    go_on = threading.Event()
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(run_dir / "s"))
    listener.listen()

    def serve() -> None:
        sock, _ = listener.accept()
        with sock, contextlib.suppress(OSError):
            while not go_on.wait(0.01):
                sock.sendall(b"H")

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    with pytest.raises(InitFailed, match="in time"):
        InitCall(str(run_dir / "s"), 0.3).post(b"{}")
    go_on.set()
    thread.join(WAIT_S)
    listener.close()


def test_a_call_can_be_given_up(run_dir: Path) -> None:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(run_dir / "s"))
    listener.listen()
    call = InitCall(str(run_dir / "s"), WAIT_S)
    failed: list[Exception] = []

    def post() -> None:
        try:
            call.post(b"{}")
        except WorkerLost as e:
            failed.append(e)

    thread = threading.Thread(target=post, daemon=True)
    thread.start()
    sock, _ = listener.accept()
    sock.recv(1)
    call.abort()
    thread.join(WAIT_S)
    assert len(failed) == 1
    sock.close()
    listener.close()
