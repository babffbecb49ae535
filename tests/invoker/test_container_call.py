"""A container's answer is bounded in time and in size, no matter how its code behaves."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from invoker.containers.call import MOST_BYTES, ContainerCall
from invoker.containers.consolidate import health_of
from invoker.containers.init import InitCall
from tests.invoker.platform import WAIT_S
from thaw.errors import InitFailed, WorkerLost


def body(data: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(data), data)


DEEP = body(b"[" * 200_000)
STRANGE = [body(b"[]"), body(b"null"), body(b"{"), body(b"\xff"), DEEP, body(b" " * (MOST_BYTES + 1))]


@contextlib.contextmanager
def serving(run_dir: Path, serve: Callable[[socket.socket], object]) -> Iterator[str]:
    """The socket of a container that treats its one connection so."""

    def accept() -> None:
        sock, _ = listener.accept()
        with sock, contextlib.suppress(OSError):  # the caller has closed the connection
            serve(sock)

    with socket.socket(socket.AF_UNIX) as listener, ThreadPoolExecutor(1) as pool:
        listener.bind(str(run_dir / "s"))
        listener.listen()
        served = pool.submit(accept)
        yield str(run_dir / "s")
        served.result(WAIT_S)


@contextlib.contextmanager
def answering(run_dir: Path, answer: bytes, *, for_ever: bytes = b"") -> Iterator[str]:
    """``for_ever`` follows the answer again and again."""

    def serve(sock: socket.socket) -> None:
        sock.recv(65536)
        sock.sendall(answer)
        while for_ever:
            sock.sendall(for_ever)

    with serving(run_dir, serve) as path:
        yield path


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

    def serve(sock: socket.socket) -> None:
        while not go_on.wait(0.01):
            sock.sendall(b"H")

    with serving(run_dir, serve) as path:
        with pytest.raises(InitFailed, match="in time"):
            InitCall(path, 0.3).post(b"{}")
        go_on.set()


def test_a_call_can_be_given_up(run_dir: Path) -> None:
    begun, over = threading.Event(), threading.Event()

    def serve(sock: socket.socket) -> None:
        sock.recv(1)
        begun.set()
        over.wait(WAIT_S)

    with serving(run_dir, serve) as path, ThreadPoolExecutor(1) as pool:
        call = InitCall(path, WAIT_S)
        posted = pool.submit(call.post, b"{}")
        assert begun.wait(WAIT_S)
        call.abort()
        with pytest.raises(WorkerLost):
            posted.result(WAIT_S)
        over.set()
