"""Plan v1, from the scheduler to the hosts: which host fetches which bytes by when.  See docs/formats/plan.md.

A plan holds deadlines as remaining milliseconds beside ``created_wall_ns``, never as an absolute time of another clock.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from thaw.ids import ActionName, GroupId, HostId, PlanId
from thaw.model import FileRange
from thaw.tracing.bound import Term

PLAN_VERSION = 1


class StageRole(enum.StrEnum):
    FULL = "full"  # reserves memory for the whole model; may outlive the group
    LOW = "low"  # reserves 1/s of that memory; released at consolidation


class TransportKind(enum.StrEnum):
    """Thaw's own transports.  A plan may name another one, which a package has added (docs/extending.md)."""

    NONE = "none"  # one stage: nothing to carry
    REDIS = "redis"
    OBJECT = "object"
    TCP = "tcp"


@dataclass(frozen=True, slots=True)
class PlanModel:
    """One version of a model; ``uri`` is where its files are."""

    uri: str
    sha256: str
    etag: str
    n_bytes: int

    @property
    def version(self) -> str:
        return self.sha256 or self.etag


@dataclass(frozen=True, slots=True)
class PlanTransport:
    """``kind`` is a TransportKind or the name of a transport that a package has added."""

    kind: str = TransportKind.NONE
    address: str = ""
    credential_ref: str = ""


@dataclass(frozen=True, slots=True)
class PlanStage:
    """One container.  ``layers`` is the half-open interval [a, b); ranges are in load order."""

    stage: int
    host: HostId
    device: str
    role: StageRole
    layers: tuple[int, int]
    first_ranges: tuple[FileRange, ...]
    later_ranges: tuple[FileRange, ...] = ()
    reserve_bytes: int = 0
    share: float = 1.0
    fetch_deadline_ms: int | None = None
    pace_bytes_per_s: int | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    version: int
    plan_id: PlanId
    group_id: GroupId
    epoch: int
    action: ActionName
    action_version: str
    stages: tuple[PlanStage, ...]
    model: PlanModel | None = None  # None: an ordinary function
    transport: PlanTransport = PlanTransport()
    keep: int = 1  # how many of the first stages become workers; 0: it stays a pipeline
    created_wall_ns: int = 0
    predicted_ttft_s: float | None = None
    bound_ttft_s: float | None = None
    predicted_terms: tuple[Term, ...] = ()
    bound_terms: tuple[Term, ...] = ()
