"""The messages between components: frozen dataclasses, JSON by thaw.wire, each inside a control frame.

There are four conversations: events (one stream that all components read), commands (scheduler → one host), fetchd's
control socket and descriptor sockets, and a container's ``/init`` and ``/run``.  A message travels as
``{"t": <type>, …fields}``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from relay.protocol.container_messages import (
    EMBEDDINGS,
    MAX_RUN_MESSAGE_BYTES,
    TEXT_ENDPOINTS,
    CallDelta,
    ConsolidateReply,
    GroupCredential,
    GroupLink,
    InitReply,
    LlmInit,
    LlmResume,
    LlmRun,
    PreflightReply,
    RankedToken,
    RunFailed,
    RunFinished,
    RunHead,
    RunPart,
    RunPrompt,
    RunToken,
    RunVectors,
    StageShape,
    TokenLogprob,
)
from relay.protocol.fetch_messages import (
    FILE_READER,
    DigestsFound,
    DigestsWanted,
    Done,
    DoorClose,
    DoorGrant,
    DoorList,
    DoorOpen,
    DoorOpened,
    Doors,
    FetchCancel,
    FetchDone,
    FetchStart,
    FetchStarted,
    FetchStatus,
    FetchWait,
    Inspect,
    Inspected,
    MetricsPage,
    MetricsQuery,
    MoreSlabs,
    PlacedRange,
    PoolChanged,
    PoolWatch,
    Refused,
    SegmentOffer,
    SegmentStatus,
    SegmentWanted,
    Status,
    StatusQuery,
)
from thaw import wire
from thaw.errors import ErrorInfo, ProtocolError
from thaw.ids import ActionName, ActivationId, CommandId, GatewayId, GroupId, HostId, InstanceId, Namespace
from thaw.instance import InstanceRecord, StartMode
from thaw.model import ModelFacts
from thaw.plan import Plan

# ── events: the stream thaw:events ────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class DemandAdded:
    """A gateway holds a request (or a 202) that no route can take.  Also kept in the hash thaw:demand.

    ``waited_ms`` is the request's age by its gateway's own clock when the message was made; a request that was served
    and lost its worker is not new.  ``queued_wall_ms`` is when it came, for a reader of the hash long afterwards.
    ``ahead``: a 202 that waits only for a thread, so it does not count towards the quota of waiting requests.
    ``adapter``: the URI of the adapter that the request needs.
    """

    activation_id: ActivationId
    action: ActionName
    namespace: Namespace
    gateway: GatewayId
    queued_wall_ms: int
    waited_ms: int = 0
    ahead: bool = False
    adapter: str = ""


@dataclass(frozen=True, slots=True)
class DemandRemoved:
    activation_id: ActivationId
    action: ActionName


@dataclass(frozen=True, slots=True)
class InstanceChanged:
    """The owning invoker's report on one instance.  GONE with ``error`` is a failed start or a lost worker."""

    instance: InstanceRecord


@dataclass(frozen=True, slots=True)
class ActionChanged:
    action: ActionName
    deleted: bool = False


@dataclass(frozen=True, slots=True)
class PackageChanged:
    """Gateway → gateways: the package was written or deleted, so its actions have other parameters."""

    namespace: Namespace
    package: str


@dataclass(frozen=True, slots=True)
class ModelsAllowedChanged:
    """Gateway → schedulers: the prefixes of models that the namespace may run have changed."""

    namespace: Namespace


@dataclass(frozen=True, slots=True)
class QuotasChanged:
    """Gateway → gateways and schedulers: an operator changed the namespace's quotas or its weight."""

    namespace: Namespace


@dataclass(frozen=True, slots=True)
class StartFailed:
    """Scheduler → gateways: these held activations end with this error; other demand of the action goes on."""

    action: ActionName
    activation_ids: tuple[ActivationId, ...]
    error: ErrorInfo
    group_id: GroupId


@dataclass(frozen=True, slots=True)
class ColdStarted:
    """Gateway → gateways: a request that waited for a start has its first token (relay/state/starts.py has its
    times)."""

    action: ActionName


@dataclass(frozen=True, slots=True)
class ModelInspected:
    """``unchanged_version``: the version that the question named is still the current one, so its facts are not
    repeated.  ``command_id``: the id of the question.  An answer to an earlier question may be out of date.
    ``took_s``: seconds that the inspection took on the host, by its own clock, without the way of the command and of
    the answer."""

    uri: str
    host_id: HostId
    facts: ModelFacts | None
    error: ErrorInfo | None = None
    unchanged_version: str = ""
    command_id: CommandId | None = None
    took_s: float = 0.0


@dataclass(frozen=True, slots=True)
class CommandRefused:
    """A host could not carry a command out (stale epoch, no memory …); a failed start is an InstanceChanged."""

    command_id: CommandId
    host_id: HostId
    group_id: GroupId
    error: ErrorInfo


@dataclass(frozen=True, slots=True)
class ConsolidationFailed:
    """The owning invoker's report: this group is still a pipeline, which answers as before.  Success is an
    InstanceChanged of one stage."""

    instance_id: InstanceId
    host_id: HostId
    group_id: GroupId
    error: ErrorInfo


@dataclass(frozen=True, slots=True)
class HostChanged:
    """A host joined, left (drain or shutdown), was drained or undrained, or has more room for models than reported."""

    host_id: HostId
    present: bool


@dataclass(frozen=True, slots=True)
class StreamWanted:
    """Gateway → gateway: hand a stream over to ``gateway``, whose client goes on with it.  The answer is a list in the
    state server (relay/state/streams.py)."""

    activation_id: ActivationId
    home: GatewayId
    gateway: GatewayId
    answer_id: str


