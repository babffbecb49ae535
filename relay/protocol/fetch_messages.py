"""The messages to fetchd: an invoker's on the control socket, a container's on its descriptor socket.  See messages.py.

A descriptor socket is called a door in the names of the messages, because they travel.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from thaw.errors import ErrorInfo
from thaw.ids import GroupId, InstanceId
from thaw.model import FileRange, ModelFacts, TensorInfo
from thaw.plan import PlanModel
from thaw.tracing.trace import TraceEvent

FILE_READER: Final = "files-"
"""The ids of descriptor sockets that a host's model port opens begin with this.  No container has such an id."""


# ── fetchd: the control socket ────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Inspect:
    """``namespaces``: the namespaces that have an action of the model.  Each may have a few inspections at once.  An
    ``adapter`` is refused if it does not fit ``base``, unless that is empty, or has a higher rank than ``max_rank``."""

    uri: str
    namespaces: tuple[str, ...] = ()
    adapter: bool = False
    base: str = ""
    max_rank: int = 0


@dataclass(frozen=True, slots=True)
class Inspected:
    facts: ModelFacts


@dataclass(frozen=True, slots=True)
class FetchStart:
    """Begin (or join) the fetch of ``ranges`` into a segment.  A repeat of (group_id, stage) fetches nothing twice; it
    changes pace, deadline, background and weight of the fetch that runs."""

    group_id: GroupId
    stage: int
    epoch: int
    model: PlanModel
    ranges: tuple[FileRange, ...]
    deadline_ms: int | None = None
    pace_bytes_per_s: int | None = None
    background: bool = False
    later_ranges: tuple[FileRange, ...] = ()  # behind ``ranges`` in the same segment, once those have come
    weight: float = 1.0  # relative to fetches of the same rank
    namespace: str = ""  # the action's; the number of fetches at once is limited for each
    spare: bool = False
    """A few small files: the segment has memory of its own, so it needs no room in the pool, and evicts nothing."""


@dataclass(frozen=True, slots=True)
class FetchStarted:
    segment_id: str
    n_bytes: int
    resident: bool  # every byte was already in host memory
    left_out_bytes: int = 0  # bytes of ``later_ranges`` for which the pool had no room: they will not come


@dataclass(frozen=True, slots=True)
class FetchWait:
    """Answered when every byte of ``ranges`` has come (later ones may follow): FetchDone, or Refused with the error."""

    group_id: GroupId
    stage: int


@dataclass(frozen=True, slots=True)
class FetchDone:
    segment_id: str
    n_bytes: int
    fetched_bytes: int  # from the store; 0 when resident
    events: tuple[TraceEvent, ...]


@dataclass(frozen=True, slots=True)
class FetchCancel:
    group_id: GroupId
    epoch: int


@dataclass(frozen=True, slots=True)
class DoorOpen:
    """Make the unix socket that is mounted into a container; it serves nothing until a grant."""

    instance_id: InstanceId


@dataclass(frozen=True, slots=True)
class DoorOpened:
    path: str


@dataclass(frozen=True, slots=True)
class DoorGrant:
    """The hold that the group's fetch has on the segment passes over to the descriptor socket."""

    instance_id: InstanceId
    segment_id: str
    group_id: str = ""  # empty: from an older invoker: its hold ends with the group, or after a while
    stage: int = 0


@dataclass(frozen=True, slots=True)
class DoorClose:
    """The container has ended: close its descriptor socket and drop its hold on the segment."""

    instance_id: InstanceId


@dataclass(frozen=True, slots=True)
class DoorList:
    """Which descriptor sockets are open (an invoker that came back closes those of instances that died meanwhile)."""


@dataclass(frozen=True, slots=True)
class Doors:
    instance_ids: tuple[InstanceId, ...]


@dataclass(frozen=True, slots=True)
class StatusQuery:
    pass


@dataclass(frozen=True, slots=True)
class FetchStatus:
    group_id: GroupId
    stage: int
    uri: str
    n_bytes: int  # the size of the part that the stage waits for
    done_bytes: int  # bytes of this part that have arrived
    bytes_per_s: float
    pending_bytes: int = 0  # bytes of this part that have not
    later_bytes: int = 0  # still to come of the later part, in the background
    left_out_bytes: int = 0  # bytes of the later part without room: the stage cannot become a whole worker


@dataclass(frozen=True, slots=True)
class SegmentStatus:
    segment_id: str
    uri: str
    n_bytes: int
    end: int
    holders: tuple[str, ...]
    version: str = ""  # the model's, as in SegmentKey
    key: str = ""  # the content's, made by relay/protocol/pool.py
    n_slabs: int = 0
    complete: bool = False


@dataclass(frozen=True, slots=True)
class Status:
    pool_bytes: int
    free_bytes: int
    segments: tuple[SegmentStatus, ...]
    fetches: tuple[FetchStatus, ...]
    link_bytes_per_s: float
    slab_bytes: int = 0


@dataclass(frozen=True, slots=True)
class PoolWatch:
    """Answered with PoolChanged as soon as a segment became complete or lost its last holder since ``version``, and
    after ``timeout_ms`` in any case.  The first request may give any version."""

    version: int
    timeout_ms: int


@dataclass(frozen=True, slots=True)
class PoolChanged:
    version: int


@dataclass(frozen=True, slots=True)
class MetricsQuery:
    pass


@dataclass(frozen=True, slots=True)
class MetricsPage:
    text: str  # Prometheus text


@dataclass(frozen=True, slots=True)
class DigestsWanted:
    """Asks for the digests of one file of a version that was inspected."""

    uri: str
    version: str
    file: str


@dataclass(frozen=True, slots=True)
class DigestsFound:
    chunks_blake3: tuple[str, ...]  # one per 8 MiB; empty for a model without an index


@dataclass(frozen=True, slots=True)
class Done:
    pass


@dataclass(frozen=True, slots=True)
class Refused:
    error: ErrorInfo


# ── fetchd: a container's descriptor socket ───────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class SegmentWanted:
    """The container asks; the answer comes when the invoker has granted a segment."""


@dataclass(frozen=True, slots=True)
class PlacedRange:
    """``[offset, offset + n_bytes)`` of ``file`` lies at ``segment_offset`` (4096-aligned)."""

    file: str
    offset: int
    n_bytes: int
    segment_offset: int


@dataclass(frozen=True, slots=True)
class SegmentOffer:
    """Comes with descriptors: the control page first, then the slabs in order (several messages beyond 200)."""

    segment_id: str
    n_bytes: int
    slab_bytes: int
    n_slabs: int
    layout: tuple[PlacedRange, ...]
    tensors: tuple[TensorInfo, ...]  # those that lie wholly inside the layout, in order of their place in it
    first_bytes: int = 0  # [0, first_bytes) is fetched first, what lies behind it in the background; 0: all is first


@dataclass(frozen=True, slots=True)
class MoreSlabs:
    """Further slab descriptors of the offer before it."""

    first: int
