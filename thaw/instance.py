"""A container that holds one action: its record in the registry and its states.

::

    STARTING ──ready──▶ READY ──drain──▶ DRAINING ──▶ GONE
        │                 ▲──undrain───────┘            ▲
        └───failed / killed / host lost─────────────────┘

A STARTING instance is never reaped while it makes progress.  A READY instance accepts requests.  A DRAINING instance
finishes the requests that it has; where a host is emptied (``drained``), gateways move an LLM's requests elsewhere, and
it may be taken back.  The container pool of the invoker has its own, finer states (stem cell, paused, …):
invoker/containers/instance.py.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from thaw.errors import ErrorInfo
from thaw.ids import ActionName, GroupId, HostId, InstanceId


class InstanceState(enum.StrEnum):
    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    GONE = "gone"


class StartMode(enum.StrEnum):
    COLD = "cold"
    PREWARMED = "prewarmed"
    WARM = "warm"


@dataclass(frozen=True, slots=True)
class InstanceRecord:
    """The record that gateways use for routing and that the scheduler counts.  Only the invoker writes it."""

    instance_id: InstanceId
    host_id: HostId
    action: ActionName
    action_version: str
    group_id: GroupId
    state: InstanceState
    address: str  # host:port of the invoker's data port
    slots: int  # how many requests the instance takes at once
    reserve_bytes: int
    device: str
    start_mode: StartMode
    inflight: int = 0  # kept up to date while the instance is DRAINING; at other times as of the last change
    created_wall_ms: int = 0
    idle_since_wall_ms: int | None = None  # None while busy or starting
    init_ms: int = 0
    error: ErrorInfo | None = None  # the reason why the instance is GONE, if it failed
    keep_alive_s: float = 300.0
    stage: int = 0  # its stage in the group; requests go to stage 0, which reaches the others through the relay server
    n_stages: int = 1
    drained: bool = False  # it is DRAINING because a host that it needs is being emptied
    is_consolidating: bool = False  # a stage of a pipeline that is becoming a worker; then n_stages is 1, and stage 0
    model_version: str = ""  # the running model's (ModelFacts.version); empty for an ordinary function

    @property
    def takes_requests(self) -> bool:
        return self.stage == 0
