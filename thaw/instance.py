"""A container that holds one action: its record in the registry and its states.

::

    STARTING ──ready──▶ READY ──drain──▶ DRAINING ──▶ GONE
        └───failed / killed / host lost────────────────▶ GONE

A STARTING instance is never reaped while it makes progress.  A READY instance accepts requests.  A DRAINING instance
finishes the requests that it has.  The container pool of the invoker has its own, finer states (stem cell, paused, …):
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
    inflight: int = 0
    created_wall_ms: int = 0
    idle_since_wall_ms: int | None = None  # None while busy or starting
    init_ms: int = 0
    error: ErrorInfo | None = None  # the reason why the instance is GONE, if it failed
    keep_alive_s: float = 300.0
    stage: int = 0  # its stage in the group; requests go to stage 0, which reaches the others through the relay server
    n_stages: int = 1
    is_consolidating: bool = False  # stage 0 of a pipeline that is becoming one worker; then n_stages is 1
    model_version: str = ""  # of the model that runs (ModelFacts.version); empty for an ordinary function

    @property
    def takes_requests(self) -> bool:
        return self.stage == 0
