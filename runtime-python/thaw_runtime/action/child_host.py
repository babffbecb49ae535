"""The proxy's view of its child: one init, numbered runs, the child's output, and its death.

One thread listens to everything except requests: the child's answers, its two output streams, its end, and the sockets
of waiting callers, where it only notices a hang-up.
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
from thaw_runtime.process.signals import signal_name

LOGS_WAIT_S: Final = 2.0
"""How long the end waits for the child's last output.  Only a process that the function left behind can delay it."""


class CommandExited(Exception):
    """The child ended.  ``killed_by`` names the signal that killed it (SIGKILL), or is empty if the child exited."""

    def __init__(self, killed_by: str = "") -> None:
        super().__init__(killed_by)
        self.killed_by = killed_by


class ExitedBefore(CommandExited):
    """The child had already stopped taking runs, so nothing ran."""


class CallerGone(Exception):
    """The caller of a run hung up before its answer, and no other caller waits for an answer."""


class _Waiter:
    """One expected answer and the socket of the caller that waits for it.  It is woken once."""

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
        """Wait for the answer.  Raises CommandExited or CallerGone."""
        self._there.acquire()
        if isinstance(self._outcome, Message):
            return self._outcome
        raise self._outcome


class Child:
    """The child that :func:`proxy.fork_child` forked before the first thread existed."""

    def __init__(self, pid: int, sock: socket.socket, stdout: int, stderr: int) -> None:
        self._pid, self._sock = pid, sock
        self._incoming = Incoming(sock, socket.MSG_DONTWAIT)
        self._lock, self._sending = threading.Lock(), threading.Lock()
        self._waiters: dict[int, _Waiter] = {}
        self._next_id = INIT
        self._closed = False  # True: the child takes no more runs
        self.exit_code = 0  # set when the child has ended; minus the number of the signal that killed it
        self._said_all = threading.Event()
        self._drains = {fd: Drain(fd, target) for fd, target in ((stdout, 1), (stderr, 2))}
        self._end = os.pidfd_open(pid)
        self._epoll = select.epoll()
        for fd in (sock.fileno(), stdout, stderr, self._end):
            self._epoll.register(fd, select.EPOLLIN)

    def listen(self, on_exit: Callable[[], None]) -> None:
        """Begin to listen to the child.  ``on_exit`` is called once, on its own thread, after all waiting runs were
        woken.
        """
        threading.Thread(target=self._listen, args=(on_exit,), name="child", daemon=True).start()

    def init(self, body: bytes) -> Message:
        """Send the init and wait for its answer.  This comes after listen() and before the first run.  Raises
        CommandExited.
        """
        return self._ask(body, self._expect(-1))

    def run(self, body: bytes, caller: socket.socket) -> Message:
        """Run the function and return its answer; the run's logs are written before this returns.  Raises ExitedBefore,
        CommandExited or CallerGone.
        """
        run = self._expect(caller.fileno())  # this comes first: epoll reports an earlier hang-up only once
        self._epoll.register(caller, select.EPOLLRDHUP | select.EPOLLONESHOT)
        try:
            return self._ask(body, run)
        finally:
            self._epoll.unregister(caller)

    def end_logs(self) -> None:
        """After the child's death, wait for its last output, then write the sentinel that ends its last run."""
        self._said_all.wait(LOGS_WAIT_S)
        for fd in (1, 2):
            write_all(fd, f"{SENTINEL}\n".encode())

    def printed_so_far(self) -> dict[str, str]:
        """Return the end of the output before the answer to the init, for the error of an init that failed."""
        return {"printed": self._kept(2), "printed_out": self._kept(1)}

    def last_words(self) -> dict[str, str]:
        """Return the same for a child that has ended, after waiting for its last output."""
        self._said_all.wait(LOGS_WAIT_S)
        return self.printed_so_far()

    def keep_no_more(self) -> None:
        for drain in self._drains.values():
            drain.keep_no_more()

    def _kept(self, target: int) -> str:
        return next(drain.kept for drain in self._drains.values() if drain.target == target)

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
            pass  # the listening thread notices the same end and wakes us
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
        if answer.run_id != INIT:  # output before an init's answer has been copied: its event came no later
            for drain in self._drains.values():
                drain.end_run()
        with self._lock:
            waiter = self._waiters.pop(answer.run_id, None)
        if waiter is not None:
            waiter.wake(answer)

    def _abandon(self, ready: Collection[int]) -> None:
        """Note the callers among ``ready`` that hung up.

        Their runs can be stopped only together with all other runs of the child, so the runs continue as long as any
        caller waits for one.  When no caller waits any more, the child takes no more runs, and all runs are abandoned.
        """
        with self._lock:
            for waiter in self._waiters.values():
                if waiter.caller in ready and _has_hung_up(waiter.caller):
                    waiter.hung_up = True
            if not self._waiters or not all(waiter.hung_up for waiter in self._waiters.values()):
                return
            self._closed = True
            waiters, self._waiters = self._waiters, {}
        for waiter in waiters.values():
            waiter.wake(CallerGone())

    def _hang_up(self) -> None:
        """Shut down the socket of a child that has ended.

        Messages that the child had sent can still be read.  After them the socket ends, even if a fork of the child
        still holds it open.
        """
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


def _has_hung_up(caller: int) -> bool:
    """Return whether the connection has really hung up.  The event may belong to a connection that was closed
    meanwhile, and another one may have its number now. thaw/process/hangup.py does the same, but the image of Python
    functions does not contain it.
    """
    poll = select.poll()
    poll.register(caller, select.POLLRDHUP)
    return bool(poll.poll(0))
