"""The container pool's choice, OpenWhisk's order: prewarmed stem cell → cold → make room → wait → refuse.  Pure.

Room is made where the loss is smallest: first stem cells of other kinds, then the needed kind's own (a cold start is
better than none), then the instances that have been idle longest.
"""

from __future__ import annotations

from dataclasses import dataclass

from thaw.errors import MemoryTooSmall
from thaw.ids import InstanceId

MIB = 1024 * 1024


@dataclass(frozen=True, slots=True)
class Need:
    kind: str
    n_bytes: int


@dataclass(frozen=True, slots=True)
class StemCell:
    cell_id: str
    kind: str
    n_bytes: int
    shared: bool = False  # a zygote: forks any number, and is not used up


@dataclass(frozen=True, slots=True)
class IdleInstance:
    instance_id: InstanceId
    n_bytes: int
    idle_since_ms: int


@dataclass(frozen=True, slots=True)
class PoolView:
    total_bytes: int
    free_bytes: int  # total minus everything held, stem cells included
    cells: tuple[StemCell, ...]
    idle: tuple[IdleInstance, ...]


@dataclass(frozen=True, slots=True)
class Place:
    """Take ``cell`` (None: cold) after giving these up, in order."""

    cell: StemCell | None
    drop_cells: tuple[StemCell, ...] = ()
    evict: tuple[InstanceId, ...] = ()


@dataclass(frozen=True, slots=True)
class Wait:
    """Instances that are not idle hold the memory."""


Choice = Place | Wait


def choose(view: PoolView, need: Need) -> Choice:
    """Raises MemoryTooSmall for a need that this host could never hold."""
    if need.n_bytes > view.total_bytes:
        raise MemoryTooSmall(
            f"the function needs {need.n_bytes // MIB} MiB, this host has {view.total_bytes // MIB} MiB",
            hint="lower resources.gpu_memory_mb, or add a larger host",
        )
    cell = next((c for c in view.cells if c.kind == need.kind), None)
    missing = need.n_bytes - view.free_bytes - (cell.n_bytes if cell is not None and not cell.shared else 0)
    if missing <= 0:
        return Place(cell)
    return _make_room(view, cell, missing)


def _make_room(view: PoolView, cell: StemCell | None, missing: int) -> Place | Wait:
    others = sorted((c for c in view.cells if c is not cell), key=lambda c: (c.shared, c.n_bytes))
    dropped: list[StemCell] = []
    for other in others:
        if missing > 0:
            dropped.append(other)
            missing -= other.n_bytes
    if missing > 0 and cell is not None and cell.shared:
        dropped.append(cell)
        missing -= cell.n_bytes
        cell = None
    evicted: list[InstanceId] = []
    for idle in sorted(view.idle, key=lambda i: i.idle_since_ms):
        if missing > 0:
            evicted.append(idle.instance_id)
            missing -= idle.n_bytes
    return Wait() if missing > 0 else Place(cell, tuple(dropped), tuple(evicted))
