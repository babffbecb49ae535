"""Carries out the pool's choice: afterwards the memory is held, and the cells and instances that held it are gone."""

from __future__ import annotations

import threading
import time
from typing import Final

from invoker.containers.fleet import Fleet
from invoker.containers.instance import Effect, Event, State
from invoker.containers.live import Live
from invoker.containers.pool import IdleInstance, Need, Place, PoolView, StemCell, choose
from invoker.containers.stem_cells import StemCells
from invoker.drivers.base import Handle
from thaw.errors import MemoryTooSmall, Unavailable

WAIT_S: Final = 30.0
"""How long a start waits for instances that are draining; the scheduler then tries another host."""

WARMING_S: Final = 60.0
"""The longest wait for a stem cell that is importing: several times the time that it takes on a busy host."""

Placement = tuple[StemCell | None, Handle | None]


class Placing:
    def __init__(self, fleet: Fleet, cells: StemCells) -> None:
        self._fleet, self._cells = fleet, cells
        self._lock = threading.Lock()

    def wait_warm(self, live: Live) -> float:
        """Wait for a stem cell that is importing; return the seconds that this took."""
        began = time.monotonic()
        self._cells.wait_warm(live.cell_kind, WARMING_S)
        return time.monotonic() - began

    def place(self, live: Live) -> Placement:
        """The stem cell to use, if any.  Raises MemoryTooSmall (never fits), Unavailable (not now)."""
        deadline = time.monotonic() + WAIT_S
        while True:
            with self._lock:
                choice = choose(self._view(), _need(live))
                if isinstance(choice, Place):
                    placement = self._carry_out(live, choice)
                    if placement is not None:
                        return placement
            if not self._wait(live, deadline):
                raise Unavailable("no memory became free on this host in time", hint="add hosts, or lower keep_alive_s")

    def _carry_out(self, live: Live, choice: Place) -> Placement | None:
        for cell in choice.drop_cells:
            self._cells.give_up(cell)
        for instance_id in choice.evict:
            idle = self._fleet.find(instance_id)
            if idle is not None and idle.apply(Event.RELEASE) is Effect.STOP:
                self._fleet.stop(idle)
        handle = None
        if choice.cell is not None and not choice.cell.shared:
            handle = self._cells.take(choice.cell)
        held = self._fleet.ledger.take(live.record.instance_id, live.record.reserve_bytes)
        if held and live.state is not State.STARTING:  # given up meanwhile, and perhaps buried before the take
            self._fleet.ledger.give_back(live.record.instance_id)
        elif held:
            return (choice.cell if choice.cell is not None and (choice.cell.shared or handle) else None), handle
        if handle is not None:  # another start was quicker; the cell cannot go back, it is announced as taken
            self._cells.end(handle)
        return None

    def _wait(self, live: Live, deadline: float) -> bool:
        def ready() -> bool:
            if live.state is not State.STARTING:
                return True
            try:
                return isinstance(choose(self._view(), _need(live)), Place)
            except MemoryTooSmall:
                return True

        return self._fleet.ledger.wait_change(ready, deadline) and live.state is State.STARTING

    def _view(self) -> PoolView:
        ledger = self._fleet.ledger
        idle = [
            IdleInstance(live.record.instance_id, live.record.reserve_bytes, live.record.idle_since_wall_ms or 0)
            for live in self._fleet.all()
            if live.state is State.IDLE and not live.in_group  # groups end as a whole
        ]
        return PoolView(ledger.total_bytes, ledger.free_bytes, self._cells.view(), tuple(idle))


def _need(live: Live) -> Need:
    return Need(live.cell_kind, live.record.reserve_bytes)
