"""The supervisor starts components, waits until each reports that it is ready, restarts crashed ones and stops all.

One thread with one selector handles ends of processes (pidfds), growing logs (inotify), signals (a socket pair) and the
due times of restarts.  Only this thread starts processes, because the kernel's parent-death signal is bound to the
*thread* that forked.  A child writes its output directly to its log file: with a pipe to the supervisor, the death of
the supervisor would disturb the orderly end of the children.
"""

from __future__ import annotations

import contextlib
import ctypes
import heapq
import os
import re
import selectors
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import Any, BinaryIO

from thaw.dev.components import Component
from thaw.dev.layout import Layout
from thaw.dev.processes import ProcessId, belonging_to, identify, send, wait_gone
from thaw.dev.restarts import AGAIN_AND_AGAIN, STEADY_S, Recorded, RestartLog, write_pid_file
from thaw.dev.watch import DirectoryWatch, LineReader
from thaw.errors import PlatformError

_PR_SET_PDEATHSIG = 1
_FIRST_DELAY_S, _LONGEST_DELAY_S = 0.2, 10.0
_libc = ctypes.CDLL(None)

Report = Callable[[str, str], None]
"""Called with (component, event), where the event is starting, ready, crashed or stopped."""


@dataclass(slots=True)
class _Child:
    component: Component
    process: subprocess.Popen[bytes]
    identity: ProcessId
    pidfd: int
    log: LineReader
    started: float
    ready: bool = False


