"""The proxy's view of its child: one init, runs by number, what it prints, and its death.

One thread listens to everything but requests: the child's answers, its two output streams, its end, and the sockets of
callers that wait, which it only watches for theirs.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import threading
from collections.abc import Callable, Collection
from typing import Final

from thaw_runtime.action.streams import Drain, write_all
from thaw_runtime.action.wire import INIT, SENTINEL, Incoming, Message, PeerGone, send
from thaw_runtime.process.ending import signal_name
from thaw_runtime.process.hangup import has_hung_up

LOGS_WAIT_S: Final = 2.0
"""How long the end waits for last words; only a process that the function left behind holds them back."""


class CommandExited(Exception):
    """The child ended.  ``killed_by`` names the signal that killed it (SIGKILL); empty where it ended by itself."""

    def __init__(self, killed_by: str = "") -> None:
        super().__init__(killed_by)
        self.killed_by = killed_by


class ExitedBefore(CommandExited):
    """The child took no more runs: nothing ran."""


class CallerGone(Exception):
    """The caller of a run hung up before its answer, and nobody waits for another."""


class _Waiter:
    """One expected answer and the socket of who waits for it.  Woken once."""

    def __init__(self, caller: int) -> None:
        self.caller = caller
        self.hung_up = False
        self._there = threading.Lock()
        self._there.acquire()
        self._outcome: Message | Exception = CommandExited()

    def wake(self, outcome: Message | Exception) -> None:
        self._outcome = outcome
        self._there.release()

    def wait(self) -> Message:
        """Raises CommandExited, CallerGone."""
        self._there.acquire()
        if isinstance(self._outcome, Message):
            return self._outcome
        raise self._outcome


class Child:
    """Forked by :func:`proxy.fork_child` before the first thread exists."""

    def __init__(self, pid: int, sock: socket.socket, stdout: int, stderr: int) -> None:
        self._pid, self._sock = pid, sock
        self._incoming = Incoming(sock, socket.MSG_DONTWAIT)
        self._lock, self._sending = threading.Lock(), threading.Lock()
        self._waiters: dict[int, _Waiter] = {}
        self._next_id = INIT
        self._closed = False  # takes no more runs
        self.exit_code = 0  # of the child once it has ended; minus the signal that killed it
        self._said_all = threading.Event()
        self._drains = {fd: Drain(fd, target) for fd, target in ((stdout, 1), (stderr, 2))}
        self._end = os.pidfd_open(pid)
        self._epoll = select.epoll()
        for fd in (sock.fileno(), stdout, stderr, self._end):
            self._epoll.register(fd, select.EPOLLIN)

    def listen(self, on_exit: Callable[[], None]) -> None:
        """Begin to hear the child.  ``on_exit`` is called once, on a thread of its own, after open runs were told."""
        threading.Thread(target=self._listen, args=(on_exit,), name="child", daemon=True).start()

    def init(self, body: bytes) -> Message:
        """Must come after listen() and before the first run.  Raises CommandExited."""
        return self._ask(body, self._expect(-1))

    def run(self, body: bytes, caller: socket.socket) -> Message:
        """The run's answer; its logs are written then.  Raises ExitedBefore, CommandExited, CallerGone."""
        run = self._expect(caller.fileno())  # first: a caller that has gone already is reported but once
        self._epoll.register(caller, select.EPOLLRDHUP | select.EPOLLONESHOT)
        try:
            return self._ask(body, run)
        finally:
            self._epoll.unregister(caller)

    def end_logs(self) -> None:
        """After the child's death: its last words, then the sentinel that ends its last run."""
        self._said_all.wait(LOGS_WAIT_S)
        for fd in (1, 2):
            write_all(fd, f"{SENTINEL}\n".encode())

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._pid, signal.SIGKILL)

    def _expect(self, caller: int) -> tuple[int, _Waiter]:
        waiter = _Waiter(caller)
        with self._lock:
            if self._closed:
                raise ExitedBefore
            run_id, self._next_id = self._next_id, self._next_id + 1
            self._waiters[run_id] = waiter
        return run_id, waiter

    def _ask(self, body: bytes, run: tuple[int, _Waiter]) -> Message:
        run_id, waiter = run
        try:
            with self._sending:
                send(self._sock, run_id, body)
        except PeerGone:
            pass  # the listening thread sees the same end and wakes us
        return waiter.wait()

    # the listening thread ------------------------------------------------------------------------------------------

    def _listen(self, on_exit: Callable[[], None]) -> None:
        try:
            while True:
                ready = [fd for fd, _ in self._epoll.poll()]
                for fd in ready:
                    if fd in self._drains:
                        self._carry(fd)
                if self._end in ready:
                    self._hang_up()
                if self._sock.fileno() in ready and (answer := self._incoming.take()) is not None:
                    self._answered(answer)
                self._abandon(ready)
        except PeerGone:
            self._ended(on_exit)

    def _carry(self, fd: int) -> None:
        if not self._drains[fd].some():
            self._epoll.unregister(fd)

    def _answered(self, answer: Message) -> None:
        if answer.run_id != INIT:
            for drain in self._drains.values():
                drain.end_run()
        with self._lock:
            waiter = self._waiters.pop(answer.run_id, None)
        if waiter is not None:
            waiter.wake(answer)

    def _abandon(self, ready: Collection[int]) -> None:
        """Note the callers among ``ready`` that hung up.  Their runs cannot be stopped but with the child's others, so
        they go on for as long as anybody waits for one; then no more are taken, and all are given up.
        """
        with self._lock:
            for waiter in self._waiters.values():
                if waiter.caller in ready and has_hung_up(waiter.caller):
                    waiter.hung_up = True
            if not self._waiters or not all(waiter.hung_up for waiter in self._waiters.values()):
                return
            self._closed = True
            waiters, self._waiters = self._waiters, {}
        for waiter in waiters.values():
            waiter.wake(CallerGone())

    def _hang_up(self) -> None:
        """It has ended.  What it had sent can still be read; then its socket ends, also where a fork of it holds it."""
        self._epoll.unregister(self._end)
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def _ended(self, on_exit: Callable[[], None]) -> None:
        with contextlib.suppress(ChildProcessError):
            self.exit_code = os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])
        with self._lock:
            self._closed = True
            waiters, self._waiters = self._waiters, {}
        for waiter in waiters.values():
            waiter.wake(CommandExited(signal_name(-self.exit_code) if self.exit_code < 0 else ""))
        threading.Thread(target=on_exit, name="end", daemon=True).start()
        for drain in self._drains.values():
            while drain.some():
                pass
        self._said_all.set()
