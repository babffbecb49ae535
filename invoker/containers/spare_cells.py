"""What a check of a model may take of its host: a turn, a stem cell of the engine, and memory that no start needs.

::

    take:   none is spare ── waits ──(a cell is ready, memory came back, a check ended)──▶ all three, in one step
                            └─ time is over ──▶ Busy

A check that waits holds nothing, so a start always goes first, and a check of another namespace is not kept out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from invoker.containers.fleet import Fleet
from invoker.containers.pool import StemCell
from invoker.containers.stem_cells import StemCells
from invoker.drivers.base import Handle
from thaw.action import KIND_LLM
from thaw.errors import ThawError, Unavailable
from thaw.ids import random_hex_id

AT_ONCE: Final = 2
"""Checks that run at the same time, at most one of a namespace.  Each takes a second of a core, which starts need,
too."""
FORK_BYTES: Final = 1 << 30
"""The memory that a container may take during a check: its two processes bound themselves to 896 MiB together, beside
the model, which stays empty (thaw_runtime/engine/main.py, llm/container.py)."""
SHARE: Final = 0.25
"""The part of the host's cores that checks may use.  A check computes on one thread."""
LABEL: Final = "preflight"  # a restarted invoker ends containers whose role is not that of an instance


class Busy(Unavailable):
    """Nothing is spare now, and something may be soon."""


@dataclass(frozen=True, slots=True)
class Taken:
    """``owner`` holds the memory of the check, and ``cell`` is its container; None: the check forks one."""

    namespace: str
    owner: str
    cell: Handle | None = None
    cell_owner: str = ""  # holds the cell's own memory


class SpareCells:
    def __init__(self, fleet: Fleet, cells: StemCells) -> None:
        self._fleet, self._cells, self._ledger = fleet, cells, fleet.ledger
        self._inside: set[str] = set()  # the namespaces whose checks run

    def take(self, namespace: str, until_s: float) -> Taken:
        """Wait for everything that a check needs, until the monotonic ``until_s``; give_back() ends it.  Raises Busy,
        and Unavailable where waiting is no use."""
        if not any(t.kind == KIND_LLM and t.count for t in self._cells.targets()):
            raise Unavailable("the host keeps no stem cell of the engine")
        if self._ledger.total_bytes < FORK_BYTES:
            raise Unavailable("the host has less memory than a check takes")
        while True:  # each turn but the last one loses a cell that others have taken
            taken = self._with_cell(*self._reserved(namespace, until_s))
            if taken is not None:
                return taken

    def give_back(self, taken: Taken) -> None:
        if taken.cell is not None:
            self._cells.end(taken.cell)
            self._ledger.give_back(taken.cell_owner)
        self._inside.discard(taken.namespace)
        self._ledger.give_back(taken.owner)  # wakes those that wait for a turn, too
        if taken.cell is not None:
            self._cells.refill()

    def _reserved(self, namespace: str, until_s: float) -> tuple[Taken, StemCell]:
        """Wait for a turn and memory while there is a cell, and take both.  Raises Busy."""
        taken = Taken(namespace, f"cell-{LABEL}-{random_hex_id()[:12]}")
        found: list[StemCell] = []
        lack = ""

        def ready() -> bool:
            """Called with the ledger locked, so two checks cannot take the same turn."""
            nonlocal lack
            cell = next((c for c in self._cells.view() if c.kind == KIND_LLM), None)
            if namespace in self._inside or len(self._inside) >= AT_ONCE:
                lack = "the host is busy with other checks"
            elif cell is None:
                lack = "the host has no stem cell of the engine now"
            elif not self._ledger.take(taken.owner, FORK_BYTES, spare=True):
                lack = "the host has no memory to spare now"
            else:
                self._inside.add(namespace)
                found.append(cell)
            return bool(found)

        if not self._ledger.wait_change(ready, until_s):
            raise Busy(lack)
        return taken, found[0]

    def _with_cell(self, reserved: Taken, cell: StemCell) -> Taken | None:
        """None if others were quicker; the reservation has ended then.  Raises Unavailable."""
        if cell.shared:
            return reserved
        try:
            taken = self._claimed(reserved, cell)
        except ThawError as e:
            self.give_back(reserved)
            raise Unavailable(e.message, hint=e.hint) from e
        if taken is None:
            self.give_back(reserved)
        return taken

    def _claimed(self, reserved: Taken, cell: StemCell) -> Taken | None:
        """A stem cell that nobody else uses, whose memory is bounded; None if others were quicker."""
        driver = self._fleet.driver
        if not driver.reachable():  # a claim would wait for its engine longer than a deploy can
            raise Unavailable("the host's container engine is away")
        handle = self._cells.take(cell)
        if handle is None:
            return None
        owner = f"{reserved.owner}-own"
        try:
            if self._ledger.take(owner, cell.n_bytes, spare=True) and driver.claim(handle):
                driver.limit(handle, SHARE, cell.n_bytes + FORK_BYTES)
                return Taken(reserved.namespace, reserved.owner, handle, owner)
        except ThawError:
            self._lose(handle, owner)
            raise
        self._lose(handle, owner)
        return None

    def _lose(self, handle: Handle, owner: str) -> None:
        self._cells.end(handle)
        self._ledger.give_back(owner)
        self._cells.refill()