@dataclass(slots=True)
class Supervisor:
    layout: Layout
    report: Report
    _children: dict[str, _Child] = field(default_factory=dict)
    _recorded: dict[str, Recorded] = field(default_factory=dict)
    _due: list[tuple[float, str]] = field(default_factory=list)  # a heap of restarts: (due time, component)
    _components: dict[str, Component] = field(default_factory=dict)
    _selector: selectors.DefaultSelector = field(default_factory=selectors.DefaultSelector)
    _watch: DirectoryWatch | None = None
    _wake: tuple[socket.socket, ...] = ()
    _handlers: dict[int, Any] = field(default_factory=dict)
    _stopping: bool = False
    _log: RestartLog = field(init=False)

    def __post_init__(self) -> None:
        self._log = RestartLog(self.layout.supervisor_log)

    def __enter__(self) -> Supervisor:
        self.layout.make()
        self._watch = DirectoryWatch(self.layout.logs)
        self._selector.register(self._watch, selectors.EVENT_READ)
        self._wake_on_signals()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        signal.set_wakeup_fd(-1)
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self._selector.close()
        for end in self._wake:
            end.close()
        if self._watch is not None:
            self._watch.close()

    # starting ------------------------------------------------------------------------------------------------------

    def start(self, components: list[Component]) -> None:
        """Start all components without waiting; wait for them with :meth:`wait_ready`."""
        for component in components:
            self._components[component.name] = component
            self._spawn(component)

    def wait_ready(self, components: list[Component]) -> None:
        """Wait until all components are ready.

        Raises PlatformError when a component ends while they start, or when one is not ready by its deadline.
        """
        begun = time.monotonic()
        for component in components:
            while not self._children[component.name].ready:
                remaining = begun + component.start_deadline_s - time.monotonic()
                if remaining <= 0:
                    raise self._failure(component, f"was not ready after {component.start_deadline_s:.0f} s")
                ended = self._turn(remaining)
                if self._stopping:
                    raise KeyboardInterrupt
                for name in ended:
                    code = self._children[name].process.returncode
                    raise self._failure(self._components[name], f"ended while it started ({_describe(code)})")

    def _failure(self, component: Component, what: str) -> PlatformError:
        path = self.layout.log(component.name)
        lines = [line for line in LineReader(path).lines() if line.strip()] or ["(it wrote nothing)"]
        return PlatformError(f"{component.name} {what}: {lines[-1][:400]}", hint=f"its log: {path}")

    def _spawn(self, component: Component) -> None:
        self.report(component.name, "starting")
        path = self.layout.log(component.name)
        with _opened(path) as log:
            end = log.tell()
            process = subprocess.Popen(
                component.argv,
                env=dict(component.env),
                cwd=self.layout.run_dir,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=_die_with(os.getpid(), component.stop_signal),
            )
        identity = identify(process.pid) or ProcessId(process.pid, 0)
        pidfd = os.pidfd_open(process.pid)
        reader = LineReader(path)
        reader.skip_to(end)
        child = _Child(component, process, identity, pidfd, reader, time.monotonic())
        self._children[component.name] = child
        self._selector.register(pidfd, selectors.EVENT_READ, child)
        known = self._recorded.get(component.name, Recorded(identity))
        self._record(component.name, replace(known, process=identity))

    def _record(self, name: str, recorded: Recorded) -> None:
        self._recorded[name] = recorded
        with contextlib.suppress(OSError):  # the disk is full: its processes can be found without the file, too
            write_pid_file(self.layout.pids / name.replace("/", "-"), recorded)

    # running -------------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Run until a signal (SIGINT, SIGTERM, SIGHUP).  A component that ends is restarted, each time after a longer
        pause.
        """
        while not self._stopping:
            now = time.monotonic()
            while self._due and self._due[0][0] <= now:
                self._start_again(heapq.heappop(self._due)[1])
            for name in self._turn(self._due[0][0] - now if self._due else None):
                child = self._children[name]
                self._plan_restart(name, _describe(child.process.returncode), time.monotonic() - child.started)

    def _start_again(self, name: str) -> None:
        try:
            self._spawn(self._components[name])
        except OSError as e:  # the machine is out of processes or memory: a later try may succeed
            self._plan_restart(name, f"no start: {e}", 0.0)

    def _plan_restart(self, name: str, cause: str, lived_s: float) -> None:
        """Record that the component ended, and plan its restart after a pause, which grows with each quick end."""
        if self._stopping:
            return
        known = self._recorded[name]
        in_a_row = 1 if lived_s > STEADY_S else known.in_a_row + 1
        recorded = replace(known, n_restarts=known.n_restarts + 1, in_a_row=in_a_row, cause=cause)
        self._record(name, recorded)
        pause_s = min(_LONGEST_DELAY_S, _FIRST_DELAY_S * 2.0 ** (in_a_row - 1))
        event = "restarts_again_and_again" if in_a_row >= AGAIN_AND_AGAIN else "restart"
        self._log.event(
            event, component=name, cause=cause, count=recorded.n_restarts, in_a_row=in_a_row, pause_s=pause_s
        )
        again = f", {in_a_row} times in a row" if in_a_row >= AGAIN_AND_AGAIN else ""
        self.report(name, f"crashed ({cause}{again})")
        heapq.heappush(self._due, (time.monotonic() + pause_s, name))

    def _turn(self, timeout_s: float | None) -> list[str]:
        """Wait for events and handle them; return the names of the components that have ended."""
        ended = []
        for key, _ in self._selector.select(timeout_s):
            if isinstance(key.data, _Child):
                self._reap(key.data)
                ended.append(key.data.component.name)
            elif key.fileobj is self._watch:
                self._watch.drain()
                self._look_for_ready()
            elif isinstance(key.fileobj, socket.socket):
                key.fileobj.recv(64)
        return ended

    def _look_for_ready(self) -> None:
        for name, child in self._children.items():
            if not child.ready and any(re.search(child.component.ready, line) for line in child.log.lines()):
                child.ready = True
                self._log.flush()
                self.report(name, "ready")

    def _reap(self, child: _Child) -> None:
        self._selector.unregister(child.pidfd)
        os.close(child.pidfd)
        child.process.wait()

    def _wake_on_signals(self) -> None:
        reader, writer = socket.socketpair()
        reader.setblocking(False)
        writer.setblocking(False)
        self._selector.register(reader, selectors.EVENT_READ)
        self._wake = (reader, writer)
        signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            self._handlers[number] = signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._stopping = True

    # stopping ------------------------------------------------------------------------------------------------------

    def stop(self) -> None:
        """End every component, tier by tier, and all processes that the components have started."""
        self._stopping = True
        homes = self.layout.homes
        everything = belonging_to(homes, [c.identity for c in self._children.values()])
        for tier in sorted({c.component.tier for c in self._children.values()}):
            self._stop_tier([c for c in self._children.values() if c.component.tier == tier])
        everything |= belonging_to(homes, everything)
        send(everything, signal.SIGKILL)
        wait_gone(everything, 5.0)
        for child in self._children.values():
            if child.process.returncode is None:
                child.process.wait()
        self._children.clear()

    def _stop_tier(self, children: list[_Child]) -> None:
        for child in children:
            send([child.identity], child.component.stop_signal)
        grace = max((c.component.stop_grace_s for c in children), default=0.0)
        send(wait_gone([c.identity for c in children], grace), signal.SIGKILL)
        for child in children:
            child.process.wait()
            self.report(child.component.name, "stopped")


def _die_with(parent: int, sig: signal.Signals) -> Callable[[], None]:
    """A function to run between fork and exec.  It makes the kernel send ``sig`` to the child when the parent dies, and
    ends the child if the parent has already died.
    """

    def prepare() -> None:
        _libc.prctl(_PR_SET_PDEATHSIG, int(sig))
        if os.getppid() != parent:
            os._exit(1)

    return prepare


def _opened(path: Path) -> BinaryIO:
    """Open a child's log.  If the log cannot be opened because the disk is full, the child must still start."""
    try:
        return path.open("ab")
    except OSError:
        return open(os.devnull, "ab")


def _describe(code: int) -> str:
    if code >= 0:
        return f"exit status {code}"
    known = -code in set(signal.Signals)  # a real-time signal has no name
    return f"signal {signal.Signals(-code).name if known else -code}"
