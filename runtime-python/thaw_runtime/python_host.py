"""The proxy's view of its child: one init, runs by number, and its death."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import threading
from collections.abc import Iterator, Mapping
from typing import Any, Final

from thaw_runtime.python_streams import Pump, write_all
from thaw_runtime.python_wire import SENTINEL, PeerGone, receive, send

LOGS_WAIT_S: Final = 2.0
"""How long an answer waits for its logs to be written; only a stopped disk takes longer."""


class CommandExited(Exception):
    """The child ended."""


class CallerGone(Exception):
    """The caller of a run hung up before its answer."""


class _Waiter:
    """One expected answer.  Wakes a poll, since its owner also watches the caller's socket."""

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_CLOEXEC)
        self.answer: Mapping[str, Any] | None = None

    def wake(self, answer: Mapping[str, Any] | None) -> None:
        self.answer = answer
        os.eventfd_write(self.fd, 1)


class Child:
    """Forked by :func:`fork_child` before the first thread exists."""

    def __init__(self, pid: int, sock: socket.socket, stdout: int, stderr: int) -> None:
        self._pid, self._sock = pid, sock
        self._lock = threading.Lock()
        self._waiters: dict[int, _Waiter] = {}
        self._next_id = 0
        self._n_ended = 0
        self.exited = threading.Event()
        self._pumps = (Pump(stdout, 1, "stdout"), Pump(stderr, 2, "stderr"))

    def init(self, value: Mapping[str, Any]) -> Mapping[str, Any]:
        """The child's {status, body}.  Raises CommandExited."""
        try:
            send(self._sock, value)
            reply: Mapping[str, Any] = receive(self._sock)
        except PeerGone as e:
            self._ended()
            raise CommandExited from e
        threading.Thread(target=self._read_answers, name="answers", daemon=True).start()
        return reply

    def run(self, request: Mapping[str, Any], caller: socket.socket) -> Mapping[str, Any]:
        """The run's {status, body}; its logs are written then.  Raises CommandExited, CallerGone."""
        with self._waiting() as (run_id, waiter):
            try:
                with self._lock:
                    send(self._sock, {**request, "id": run_id})
            except PeerGone as e:
                raise CommandExited from e
            _wait(waiter.fd, caller)
            if waiter.answer is None:
                raise CommandExited
            return waiter.answer

    def end_logs(self) -> None:
        """After the child's death: its last words, then the sentinel that it could not write itself."""
        for pump, fd in zip(self._pumps, (1, 2), strict=True):
            pump.wait_ended(LOGS_WAIT_S)
            write_all(fd, f"{SENTINEL}\n".encode())

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._pid, signal.SIGKILL)

    @contextlib.contextmanager
    def _waiting(self) -> Iterator[tuple[int, _Waiter]]:
        waiter = _Waiter()
        with self._lock:
            self._next_id += 1
            run_id = self._next_id
            self._waiters[run_id] = waiter
            if self.exited.is_set():
                waiter.wake(None)
        try:
            yield run_id, waiter
        finally:
            with self._lock:
                self._waiters.pop(run_id, None)
            os.close(waiter.fd)

    def _read_answers(self) -> None:
        try:
            while True:
                answer = receive(self._sock)
                self._n_ended += 1
                for pump in self._pumps:
                    pump.wait_passed(self._n_ended, LOGS_WAIT_S)
                self._wake(answer["id"], answer)
        except PeerGone:
            self._ended()

    def _wake(self, run_id: int, answer: Mapping[str, Any]) -> None:
        with self._lock:
            waiter = self._waiters.get(run_id)
            if waiter is not None:
                waiter.wake(answer)

    def _ended(self) -> None:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self._pid, 0)
        with self._lock:
            self.exited.set()
            for waiter in self._waiters.values():
                waiter.wake(None)


def _wait(answer_fd: int, caller: socket.socket) -> None:
    """Until the answer is there.  Raises CallerGone when the caller's side of the connection ends first."""
    poll = select.poll()
    poll.register(answer_fd, select.POLLIN)
    poll.register(caller, select.POLLRDHUP)
    ready = {fd for fd, _ in poll.poll()}
    if answer_fd not in ready:
        raise CallerGone
