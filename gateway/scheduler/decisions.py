"""The decisions that the policy may make.  ``loop.py`` and ``effects.py`` carry them out; nothing here acts by
itself."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

from thaw.errors import ErrorInfo
from thaw.ids import ActionName, ActivationId, CommandId, GatewayId, GroupId, HostId, InstanceId
from thaw.instance import InstanceRecord, StartMode
from thaw.plan import Plan


@dataclass(frozen=True, slots=True)
class StageStart:
    stage: int
    host_id: HostId
    instance_id: InstanceId
    command_id: CommandId


@dataclass(frozen=True, slots=True)
class StartGroup:
    """Write the plan, then command each stage's host."""

    plan: Plan
    stages: tuple[StageStart, ...]
    activation_ids: tuple[ActivationId, ...]
    attrs: Mapping[str, object] = field(default_factory=dict)
    """The reasons, for the trace.  The plan has the prediction and the bound in terms."""


@dataclass(frozen=True, slots=True)
class ReleaseInstance:
    host_id: HostId
    instance_id: InstanceId
    command_id: CommandId
    only_idle: bool
    reason: str
    drained: bool = False  # because a host is emptied: running requests are to be moved


@dataclass(frozen=True, slots=True)
class UndrainInstance:
    """The host is not emptied after all: let the instance take requests again."""

    host_id: HostId
    instance_id: InstanceId
    command_id: CommandId


@dataclass(frozen=True, slots=True)
class ConsolidateInstance:
    """Let this stage 0 become one worker in place of its group, while the group answers; or let this later stage become
    another one, once stage 0 has."""

    host_id: HostId
    instance_id: InstanceId
    group_id: GroupId
    command_id: CommandId


@dataclass(frozen=True, slots=True)
class RewritePlan:
    """A group has become one worker: its plan has one stage from now on.  Carried out before its other stages are
    released, so that a successor scheduler does not wait for them."""

    plan: Plan


@dataclass(frozen=True, slots=True)
class PlanWorker:
    """A later stage outlives its pipeline: this is the plan of the worker that it becomes.  Carried out before the
    pipeline's plan is rewritten, so that a successor scheduler knows that the stage stays."""

    plan: Plan


@dataclass(frozen=True, slots=True)
class CancelGroup:
    host_id: HostId
    group_id: GroupId
    command_id: CommandId


@dataclass(frozen=True, slots=True)
class InspectModelOn:
    """``known_uri`` and ``known_version``: the facts that the scheduler has, if any."""

    host_id: HostId
    uri: str
    command_id: CommandId
    known_uri: str = ""
    known_version: str = ""
    namespaces: tuple[str, ...] = ()  # those with an action of the model


@dataclass(frozen=True, slots=True)
class KeepStemCells:
    """The host is to keep ``count`` idle stem cells of this kind."""

    host_id: HostId
    kind: str
    count: int
    command_id: CommandId


@dataclass(frozen=True, slots=True)
class FailDemand:
    """These held activations end with this error."""

    action: ActionName
    activation_ids: tuple[ActivationId, ...]
    error: ErrorInfo
    group_id: GroupId


@dataclass(frozen=True, slots=True)
class ForgetInstance:
    """The instance's host is lost or no longer has it: announce the instance GONE and remove it from the registry."""

    record: InstanceRecord


@dataclass(frozen=True, slots=True)
class DropDemand:
    """The request's gateway is dead or no longer holds it.  No client waits for an answer, unless another gateway has
    taken the request over."""

    action: ActionName
    activation_id: ActivationId
    gateway: GatewayId


@dataclass(frozen=True, slots=True)
class DropPlan:
    group_id: GroupId


@dataclass(frozen=True, slots=True)
class RevokeCredential:
    """The group has ended: the credential that let its stages into the relay server ends too."""

    group_id: GroupId


@dataclass(frozen=True, slots=True)
class Forget:
    """Actions were deleted: forget the times learned of them (keys of the history and of the best), and the models that
    no other action has."""

    learned: tuple[str, ...]
    model_uris: tuple[str, ...]
    best: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class LearnFrom:
    """A start has ended well: read its trace and give the measured times to the history."""

    group_id: GroupId
    action: ActionName
    device_kind: str
    mode: StartMode
    n_stages: int = 1
    n_full: int = 1
    factor: float | None = 1.0  # F, by what share of its device each worker has; None: devices of several kinds
    served: tuple[ActivationId, ...] = ()  # their own traces tell of prefill and tokens, once they have ended
    attempt: int = 0
    device_kinds: tuple[str, ...] = ()  # by stage; empty where it is not known


class TimerKind(enum.StrEnum):
    KEEP_ALIVE = "keep_alive"  # key: instance id
    RELEASE = "release"  # key: instance id; a release without an answer
    START = "start"  # key: group id
    RESCALE = "rescale"  # key: action
    INSPECT = "inspect"  # key: model uri
    CONSOLIDATE = "consolidate"  # key: group id
    KEPT = "kept"  # key: instance id of a stage that outlives its pipeline


@dataclass(frozen=True, slots=True)
class Wake:
    """Come back with Timer(kind, key) at ``at_s``.  A timer that is out of date by then does nothing."""

    at_s: float
    kind: TimerKind
    key: str


@dataclass(frozen=True, slots=True)
class Flag:
    """One line in the log: something was clamped, or is worth an operator's attention."""

    name: str
    fields: Mapping[str, object] = field(default_factory=dict)


Decision = (
    StartGroup
    | ReleaseInstance
    | UndrainInstance
    | ConsolidateInstance
    | RewritePlan
    | PlanWorker
    | CancelGroup
    | InspectModelOn
    | FailDemand
    | ForgetInstance
    | DropDemand
    | DropPlan
    | RevokeCredential
    | Forget
    | LearnFrom
    | Wake
    | Flag
    | KeepStemCells
)
