"""A GPU host's report about itself.  A CPU host is a host like any other: its "GPU memory" is a slice of RAM."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from thaw.ids import HostId, InstanceId


def name_on_machine(host_id: str, run_dir: str) -> str:
    """A name that is unique on the machine.

    Several platforms on one machine have hosts with the same names, but their run directories differ.
    """
    return f"{host_id}-{hashlib.sha256(run_dir.encode()).hexdigest()[:8]}"


@dataclass(frozen=True, slots=True)
class Device:
    name: str  # "cpu", "cuda:0"
    kind: str  # "cpu", "NVIDIA H200"
    memory_bytes: int
    free_bytes: int


@dataclass(frozen=True, slots=True)
class FetchReport:
    """One fetch in progress, for the bandwidth ledger.

    ``n_bytes``, ``done_bytes`` and ``pending_bytes`` count the part that the stage waits for, for which a deadline was
    admitted.  ``later_bytes`` counts the bytes that the background fetch still has to bring for the stage.
    """

    group_id: str
    n_bytes: int
    done_bytes: int
    bytes_per_s: float
    stage: int = 0
    pending_bytes: int = 0
    later_bytes: int = 0
    left_out_bytes: int = 0  # later bytes without room in the pool: here the stage cannot become a whole worker


@dataclass(frozen=True, slots=True)
class Resident:
    """Bytes of a model that lie in the host's memory as whole ranges; a start on the host need not fetch them."""

    uri: str
    n_bytes: int
    version: str = ""  # the store's version, as a plan names it; empty if the host does not report it


@dataclass(frozen=True, slots=True)
class HeldSegment:
    """A part of the pool that is in use.  ``instances`` are the instances of this host that hold the segment; a fetch
    that is being cancelled can hold a segment, too.
    """

    key: str  # describes the content: a start with an equal key shares a segment that is ``complete``
    n_slabs: int
    complete: bool
    instances: tuple[InstanceId, ...] = ()


@dataclass(frozen=True, slots=True)
class PoolReport:
    """The host's memory for models, as its fetchd counts it.  Memory that is in no held segment is free.

    ``users`` are the instances that may hold a part of the pool or may still ask for one.  An instance that had begun
    before ``seen_wall_ms`` and is not among them never takes memory from the pool again.
    """

    slab_bytes: int
    n_slabs: int
    seen_wall_ms: int
    held: tuple[HeldSegment, ...] = ()
    users: tuple[InstanceId, ...] = ()


@dataclass(frozen=True, slots=True)
class StemTarget:
    """How many stem cells of a kind the host keeps now, and how many bytes one costs.

    ``shared`` means that any number of starts can fork from one stem cell.  ``ready_in_s`` is set while the host makes
    a stem cell for which a start would wait: the host expects it to be ready after this many seconds.  None means that
    the host is making no such stem cell.
    """

    kind: str
    count: int
    cell_bytes: int
    shared: bool = False
    ready_in_s: float | None = None


@dataclass(frozen=True, slots=True)
class HostReport:
    """The body of a heartbeat.  A scheduler rebuilds its view from these reports; if they differ, the host is right."""

    host_id: HostId
    boot_id: str
    address: str  # host:port of the data port
    devices: tuple[Device, ...]
    n_cores: int
    network_bytes_per_s: float  # the link's measured rate, else its declared rate, else a guess
    share: str  # "enforced" | "none"
    driver: str
    started_wall_ms: int
    seen_wall_ms: int
    stem_cells: int = 0
    stem_kinds: tuple[str, ...] = ()  # the kinds of which a stem cell is waiting
    draining: bool = False
    instances: tuple[InstanceId, ...] = ()
    fetches: tuple[FetchReport, ...] = ()
    segment_bytes: int = 0
    resident: tuple[Resident, ...] = ()
    stem_targets: tuple[StemTarget, ...] = ()  # empty: the operator keeps no stem cells on this host
    pool: PoolReport | None = None  # None: fetchd does not answer
    declared_bytes_per_s: float | None = None  # the link's rate that the operator declared; None: not declared
    measured_bytes_per_s: float | None = None  # the link's rate according to fetchd (measured or set); None: not yet
    handing_over: bool = False  # its invoker ends and leaves the instances to the next one, which comes soon

    @property
    def takes_starts(self) -> bool:
        return not (self.draining or self.handing_over)


@dataclass(frozen=True, slots=True)
class HostLeft:
    """A host that is being emptied still has ``moving`` requests of models and ``running`` ones of functions, on
    ``instances`` containers.

    The requests of a pipeline count when any of its stages is there.  The requests of an instance that does not drain
    yet are counted as of its last change.
    """

    draining: bool
    moving: int = 0
    running: int = 0
    instances: int = 0
