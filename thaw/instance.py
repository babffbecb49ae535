"""A container that holds one action: its record in the registry and its states.

::

    STARTING ──ready──▶ READY ──drain──▶ DRAINING ──▶ GONE
        └───failed / killed / host lost────────────────▶ GONE

STARTING is never reaped while it makes progress; READY accepts requests; DRAINING finishes what it has.  The table
of the container pool (stem cell, paused, …) is the invoker's own and finer: invoker/containers/instance.py.
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
    """What gateways route by and the scheduler counts.  The invoker alone writes it."""

    instance_id: InstanceId
    host_id: HostId
    action: ActionName
    action_version: str
    group_id: GroupId
    state: InstanceState
    address: str  # host:port of the invoker's data port
    slots: int  # concurrent requests it takes
    reserve_bytes: int
    device: str
    start_mode: StartMode
    inflight: int = 0
    created_wall_ms: int = 0
    idle_since_wall_ms: int | None = None  # None while busy or starting
    init_ms: int = 0
    error: ErrorInfo | None = None  # why it is GONE, if it failed
    keep_alive_s: float = 300.0
    stage: int = 0  # of its group; requests go to stage 0, the others are reached through the relay
    n_stages: int = 1

    @property
    def takes_requests(self) -> bool:
        return self.stage == 0
