"""The messages between components: frozen dataclasses, JSON by thaw.wire, each inside a control frame.

There are four conversations: events (one stream that all components read), commands (scheduler → one host), fetchd's
control socket and descriptor sockets, and a container's ``/init`` and ``/run``.  A message travels as
``{"t": <type>, …fields}``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from relay.protocol.fetch_messages import (
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
from thaw.config import LlmConfig
from thaw.errors import ErrorInfo, ProtocolError
from thaw.ids import ActionName, ActivationId, CommandId, GatewayId, GroupId, HostId, InstanceId, Namespace
from thaw.instance import InstanceRecord, StartMode
from thaw.model import ModelFacts
from thaw.plan import Plan, StageRole
from thaw.trace import TraceEvent

# ── events: the stream thaw:events ────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class DemandAdded:
    """A gateway holds a request (or a 202) that no route can take.  Also kept in the hash thaw:demand.

    ``waited_ms`` is the request's age by its gateway's own clock when the message was made; a request that was served
    and lost its worker is not new.  ``queued_wall_ms`` is when it came, for a reader of the hash long afterwards.
    """

    activation_id: ActivationId
    action: ActionName
    namespace: Namespace
    gateway: GatewayId
    queued_wall_ms: int
    waited_ms: int = 0


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
class StartFailed:
    """Scheduler → gateways: these held activations end with this error; other demand of the action goes on."""

    action: ActionName
    activation_ids: tuple[ActivationId, ...]
    error: ErrorInfo
    group_id: GroupId


@dataclass(frozen=True, slots=True)
class ModelInspected:
    uri: str
    host_id: HostId
    facts: ModelFacts | None
    error: ErrorInfo | None = None


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


# ── commands: the stream thaw:commands:<host> ─────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class InspectModel:
    uri: str


@dataclass(frozen=True, slots=True)
class Start:
    """Fetch (first) and start a stage's container.

    The scheduler chooses ``instance_id``, so that the host recognises a repeated command.
    """

    plan: Plan
    stage: int
    instance_id: InstanceId
    activation_ids: tuple[ActivationId, ...] = ()  # the demand that the start serves: their traces link to the group


@dataclass(frozen=True, slots=True)
class Cancel:
    """Stop a group's fetches and starting containers."""

    group_id: GroupId


@dataclass(frozen=True, slots=True)
class Release:
    """Drain and remove an instance.  With ``only_idle`` it is refused while a request is in flight."""

    instance_id: InstanceId
    only_idle: bool = True


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


CommandBody = InspectModel | Start | Cancel | Release | Consolidate | SetStemCells


@dataclass(frozen=True, slots=True)
class Command:
    """``epoch`` is the scheduler's fencing token: an older one is refused by the invoker and by fetchd."""

    command_id: CommandId
    epoch: int
    sent_wall_ns: int
    body: CommandBody


# ── a container: /init and /run ───────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class GroupCredential:
    """Gives a stage access to its group's part of the relay server, and to nothing else.  It ends with the group."""

    username: str
    secret: str


@dataclass(frozen=True, slots=True)
class GroupLink:
    """How the stages of a group reach one another.

    ``kind`` names a transport (relay/transports/registry.py).  ``address`` is where its ends meet: for ``object`` the
    URI of a store (``s3://…``, ``file://…``), for every other kind the URL of the relay server, without a credential.
    ``host_address`` is where a stage listens, if others may reach it.
    """

    kind: str
    address: str
    credential: GroupCredential
    host_address: str = ""


@dataclass(frozen=True, slots=True)
class StageShape:
    """Every stage knows this of every other, so that all compute the same number of KV blocks without asking.

    ``weight_bytes`` counts all weights that the stage will hold.  A full stage has the KV cache of every layer.
    """

    layers: tuple[int, int]
    reserve_bytes: int
    weight_bytes: int
    role: StageRole = StageRole.LOW


@dataclass(frozen=True, slots=True)
class LlmInit:
    """The value of ``/init`` for kind llm:vllm: one stage of a plan.

    ``link`` and ``stages`` are None and () for a plan of one stage.
    """

    action: ActionName
    group_id: GroupId
    stage: int
    n_stages: int
    layers: tuple[int, int]
    config: LlmConfig
    reserve_bytes: int
    share: float
    n_threads: int
    host: HostId
    role: StageRole = StageRole.FULL
    link: GroupLink | None = None
    stages: tuple[StageShape, ...] = ()


@dataclass(frozen=True, slots=True)
class InitReply:
    ok: bool
    events: tuple[TraceEvent, ...] = ()
    memory: Mapping[str, int] = field(default_factory=dict)
    error: ErrorInfo | None = None


@dataclass(frozen=True, slots=True)
class ConsolidateReply:
    """The answer to ``POST /consolidate``, and to ``GET /consolidate`` later: stage 0 has become one worker.

    ``tail_bytes`` of the copied ``n_bytes`` of KV blocks were in the last round, while no step was scheduled.
    """

    rounds: int
    n_bytes: int
    tail_bytes: int
    wait_s: float  # until the model was whole
    stall_s: float  # from the last step of the pipeline to the first of the whole worker
    events: tuple[TraceEvent, ...] = ()


@dataclass(frozen=True, slots=True)
class LlmResume:
    """Continue an answer: these tokens were already delivered; the next token's number follows the last of them."""

    output_token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class LlmRun:
    endpoint: str  # "chat" | "completions"
    body: Mapping[str, Any]  # validated OpenAI JSON
    seed: int
    resume: LlmResume | None = None


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    token: str
    logprob: float
    top: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True, slots=True)
class RunToken:
    """``index`` counts from 0 per activation: a consumer drops one it has seen and fails on a gap.

    ``text`` may be empty: bytes of an unfinished character, or held back because a stop string may be starting.
    """

    index: int
    token_id: int
    text: str
    logprob: TokenLogprob | None = None


@dataclass(frozen=True, slots=True)
class RunFinished:
    reason: str  # "stop" | "length"
    prompt_tokens: int
    completion_tokens: int
    text: str = ""  # the text that was held back
    events: tuple[TraceEvent, ...] = ()


@dataclass(frozen=True, slots=True)
class RunFailed:
    error: ErrorInfo


# ── an invoker's data port ────────────────────────────────────────────────────────────────────────────────────────


ACTIVATION_HEADER: Final = "x-thaw-activation-id"
"""A header of ``POST /instances/{id}/run``, because an invoker does not read the body."""


@dataclass(frozen=True, slots=True)
class RunRef:
    instance_id: InstanceId
    activation_id: ActivationId


@dataclass(frozen=True, slots=True)
class LogsWanted:
    """``POST /logs``: ask for the logs of runs that have ended here, many at once: a gateway asks after it answered."""

    runs: tuple[RunRef, ...]


@dataclass(frozen=True, slots=True)
class LogsFound:
    """The logs in the order of the request; None where the instance has left and its logs are gone."""

    logs: tuple[tuple[str, ...] | None, ...]


_TYPES: dict[str, type[Any]] = {
    cls.__name__: cls
    for cls in (
        DemandAdded,
        DemandRemoved,
        InstanceChanged,
        ActionChanged,
        StartFailed,
        ModelInspected,
        CommandRefused,
        ConsolidationFailed,
        HostChanged,
        InspectModel,
        Start,
        Cancel,
        Release,
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
        Done,
        Refused,
        SegmentWanted,
        SegmentOffer,
        MoreSlabs,
        RunToken,
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
    "StartMode",
    "from_plain",
    "to_plain",
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
    *_TYPES,
]
