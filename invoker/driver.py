"""What runs containers.  One file per implementation, one conformance suite over all of them (tests/conformance).

A container is a process tree behind a unix socket that speaks the container contract.  Every call is bounded by
``deadline_s`` and idempotent by ``container_id``; what is created is written down where a restarted invoker finds it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Spec:
    """``labels`` come back from :meth:`Driver.list_owned`; ``share`` is the part of the host's cores it may use."""

    container_id: str
    kind: str
    env: Mapping[str, str] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)
    share: float = 1.0
    fork: bool = False  # from the kind's stem cell, when the driver shares one (a zygote)


@dataclass(frozen=True, slots=True)
class Handle:
    """``start_ticks`` (since boot) tells the process from another that got its pid later."""

    container_id: str
    kind: str
    directory: Path
    pid: int = 0
    start_ticks: int = 0

    @property
    def socket_path(self) -> str:
        return str(self.directory / "s")

    @property
    def stdout(self) -> Path:
        return self.directory / "stdout.log"

    @property
    def stderr(self) -> Path:
        return self.directory / "stderr.log"


@dataclass(frozen=True, slots=True)
class Exit:
    """``status`` is the exit status, minus the signal, or None where only the end was seen (an adopted process)."""

    container_id: str
    status: int | None

    @property
    def killed(self) -> bool:
        return self.status == -9


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
    """``cursor`` is where the next call goes on."""

    data: bytes
    cursor: int


class Driver(Protocol):
    name: str
    share: str  # "enforced" | "none"

    def on_exit(self, callback: Callable[[Exit], None]) -> None:
        """``callback`` is called once per ended container, on a thread of the driver's that it may not block."""

    def create(self, spec: Spec) -> Handle: ...

    def start(self, handle: Handle, spec: Spec) -> Handle:
        """The same handle with its process.  Raises PlatformError."""
        ...

    def connect(self, handle: Handle, *, deadline_s: float) -> str:
        """The path of the container's socket, once it takes connections.  Raises InitFailed when the process ends
        first, PlatformError at the deadline."""
        ...

    def relabel(self, handle: Handle, labels: Mapping[str, str]) -> None: ...

    def pause(self, handle: Handle) -> None: ...

    def unpause(self, handle: Handle) -> None: ...

    def stop(self, handle: Handle, *, deadline_s: float) -> None:
        """Ask it to end; kill what is left of its process tree at the deadline.  Its logs stay until ``remove``."""

    def remove(self, handle: Handle) -> None: ...

    def logs(self, handle: Handle, stream: str, cursor: int) -> LogChunk: ...

    def stats(self, handle: Handle) -> Stats: ...

    def list_owned(self) -> Sequence[Owned]: ...

    def close(self) -> None: ...
