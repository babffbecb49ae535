"""The Protocol of a container driver.  One folder per implementation, one conformance suite over all of them
(tests/conformance).

A container is a process tree behind a unix socket that speaks the container contract.  ``deadline_s`` bounds a call,
and a call that is repeated for the same ``container_id`` changes nothing.  A driver writes down what it creates, so
that a restarted invoker finds it.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Protocol

from invoker.settings import InvokerSettings
from thaw.errors import InitFailed
from thaw.logs import Log

CONTRACT: Final = "1"
"""Names how an invoker and a container speak, and what the labels say (docs/formats/owned-container.md).  With another
number, this invoker can end the container, and do nothing else with it."""


@dataclass(frozen=True, slots=True)
class Spec:
    """The container that a driver is asked for.

    :meth:`Driver.list_owned` gives ``labels`` back.  ``share`` is the part of the host's cores that it may use, and
    ``memory_bytes`` the memory that it may use, where the driver can bound it (0: the driver's default).
    ``descriptor_socket`` is the path of its own socket to fetchd, ``device`` the accelerator that it may use.
    """

    container_id: str
    kind: str
    env: Mapping[str, str] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)
    share: float = 1.0
    fork: bool = False  # from the kind's stem cell, when the driver shares one (a zygote)
    memory_bytes: int = 0
    descriptor_socket: str = ""
    device: str = "cpu"
    image: str = ""  # the user's own image, by digest; empty: the kind's


@dataclass(frozen=True, slots=True)
class Handle:
    """``start_ticks`` (since boot) tells the process from a later one with the same pid.  ``image_pull_s``: the seconds
    in which an image was pulled that the host did not have; the handle that ``connect`` returns says it."""

    container_id: str
    kind: str
    directory: Path
    pid: int = 0
    start_ticks: int = 0
    socket: str = ""  # where it is not the directory's own
    image_pull_s: float = 0.0

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
    """How a container ended.

    ``status`` is the exit status, the negative number of the signal, or None where the driver saw only that the process
    is gone (an adopted one).  ``reason`` is a further cause that the driver knows, empty for most ends.
    """

    container_id: str
    status: int | None
    reason: str = ""
    out_of_memory: bool = False

    @property
    def killed(self) -> bool:
        return self.status == -9


def status_of(exit_code: int | None) -> int | None:
    """``128 + signal``, as a shell says it, becomes minus the signal; a container whose engine or function was killed
    ends like this, too.  A larger number belongs to no signal: a program that exits with -1 has the status 255."""
    return 128 - exit_code if exit_code is not None and 128 < exit_code < 128 + signal.NSIG else exit_code


@dataclass(frozen=True, slots=True)
class Owned:
    """``is_current``: the driver knows that it would make such a container from the same image today."""

    handle: Handle
    labels: Mapping[str, str]
    alive: bool
    is_current: bool = False


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
        """In how many seconds the process that is importing will probably be ready; None: none is importing."""
        ...

    def wait_warm(self, deadline_s: float) -> None:
        """Wait until the process that is importing is ready or gone; return at once when there is none."""
        ...

    def want(self, on_ready: Callable[[], None]) -> None:
        """Keep such a process, and start another whenever it dies.  Returns at once; ``on_ready`` is called each time
        that one is ready."""
        ...

    def give_up(self) -> None: ...


class PinImages(Protocol):
    def __call__(self, image: str, *, deadline_s: float) -> str:
        """The image by its digest; what has been pulled to find it out is on this host afterwards.  Raises InitFailed
        when it cannot be pulled, Unavailable."""
        ...


def no_images(image: str, *, deadline_s: float) -> str:
    raise InitFailed("This host runs no images of users.", hint="hosts with THAW_DRIVER=docker or kubernetes run them")


class Driver(Protocol):
    """``zygote`` is the shared stem cell of llm kinds.  Without one, each stem cell is a container of its own.
    ``whole_devices``: an llm container has its accelerator to itself; one that waited would keep it from all others."""

    name: str
    share: str  # "enforced" | "none"
    whole_devices: bool

    @property
    def pin(self) -> PinImages: ...

    @property
    def zygote(self) -> SharedCell | None: ...

    def reachable(self) -> bool:
        """False while its container engine is away, so that nothing can be started, ended or removed."""
        ...

    def on_exit(self, callback: Callable[[Exit], None]) -> None:
        """Call ``callback`` once for each container that has ended.  It runs on a thread of the driver and must not
        block it."""

    def create(self, spec: Spec) -> Handle: ...

    def start(self, handle: Handle, spec: Spec) -> Handle:
        """The same handle, with the process that was started.  Raises PlatformError."""
        ...

    def connect(self, handle: Handle, *, deadline_s: float) -> Handle:
        """Wait until the container's socket takes connections.  The same handle, with the process that answers, which a
        driver may not know before.  Raises WorkerLost when the process ends first, PlatformError at the deadline."""
        ...

    def claim(self, handle: Handle) -> bool:
        """Take a stem cell for an instance, before anything is done with it.  False when an invoker that replaces this
        one was first: then nothing of it is this driver's any more.  Raises WorkerLost when the cell is no more (the
        caller removes what is left of it), PlatformError."""
        ...

    def relabel(self, handle: Handle, labels: Mapping[str, str]) -> None: ...

    def limit(self, handle: Handle, share: float, memory_bytes: int) -> None:
        """Bound a stem cell, which was started before its limits were known.  Raises PlatformError."""
        ...

    def relay_address(self, address: str) -> str:
        """The URL at which a container of this host finds the relay server that is at ``address`` for the host.  Raises
        PlatformError."""
        ...

    def pause(self, handle: Handle) -> None: ...

    def unpause(self, handle: Handle) -> None: ...

    def stop(self, handle: Handle, *, deadline_s: float) -> None:
        """Ask it to end, and kill the rest of its process tree at the deadline.  Its logs stay until ``remove``."""

    def remove(self, handle: Handle) -> None: ...

    def logs(self, handle: Handle, stream: str, cursor: int) -> LogChunk: ...

    def more_logs(self, handle: Handle, cursors: tuple[int, int], deadline_s: float) -> bool:
        """Wait for output beyond the cursors of stdout and stderr; False when no more is on its way."""
        ...

    def truncate_logs(self, handle: Handle, stream: str) -> None:
        """Free the disk space of a stream's log.  Writers append, so they go on at the new end."""
        ...

    def stats(self, handle: Handle) -> Stats: ...

    def list_owned(self) -> Sequence[Owned]: ...

    def take_over(self, owned: Owned) -> bool:
        """Make an instance of an earlier invoker this one's alone, before it is adopted.  False when that invoker still
        lives: then nothing of it may be used here.  Raises PlatformError."""
        ...

    def adopt(self, owned: Owned) -> None:
        """Report the exit of a container of an earlier invoker from now on; its logs begin here, too."""
        ...

    def end(self, owned: Sequence[Owned]) -> Sequence[Owned]:
        """End containers of an earlier invoker that were not adopted.  Returns when nothing of them is left, or after a
        bounded time; containers that could not be ended by then are logged.  Those that belong to another living
        invoker are left to it; the others are returned."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class DriverContext:
    """The arguments for making a driver.  ``run_dir`` exists, and no other host uses it.  A driver calls ``cut_off``
    when only a new invoker process can reach its engine again."""

    settings: InvokerSettings
    run_dir: Path
    log: Log
    cut_off: Callable[[], None] = lambda: None


MakeDriver = Callable[[DriverContext], Driver]
"""Raises SettingError for settings that the driver cannot use, PlatformError when its engine cannot be used."""
