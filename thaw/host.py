"""A GPU host as it reports itself.  A CPU host is a host like any other: its "GPU memory" is a slice of RAM."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from thaw.ids import HostId, InstanceId


def name_on_machine(host_id: str, run_dir: str) -> str:
    """Platforms on one machine have hosts of the same names; their run directories differ."""
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

    ``n_bytes``, ``done_bytes`` and ``pending_bytes`` are of the part that the stage waits for (what a deadline was
    admitted for); ``later_bytes`` is what the background still has to bring for it.
    """

    group_id: str
    n_bytes: int
    done_bytes: int
    bytes_per_s: float
    stage: int = 0
    pending_bytes: int = 0
    later_bytes: int = 0
    left_out_bytes: int = 0  # of the later part: the pool had no room, so the stage cannot become a whole worker here


@dataclass(frozen=True, slots=True)
class Resident:
    """Bytes of a model that lie in the host's memory, whole ranges of them; a start there need not fetch them."""

    uri: str
    n_bytes: int
    version: str = ""  # of the store, as a plan names it; empty: the host does not say


@dataclass(frozen=True, slots=True)
class HeldSegment:
    """A part of the pool that somebody holds.  ``instances`` are those of this host; a fetch that is being given up
    holds one too."""

    key: str  # of its content: a start with an equal key shares a segment that is ``complete``
    n_slabs: int
    complete: bool
    instances: tuple[InstanceId, ...] = ()


@dataclass(frozen=True, slots=True)
class PoolReport:
    """The host's memory for models, counted as its fetchd counts it.  What is in no held segment is free.

    ``users`` are the instances that may hold a part of the pool, or ask for one yet: an instance that had begun before
    ``seen_wall_ms`` and is not among them never takes anything again.
    """

    slab_bytes: int
    n_slabs: int
    seen_wall_ms: int
    held: tuple[HeldSegment, ...] = ()
    users: tuple[InstanceId, ...] = ()


@dataclass(frozen=True, slots=True)
class StemTarget:
    """How many stem cells of a kind the host keeps now, and what one costs.  ``shared``: any number of starts fork from
    one.  ``ready_in_s``: the host is making one for which a start would wait, and expects it to be ready after so many
    seconds; None: it is making none."""

    kind: str
    count: int
    cell_bytes: int
    shared: bool = False
    ready_in_s: float | None = None


@dataclass(frozen=True, slots=True)
class HostReport:
    """The heartbeat's body.  The host wins: a scheduler rebuilds its view from these."""

    host_id: HostId
    boot_id: str
    address: str  # host:port of the data port
    devices: tuple[Device, ...]
    n_cores: int
    network_bytes_per_s: float  # the link as it was measured, else as it was declared, else a guess
    share: str  # "enforced" | "none"
    driver: str
    started_wall_ms: int
    seen_wall_ms: int
    stem_cells: int = 0
    stem_kinds: tuple[str, ...] = ()  # of which kinds one is waiting
    stem_cell_bytes: int = 0
    draining: bool = False
    instances: tuple[InstanceId, ...] = ()
    fetches: tuple[FetchReport, ...] = ()
    segment_bytes: int = 0
    resident: tuple[Resident, ...] = ()
    stem_targets: tuple[StemTarget, ...] = ()  # none: its operator keeps no stem cells here
    pool: PoolReport | None = None  # None: fetchd does not answer
    declared_bytes_per_s: float | None = None  # the link, by the host's operator; None: nobody declared it
    measured_bytes_per_s: float | None = None  # the link, by its fetchd, which may have been told; None: not yet