# ── commands: the stream thaw:commands:<host> ─────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class InspectModel:
    """``known_uri`` and ``known_version`` say what the scheduler knows already; a host need not repeat it.
    ``namespaces``: the namespaces that have an action of the model."""

    uri: str
    known_uri: str = ""
    known_version: str = ""
    namespaces: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Start:
    """Fetch (first) and start a stage's container.

    The scheduler chooses ``instance_id``, so that the host recognises a repeated command.
    """

    plan: Plan
    stage: int
    instance_id: InstanceId
    activation_ids: tuple[ActivationId, ...] = ()  # the demand that the start serves: their traces link to the group
    adapters: tuple[str, ...] = ()  # that this demand wants: the host fetches their bytes meanwhile


@dataclass(frozen=True, slots=True)
class Cancel:
    """Stop a group's fetches and starting containers."""

    group_id: GroupId


@dataclass(frozen=True, slots=True)
class Release:
    """Drain and remove an instance.  With ``only_idle`` it is refused while a request is in flight.  ``drained``: a
    host is being emptied, so gateways shall move the requests that run."""

    instance_id: InstanceId
    only_idle: bool = True
    drained: bool = False


@dataclass(frozen=True, slots=True)
class Undrain:
    """The host is not emptied after all: an instance that still drains takes requests again."""

    instance_id: InstanceId


@dataclass(frozen=True, slots=True)
class Consolidate:
    """Let stage 0 of a pipeline become one worker while the group answers."""

    instance_id: InstanceId
    group_id: GroupId


@dataclass(frozen=True, slots=True)
class SetStemCells:
    """How many idle stem cells of ``kind`` the host keeps."""

    kind: str
    count: int


CommandBody = InspectModel | Start | Cancel | Release | Undrain | Consolidate | SetStemCells


@dataclass(frozen=True, slots=True)
class Command:
    """``epoch`` is the scheduler's fencing token: an older one is refused by the invoker and by fetchd."""

    command_id: CommandId
    epoch: int
    sent_wall_ns: int
    body: CommandBody


# ── an invoker's data port ────────────────────────────────────────────────────────────────────────────────────────


ACTIVATION_HEADER: Final = "x-thaw-activation-id"
"""A header of ``POST /instances/{id}/run``, because an invoker does not read the body."""


_TYPES: dict[str, type[Any]] = {
    cls.__name__: cls
    for cls in (
        DemandAdded,
        DemandRemoved,
        InstanceChanged,
        ActionChanged,
        PackageChanged,
        ModelsAllowedChanged,
        QuotasChanged,
        StartFailed,
        ColdStarted,
        ModelInspected,
        CommandRefused,
        ConsolidationFailed,
        HostChanged,
        StreamWanted,
        InspectModel,
        Start,
        Cancel,
        Release,
        Undrain,
        Consolidate,
        SetStemCells,
        Command,
        Inspect,
        Inspected,
        FetchStart,
        FetchStarted,
        FetchWait,
        FetchDone,
        FetchCancel,
        DoorOpen,
        DoorOpened,
        DoorGrant,
        DoorClose,
        DoorList,
        Doors,
        StatusQuery,
        Status,
        PoolWatch,
        PoolChanged,
        MetricsQuery,
        MetricsPage,
        DigestsWanted,
        DigestsFound,
        Done,
        Refused,
        SegmentWanted,
        SegmentOffer,
        MoreSlabs,
        RunToken,
        RunVectors,
        RunHead,
        RunPart,
        RunFinished,
        RunFailed,
    )
}


def to_plain(message: Any) -> dict[str, Any]:
    """``{"t": type, …fields}``; a command's body is tagged too."""
    plain: dict[str, Any] = {"t": type(message).__name__, **wire.to_plain(message)}
    if isinstance(message, Command):
        plain["body"] = to_plain(message.body)
    return plain


def from_plain(plain: Any) -> Any:
    """Read a message from a tagged object.  Raises ProtocolError for an unknown tag or a bad field."""
    if not isinstance(plain, dict) or plain.get("t") not in _TYPES:
        raise ProtocolError(f"not a known message: {plain!r:.80}")
    cls = _TYPES[plain["t"]]
    if cls is Command:
        body = from_plain(plain.get("body"))
        return Command(CommandId(plain["command_id"]), int(plain["epoch"]), int(plain["sent_wall_ns"]), body)
    return wire.from_plain(cls, plain)


__all__ = [
    "CallDelta",
    "StartMode",
    "from_plain",
    "to_plain",
    "EMBEDDINGS",
    "FILE_READER",
    "DigestsFound",
    "DigestsWanted",
    "TEXT_ENDPOINTS",
    "Done",
    "DoorClose",
    "DoorGrant",
    "DoorList",
    "DoorOpen",
    "DoorOpened",
    "Doors",
    "FetchCancel",
    "FetchDone",
    "FetchStart",
    "FetchStarted",
    "FetchStatus",
    "FetchWait",
    "Inspect",
    "Inspected",
    "MetricsPage",
    "MetricsQuery",
    "MoreSlabs",
    "PlacedRange",
    "PoolChanged",
    "PoolWatch",
    "Refused",
    "SegmentOffer",
    "SegmentStatus",
    "SegmentWanted",
    "Status",
    "StatusQuery",
    "GroupCredential",
    "GroupLink",
    "StageShape",
    "LlmInit",
    "InitReply",
    "PreflightReply",
    "ConsolidateReply",
    "LlmResume",
    "LlmRun",
    "TokenLogprob",
    "MAX_RUN_MESSAGE_BYTES",
    "RunToken",
    "RunFinished",
    "RankedToken",
    "RunPrompt",
    "RunFailed",
    "RunHead",
    "RunPart",
    "RunVectors",
    *_TYPES,
]
