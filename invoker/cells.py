"""Stem cells: containers that wait for their action.  Their memory counts, and is given up first.

A python cell is one waiting proxy, used up when taken.  The llm cell of the process driver is a zygote: it forks any
number, so it is there once.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import Final

from invoker.driver import Exit, Handle, Spec
from invoker.ledger import Ledger
from invoker.pool import StemCell
from invoker.process_driver import ProcessDriver
from thaw.action import KIND_LLM, KIND_PYTHON
from thaw.errors import ThawError
from thaw.ids import random_hex_id
from thaw.logs import Log

PYTHON_CELL_BYTES: Final = 64 * 1024 * 1024  # RSS of a waiting interpreter and its proxy, rounded up
ZYGOTE: Final = "zygote"
LABEL: Final = "stem-cell"
_ANSWER_S: Final = 30.0


class StemCells:
    def __init__(self, driver: ProcessDriver, ledger: Ledger, zygote_bytes: int, log: Log) -> None:
        self._driver, self._ledger, self._log = driver, ledger, log
        self._zygote_bytes = zygote_bytes
        self._lock = threading.Lock()
        self._refill_lock = threading.Lock()
        self._waiting: deque[Handle] = deque()
        self._targets = {KIND_PYTHON: 0, KIND_LLM: 0}
        self._closing = False
        driver.on_exit(self._exited)

    def set_target(self, kind: str, count: int) -> None:
        """How many to keep; they are made and given up in the background."""
        with self._lock:
            if kind in self._targets:
                self._targets[kind] = count
        self.refill()

    def refill(self) -> None:
        threading.Thread(target=self._refill, name="stem-cells", daemon=True).start()

    def view(self) -> tuple[StemCell, ...]:
        with self._lock:
            cells = [StemCell(h.container_id, h.kind, PYTHON_CELL_BYTES) for h in self._waiting]
        if self._driver.zygote.ready:
            cells.append(StemCell(ZYGOTE, KIND_LLM, self._zygote_bytes, shared=True))
        return tuple(cells)

    def wait_warm(self, kind: str, deadline_s: float) -> None:
        """An llm cell that is importing is ready before a container that begins to import now: wait for it."""
        if kind == KIND_LLM:
            self._driver.zygote.wait_warm(deadline_s)

    def take(self, cell: StemCell) -> Handle | None:
        """The waiting container, which is the caller's now; its memory is free for the instance to hold."""
        with self._lock:
            handle = next((h for h in self._waiting if h.container_id == cell.cell_id), None)
            if handle is None:
                return None
            self._waiting.remove(handle)
        self._ledger.give_back(cell.cell_id)
        return handle

    def give_up(self, cell: StemCell) -> None:
        if cell.shared:
            self._driver.zygote.give_up()
            self._ledger.give_back(ZYGOTE)
            return
        handle = self.take(cell)
        if handle is not None:
            self._end(handle)

    def close(self) -> None:
        self._closing = True
        with self._refill_lock:
            for cell in self.view():
                self.give_up(cell)
            self._driver.zygote.give_up()

    def _refill(self) -> None:
        with self._refill_lock:
            if self._closing:
                return
            self._keep_zygote()
            while not self._closing and self._missing() > 0 and self._make():
                pass
            for cell in self.view()[: max(0, -self._missing())]:
                if not cell.shared:
                    self.give_up(cell)

    def _missing(self) -> int:
        with self._lock:
            return self._targets[KIND_PYTHON] - len(self._waiting)

    def _keep_zygote(self) -> None:
        if self._targets[KIND_LLM] <= 0:
            self._driver.zygote.give_up()
            self._ledger.give_back(ZYGOTE)
        elif self._ledger.take(ZYGOTE, self._zygote_bytes):
            self._driver.zygote.want()

    def _make(self) -> bool:
        """One more python cell; False when there is no memory for it or it does not start."""
        cell_id = f"cell-{random_hex_id()[:12]}"
        if not self._ledger.take(cell_id, PYTHON_CELL_BYTES):
            return False
        spec = Spec(cell_id, KIND_PYTHON, labels={"role": LABEL})
        handle = None
        try:
            handle = self._driver.start(self._driver.create(spec), spec)
            self._driver.connect(handle, deadline_s=_ANSWER_S)
        except ThawError as e:
            self._log.event("stem_cell_failed", error=e.message)
            self._ledger.give_back(cell_id)
            if handle is not None:
                self._end(handle)
            return False
        with self._lock:
            self._waiting.append(handle)
        return True

    def _end(self, handle: Handle) -> None:
        self._driver.stop(handle, deadline_s=1.0)
        self._driver.remove(handle)

    def _exited(self, end: Exit) -> None:
        with self._lock:
            dead = next((h for h in self._waiting if h.container_id == end.container_id), None)
            if dead is None:
                return
            self._waiting.remove(dead)
        self._ledger.give_back(dead.container_id)
        self._driver.remove(dead)
        self.refill()
