"""Stem cells: containers that wait for their action.  Their memory counts, and is given up first.

A cell is one waiting container of its kind, used up when taken; an llm one has imported its engine and has a descriptor
socket of its own, through which it will get its model.  A driver with a zygote has one llm cell, the zygote, which
forks any number of containers.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable
from typing import Final

from invoker.containers.memory_ledger import Ledger
from invoker.containers.pool import StemCell
from invoker.drivers.base import CONTRACT, Driver, Exit, Handle, Owned, Spec
from invoker.drivers.socket_wait import listens, wait_listens
from relay.clients.fetch import FetchClient
from thaw.action import KIND_LLM, KIND_PYTHON
from thaw.errors import PlatformError, ThawError, Unavailable
from thaw.host import StemTarget
from thaw.ids import InstanceId, random_hex_id
from thaw.logs import Log

PYTHON_CELL_BYTES: Final = 64 * 1024 * 1024  # RSS of a waiting interpreter and its proxy, rounded up
ZYGOTE: Final = "zygote"
LABEL: Final = "stem-cell"
WARM: Final = "THAW_WARM"  # tells the container to import the modules for which a start would otherwise wait
_ANSWER_S: Final = 30.0
_RETRY_S: Final = 5.0
_GROWTH: Final = 2.0  # the pause is multiplied by it after each failure in succession
_LONGEST_RETRY_S: Final = 60.0


class StemCells:
    def __init__(
        self, driver: Driver, fetch: FetchClient, ledger: Ledger, llm_bytes: int, log: Log, *, device: str = "cpu"
    ) -> None:
        self._driver, self._fetch, self._ledger, self._log = driver, fetch, ledger, log
        self._bytes = {KIND_PYTHON: PYTHON_CELL_BYTES, KIND_LLM: llm_bytes}
        self._device = device
        self._lock = threading.Lock()
        self._refill_lock = threading.Lock()
        self._zygote_lock = threading.Lock()  # the zygote is wanted while its memory is held, and at no other time
        self._waiting: deque[Handle] = deque()
        self._targets = {KIND_PYTHON: 0, KIND_LLM: 0}
        self._retries: dict[str, threading.Thread] = {}  # for kinds whose cell could not be made
        self._pauses: dict[str, float] = {}  # for kinds whose last cell failed
        self._changed = threading.Condition()
        self._n_ends = 0
        self._closing = False
        self._closed_fd = os.eventfd(0, os.EFD_CLOEXEC)  # readable once we are closing
        self.on_ready: Callable[[], None] = lambda: None
        """Called when a cell begins to wait: a start that the scheduler plans now can count on it."""
        driver.on_exit(self._exited)

    def targets(self) -> tuple[StemTarget, ...]:
        zygote = self._driver.zygote
        with self._lock:
            return tuple(
                StemTarget(kind, count, self._bytes[kind], shared=True, ready_in_s=zygote.ready_in_s)
                if zygote is not None and kind == KIND_LLM
                else StemTarget(kind, count, self._bytes[kind])
                for kind, count in self._targets.items()
            )

    def set_target(self, kind: str, count: int) -> None:
        """Set how many cells of a kind to keep; they are made and given up in the background."""
        if kind == KIND_LLM and self._driver.whole_devices and not self._device.startswith("cpu"):
            count = 0
        with self._lock:
            if kind in self._targets:
                self._targets[kind] = count
        self.refill()

    def refill(self) -> None:
        threading.Thread(target=self._refill, name="stem-cells", daemon=True).start()

    def view(self) -> tuple[StemCell, ...]:
        with self._lock:
            cells = [StemCell(h.container_id, h.kind, self._bytes[h.kind]) for h in self._waiting]
        if self._driver.zygote is not None and self._driver.zygote.ready:
            cells.append(StemCell(ZYGOTE, KIND_LLM, self._bytes[KIND_LLM], shared=True))
        return tuple(cells)

    def wait_warm(self, kind: str, deadline_s: float) -> None:
        """Wait for a zygote that is importing: it is ready before a container that begins to import now.

        A cell that is a container of its own can be taken while it imports, so there is nothing to wait for.
        """
        if kind == KIND_LLM and self._driver.zygote is not None:
            self._driver.zygote.wait_warm(deadline_s)

    def adopt(self, owned: Owned) -> None:
        """Keep a cell that waited for an earlier invoker; a refill gives it up if it is one too many."""
        handle = owned.handle
        self._ledger.adopt(handle.container_id, self._bytes[handle.kind])
        with self._lock:
            self._waiting.append(handle)
        self._driver.adopt(owned)  # the last step, because it may report the cell's end at once

    def n_waiting(self, kind: str) -> int:
        with self._lock:
            return sum(h.kind == kind for h in self._waiting)

    def take(self, cell: StemCell) -> Handle | None:
        """Hand the waiting container over to the caller; its memory is free for the instance to hold."""
        with self._lock:
            handle = next((h for h in self._waiting if h.container_id == cell.cell_id), None)
            if handle is None:
                return None
            self._waiting.remove(handle)
        self._ledger.give_back(cell.cell_id)
        return handle

    def give_up(self, cell: StemCell) -> None:
        if cell.shared:
            with self._zygote_lock:
                self._end_zygote()
            return
        handle = self.take(cell)
        if handle is not None:
            self.end(handle)

    def end(self, handle: Handle) -> None:
        """End a cell that was taken and is not used."""
        try:
            self._driver.stop(handle, deadline_s=1.0)
        except ThawError as e:
            self._log.event("stem_cell_left", container_id=handle.container_id, error=e.message)
        self._driver.remove(handle)
        self._close_descriptor_socket(handle.container_id, handle.kind)

    def close(self) -> None:
        self._stop_refills()
        with self._refill_lock:
            for cell in self.view():
                self.give_up(cell)
            with self._zygote_lock:
                self._end_zygote()

    def leave(self) -> int:
        """Make and end no more of them: the next invoker may have those that wait.  Return how many these are."""
        self._stop_refills()
        with self._refill_lock, self._zygote_lock:
            self._end_zygote()
        return len(self.view())

    def _stop_refills(self) -> None:
        self._closing = True
        os.eventfd_write(self._closed_fd, 1)
        with self._changed:
            self._changed.notify_all()
        with self._lock:
            retries = list(self._retries.values())
        for retry in retries:
            retry.join()
        os.close(self._closed_fd)

    def _refill(self) -> None:
        with self._refill_lock:
            if self._closing:
                return
            self._keep_zygote()
            for kind in (KIND_PYTHON, KIND_LLM) if self._driver.zygote is None else (KIND_PYTHON,):
                self._keep(kind)

    def _keep(self, kind: str) -> None:
        while not self._closing and self._missing(kind) > 0 and self._make(kind):
            pass
        too_many = max(0, -self._missing(kind))
        for cell in [c for c in self.view() if c.kind == kind and not c.shared][:too_many]:
            self.give_up(cell)

    def _missing(self, kind: str) -> int:
        return self._targets[kind] - self.n_waiting(kind)

    def _keep_zygote(self) -> None:
        zygote = self._driver.zygote
        if zygote is None:
            return
        with self._zygote_lock:
            if self._targets[KIND_LLM] <= 0:
                self._end_zygote()
            elif self._ledger.take(ZYGOTE, self._bytes[KIND_LLM], spare=True):
                zygote.want(self._ready)

    def _end_zygote(self) -> None:
        """The caller holds the zygote's lock: else a refill could start another, whose memory would not be counted."""
        if self._driver.zygote is not None:
            self._driver.zygote.give_up()
            self._ledger.give_back(ZYGOTE)

    def _make(self, kind: str) -> bool:
        """Make one more cell; False when there is no memory for it or it does not start."""
        cell_id = f"cell-{random_hex_id()[:12]}"
        if not self._ledger.take(cell_id, self._bytes[kind], spare=True):
            return False
        handle, n_ends = None, self._n_ends
        try:
            spec = self._spec(cell_id, kind)
            handle = self._driver.create(spec)
            handle = self._driver.start(handle, spec)
            self._driver.connect(handle, deadline_s=_ANSWER_S)
        except ThawError as e:
            self._ledger.give_back(cell_id)
            if handle is not None:
                self.end(handle)
            else:
                self._close_descriptor_socket(cell_id, kind)  # it is opened before the container is made
            self._retry_later(kind, e, n_ends)
            return False
        with self._lock:
            self._waiting.append(handle)
            self._pauses.pop(kind, None)
        self._ready()
        return True

    def _ready(self) -> None:
        self._ledger.wake()  # a start that waits for memory may take the cell's
        self.on_ready()

    def _retry_later(self, kind: str, error: ThawError, n_ends: int) -> None:
        """``n_ends`` containers had ended when the cell that failed was begun."""
        no_fetchd = kind == KIND_LLM and not listens(self._fetch.path)
        self._log.event("stem_cell_waits" if no_fetchd else "stem_cell_failed", kind=kind, error=error.message)
        with self._lock:
            if self._closing or kind in self._retries:
                return
            wait = self._fetchd_listens if no_fetchd else self._a_while_passes
            retry = threading.Thread(
                target=self._refill_when, args=(wait, kind, n_ends), name="stem-cells-again", daemon=True
            )
            self._retries[kind] = retry
            retry.start()

    def _refill_when(self, wait: Callable[[str, int], bool], kind: str, n_ends: int) -> None:
        goes_on = wait(kind, n_ends)
        with self._lock:
            del self._retries[kind]
        if goes_on:
            self.refill()

    def _fetchd_listens(self, kind: str, n_ends: int) -> bool:
        """Wait for fetchd: it fills its pool before it listens, which takes some seconds after a host's start."""
        try:
            return wait_listens(self._fetch.path, self._closed_fd)
        except PlatformError:  # not even its directory is there
            return self._a_while_passes(kind, n_ends)

    def _a_while_passes(self, kind: str, n_ends: int) -> bool:
        """Wait: the engine may be coming up, which no event announces, or has room again when a container ends."""
        with self._lock:
            pause_s = self._pauses.get(kind, _RETRY_S)
            self._pauses[kind] = min(_GROWTH * pause_s, _LONGEST_RETRY_S)
        with self._changed:
            self._changed.wait_for(lambda: self._closing, _RETRY_S)
            self._changed.wait_for(lambda: self._closing or self._n_ends > n_ends, pause_s - _RETRY_S)
        return not self._closing

    def _spec(self, cell_id: str, kind: str) -> Spec:
        """Raises Unavailable when an llm cell cannot have a descriptor socket."""
        labels = {"role": LABEL, "contract": CONTRACT}
        if kind != KIND_LLM:
            return Spec(cell_id, kind, labels=labels)
        path = self._fetch.open_descriptor_socket(InstanceId(cell_id))
        return Spec(cell_id, kind, {WARM: "on"}, labels, descriptor_socket=path, device=self._device)

    def _close_descriptor_socket(self, container_id: str, kind: str) -> None:
        if kind != KIND_LLM:
            return
        try:
            self._fetch.close_descriptor_socket(InstanceId(container_id))
        except Unavailable:
            pass  # fetchd is away: it has no descriptor sockets when it comes back
        except ThawError as e:
            self._log.event("descriptor_socket_close_failed", instance_id=container_id, error=e.message)

    def _exited(self, end: Exit) -> None:
        with self._changed:
            self._n_ends += 1
            self._changed.notify_all()
        with self._lock:
            dead = next((h for h in self._waiting if h.container_id == end.container_id), None)
            if dead is None:
                return
            self._waiting.remove(dead)
        self._ledger.give_back(dead.container_id)
        self._driver.remove(dead)
        self._close_descriptor_socket(dead.container_id, dead.kind)
        self.refill()
