"""The running, starting and waiting work of a platform, as ``thaw top`` shows it."""

from __future__ import annotations

from dataclasses import dataclass

from thaw.ids import ActionName, HostId
from thaw.instance import InstanceState


@dataclass(frozen=True, slots=True)
class Worker:
    """One container.  Times are in milliseconds since 1970, by the clocks of the platform's machines."""

    action: ActionName
    version: str
    host: HostId
    device: str
    state: InstanceState
    slots: int
    stage: int = 0
    n_stages: int = 1
    created_ms: int = 0
    idle_since_ms: int | None = None  # None: it has a request, or is starting
    due_ms: int | None = None  # the predicted time of a start's first token; None: it has started, or no one knows


@dataclass(frozen=True, slots=True)
class Waiting:
    """An action's requests that wait for an instance."""

    action: ActionName
    n_requests: int
    oldest_ms: int


@dataclass(frozen=True, slots=True)
class Shared:
    """``functions`` are served by the instances of ``action``, their pool (thaw/pools.py)."""

    action: ActionName
    functions: tuple[ActionName, ...]


@dataclass(frozen=True, slots=True)
class Work:
    workers: tuple[Worker, ...] = ()
    waiting: tuple[Waiting, ...] = ()
    shared: tuple[Shared, ...] = ()
