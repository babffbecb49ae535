"""The client of the llm stem cell: starts the pre-imported process, orders forks, receives the reports of their ends.

The process outlives an invoker that is killed, as containers do: the next one connects to it again.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from invoker.drivers import process_ids
from invoker.drivers.exit_watch import ExitWatch
from invoker.drivers.socket_wait import wait_socket, wait_socket_until
from relay.clients.channel import Channel
from thaw.errors import PlatformError, ProtocolError
from thaw.logs import Log
from thaw.process.lasting import LastingThread

PROGRAM: list[str] = ["-m", "thaw_runtime.start.zygote"]
WARM_UP_S: Final = 180.0
"""Importing the engine takes 10 CPU seconds; on a host with busy cores it takes several times as long."""

_FIRST_IMPORT_S: Final = 10.0
"""A host reports this for its first cell.  For each later cell it reports how long the cell before took."""
_OVERDUE_S: Final = 1.0
"""A cell that takes longer than the last one is reported to be ready by the next report."""
_ENDED_S: Final = 5.0
_FORK_S: Final = 10.0
_RESTART_S: Final = 1.0  # a process that dies at once must not be started in a loop without pause


class Zygote:
    """``parent`` is the socket of a zygote that several hosts on this machine have in common: this host's zygote is
    then forked from it instead of importing everything itself."""

    def __init__(self, run_dir: Path, env: Mapping[str, str], exits: ExitWatch, log: Log, parent: str = "") -> None:
        self._path = str(run_dir / "zygote.s")
        self._parent = parent
        self._pid_file = run_dir / "zygote.pid"
        self._log_file = run_dir / "zygote.log"
        self._env, self._exits, self._log = env, exits, log
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._on_ready: Callable[[], None] = lambda: None
        self._channel: Channel | None = None
        self._wanted = False
        self._running = False  # a keeper thread exists
        self._warming = False  # a process imports, and is not ready yet
        self._warming_since_s, self._import_s = 0.0, _FIRST_IMPORT_S
        self._pid, self._ticks = 0, 0
        self._stopped = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        weakref.finalize(self, os.close, self._stopped)
        self._replies: dict[str, dict[str, Any]] = {}
        self._statuses: dict[int, int] = {}

    @property
    def ready(self) -> bool:
        return self._channel is not None

    @property
    def pid(self) -> int:
        return self._pid

    @property
    def ready_in_s(self) -> float | None:
        """Seconds in which the process that imports now is ready, if it takes as long as the last one did."""
        with self._lock:
            if not self._warming:
                return None
            return max(_OVERDUE_S, self._import_s - (time.monotonic() - self._warming_since_s))

    def wait_warm(self, deadline_s: float) -> None:
        """Return when the process that is importing now is ready or gone; at once when there is none."""
        with self._lock:
            self._changed.wait_for(lambda: not self._warming, deadline_s)

    def want(self, on_ready: Callable[[], None] = lambda: None) -> None:
        """Start the process, and again whenever it dies; return at once.  Each time it is ready, call ``on_ready``."""
        with self._lock:
            self._wanted = True
            self._on_ready = on_ready
            if self._running:
                return
            self._running = True
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._stopped)  # an earlier give_up must not end the new wait
        LastingThread(self._keep, "zygote").start()

    def give_up(self) -> None:
        """End the process; its containers go on.  Returns when its memory is free."""
        with self._lock:
            self._wanted = False
            if not self._running:
                self._found()  # the process of an earlier invoker
            channel, pid, ticks = self._channel, self._pid, self._ticks
        os.eventfd_write(self._stopped, 1)
        process_ids.signal_tree(pid, ticks, signal.SIGKILL)
        process_ids.wait_gone(pid, ticks, _ENDED_S)
        if channel is not None:
            channel.close()
        with self._lock:
            self._changed.wait_for(lambda: not self._running, timeout=_ENDED_S)
        self._pid_file.unlink(missing_ok=True)

    def leave(self) -> None:
        """Disconnect and leave the process to the next invoker (tests simulate a crash with it)."""
        with self._lock:
            self._wanted = False
            channel = self._channel
        if channel is not None:
            channel.close()

    def fork(self, container_id: str, env: Mapping[str, str], stdout: Path, stderr: Path) -> int:
        """The pid of a new container.  Raises PlatformError."""
        with self._lock:
            channel = self._channel
        if channel is None:
            raise PlatformError("the llm stem cell is not ready")
        order = {
            "op": "fork",
            "instance_id": container_id,
            "env": dict(env),
            "stdout": str(stdout),
            "stderr": str(stderr),
        }
        try:
            channel.send(order)
        except OSError as e:
            raise PlatformError(f"the llm stem cell does not answer: {e}") from e
        with self._lock:
            if not self._changed.wait_for(
                lambda: container_id in self._replies or self._channel is not channel, _FORK_S
            ):
                self._replace(channel)
            reply = self._replies.pop(container_id, None)
        if reply is None or reply["op"] != "forked":
            raise PlatformError(f"the llm stem cell did not fork: {reply['error'] if reply else 'no answer'}")
        return int(reply["pid"])

    def _replace(self, channel: Channel) -> None:
        """Kill a process that hangs; its keeper starts another.  The old one must not fork a container later, when
        another container is there in its place.  All its messages have been read when this returns."""
        pid, ticks = self._pid, self._ticks
        self._log.event("zygote_hangs", pid=pid)
        process_ids.signal_tree(pid, ticks, signal.SIGKILL)
        self._changed.wait_for(lambda: self._channel is not channel, _ENDED_S)

    def status_of(self, pid: int, deadline_s: float) -> int | None:
        """The exit status of the zygote's child ``pid``; None if the zygote did not report it."""
        with self._lock:
            self._changed.wait_for(lambda: pid in self._statuses or self._channel is None, deadline_s)
            return self._statuses.pop(pid, None)

    def _keep(self) -> None:
        try:
            while self._wanted:
                began = time.monotonic()
                try:
                    self._live()
                except (PlatformError, OSError) as e:
                    if self._wanted:
                        self._log.event("zygote_lost", error=str(e))
                if self._wanted and time.monotonic() - began < _RESTART_S:
                    threading.Event().wait(_RESTART_S)
        finally:
            with self._lock:
                self._running = False
                self._changed.notify_all()

    def _live(self) -> None:
        """Find or start one process, and read its messages until its connection ends."""
        channel = self._warm_up()
        self._log.event("zygote_ready", pid=self._pid)
        self._on_ready()
        try:
            while True:
                self._take(channel.receive()[0])
        except (ProtocolError, OSError):
            return
        finally:
            with self._lock:
                self._channel = None
                self._changed.notify_all()
            channel.close()

    def _warm_up(self) -> Channel:
        with self._lock:
            self._warming, self._warming_since_s = True, time.monotonic()
        try:
            was_there = self._found()
            if not was_there:
                self._start()
            channel = Channel(wait_socket(self._path, self._pid, WARM_UP_S, self._stopped))
            channel.receive()  # Ready
            if not was_there:
                self._import_s = time.monotonic() - self._warming_since_s
            self._channel = channel
            return channel
        finally:
            with self._lock:
                self._warming = False
                self._changed.notify_all()

    def _take(self, message: dict[str, Any]) -> None:
        with self._lock:
            if message["op"] == "exited":
                self._statuses[int(message["pid"])] = int(message["status"])
                while len(self._statuses) > 64:
                    self._statuses.pop(next(iter(self._statuses)))
            else:
                self._replies[message["instance_id"]] = message
            self._changed.notify_all()

    def _found(self) -> bool:
        try:
            pid, ticks = (int(n) for n in self._pid_file.read_text().split())
        except (OSError, ValueError):
            return False
        self._pid, self._ticks = pid, ticks
        return process_ids.is_alive(pid, ticks)

    def _start(self) -> None:
        Path(self._path).unlink(missing_ok=True)
        pid = self._branch() if self._parent else 0
        self._pid = pid or self._import()
        self._ticks = process_ids.start_ticks(self._pid) or 0
        self._pid_file.write_text(f"{self._pid} {self._ticks}")

    def _branch(self) -> int:
        """The pid of a process that the common parent forked for this host; 0 when it cannot."""
        try:
            channel = Channel(wait_socket_until(self._parent, self._stopped, WARM_UP_S, self._stopped))
            try:
                channel.receive()  # Ready
                channel.send(
                    {
                        "op": "spawn",
                        "socket": self._path,
                        "log": str(self._log_file),
                        "env": dict(self._env),
                        "netns": f"/proc/{os.getpid()}/ns/net",
                    }
                )
                return int(channel.receive()[0]["pid"])
            finally:
                channel.close()
        except (PlatformError, ProtocolError, OSError, KeyError) as e:
            if not self._wanted:
                raise
            self._log.event("zygote_parent_lost", error=str(e))
            return 0

    def _import(self) -> int:
        command = [sys.executable, *PROGRAM, "--socket", self._path]
        with self._log_file.open("ab") as log:
            process = subprocess.Popen(
                command, env=dict(self._env), stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        process.returncode = 0  # the exit watch reaps it; Popen must not look for it
        self._exits.watch(process.pid, lambda _: None)
        return process.pid
