"""The Protocol of a container driver.  One folder per implementation, one conformance suite over all of them
(tests/conformance).

A container is a process tree behind a unix socket that speaks the container contract.  Every call is bounded by
``deadline_s`` and idempotent by ``container_id``; every container is recorded where a restarted invoker finds it.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from invoker.settings import InvokerSettings
from thaw.logs import Log


@dataclass(frozen=True, slots=True)
class Spec:
    """``labels`` come back from :meth:`Driver.list_owned`; ``share`` is the part of the host's cores it may use.

    ``memory_bytes`` bounds all that it uses, where the driver can (0: the driver's default); ``door`` is the path of
    its own socket to fetchd; ``device`` the accelerator it may use.
    """

    container_id: str
    kind: str
    env: Mapping[str, str] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)
    share: float = 1.0
    fork: bool = False  # from the kind's stem cell, when the driver shares one (a zygote)
    memory_bytes: int = 0
    door: str = ""
    device: str = "cpu"


@dataclass(frozen=True, slots=True)
class Handle:
    """``start_ticks`` (since boot) tells the process from another that got its pid later."""

    container_id: str
    kind: str
    directory: Path
    pid: int = 0
    start_ticks: int = 0
    socket: str = ""  # where it is not the directory's own

    @property
    def socket_path(self) -> str:
        return self.socket or str(self.directory / "s")

    @property
    def stdout(self) -> Path:
        return self.directory / "stdout.log"

    @property
    def stderr(self) -> Path:
        return self.directory / "stderr.log"


@dataclass(frozen=True, slots=True)
class Exit:
    """``status`` is the exit status, minus the signal, or None where only the end was seen (an adopted process).

    ``reason`` is further knowledge of the driver, empty for most ends.
    """

    container_id: str
    status: int | None
    reason: str = ""

    @property
    def killed(self) -> bool:
        return self.status == -9


def status_of(exit_code: int | None) -> int | None:
    """Turn a shell's 128 + signal into minus the signal.  A container whose engine or function was killed ends so, too.
    Larger numbers stand for no signal: a program that exits with -1 has the status 255."""
    return 128 - exit_code if exit_code is not None and 128 < exit_code < 128 + signal.NSIG else exit_code


@dataclass(frozen=True, slots=True)
class Owned:
    handle: Handle
    labels: Mapping[str, str]
    alive: bool


@dataclass(frozen=True, slots=True)
class Stats:
    rss_bytes: int
    cpu_s: float


@dataclass(frozen=True, slots=True)
class LogChunk:
    """The next call goes on at ``cursor``."""

    data: bytes
    cursor: int


class SharedCell(Protocol):
    """One pre-imported process from which any number of llm containers is forked."""

    @property
    def ready(self) -> bool: ...

    @property
    def pid(self) -> int:
        """0 when there is none."""
        ...

    @property
    def ready_in_s(self) -> float | None:
        """Seconds in which the process that is importing will probably be ready; None: none is importing."""
        ...

    def wait_warm(self, deadline_s: float) -> None:
        """Return when a process that is importing is ready or gone; at once when there is none."""
        ...

    def want(self, on_ready: Callable[[], None]) -> None:
        """Start the process, and again whenever it dies; return at once.  Each time it is ready, call ``on_ready``."""
        ...

    def give_up(self) -> None: ...


class Driver(Protocol):
    """``zygote`` is the shared stem cell of llm kinds; without one each cell is a container of its own."""

    name: str
    share: str  # "enforced" | "none"

    @property
    def zygote(self) -> SharedCell | None: ...

    def reachable(self) -> bool:
        """False while its engine is away: nothing can be started, ended or removed then."""
        ...

    def on_exit(self, callback: Callable[[Exit], None]) -> None:
        """``callback`` is called once per ended container, on a thread of the driver, which it must not block."""

    def create(self, spec: Spec) -> Handle: ...

    def start(self, handle: Handle, spec: Spec) -> Handle:
        """The same handle with its process.  Raises PlatformError."""
        ...

    def connect(self, handle: Handle, *, deadline_s: float) -> str:
        """The path of the container's socket, once it takes connections.  Raises InitFailed when the process ends
        first, PlatformError at the deadline."""
        ...

    def relabel(self, handle: Handle, labels: Mapping[str, str]) -> None: ...

    def limit(self, handle: Handle, share: float, memory_bytes: int) -> None:
        """Bound a container that was started before its limits were known (a stem cell).  Raises PlatformError."""
        ...

    def relay_address(self, address: str) -> str:
        """The address at which a container of this host reaches the relay of URL ``address``.  Raises PlatformError."""
        ...

    def pause(self, handle: Handle) -> None: ...

    def unpause(self, handle: Handle) -> None: ...

    def stop(self, handle: Handle, *, deadline_s: float) -> None:
        """Ask it to end; kill what is left of its process tree at the deadline.  Its logs stay until ``remove``."""

    def remove(self, handle: Handle) -> None: ...

    def logs(self, handle: Handle, stream: str, cursor: int) -> LogChunk: ...

    def more_logs(self, handle: Handle, cursors: tuple[int, int], deadline_s: float) -> bool:
        """Wait for output beyond the cursors (stdout, stderr) that is on its way; False when there is none."""
        ...

    def truncate_logs(self, handle: Handle, stream: str) -> None:
        """Empty the file to free the disk.  Writers append, so they go on at the new end."""
        ...

    def stats(self, handle: Handle) -> Stats: ...

    def list_owned(self) -> Sequence[Owned]: ...

    def adopt(self, owned: Owned) -> None:
        """Take over a container of an earlier invoker; its exit is reported from now on."""
        ...

    def end(self, owned: Owned) -> None:
        """End a container of an earlier invoker that was not adopted; returns when nothing of it is left."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class DriverContext:
    """What a driver is made from.  ``run_dir`` exists, and no other host uses it.  A driver calls ``cut_off`` when only
    a new invoker process can reach its engine again."""

    settings: InvokerSettings
    run_dir: Path
    log: Log
    cut_off: Callable[[], None] = lambda: None


MakeDriver = Callable[[DriverContext], Driver]
"""Raises SettingError for settings that the driver cannot use, PlatformError when its engine cannot be used."""
