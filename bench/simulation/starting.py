"""One worker's way from its decision to readiness, phase by phase; the sum is what WORKLOAD formulas say.

overlapped (ParaServe, Thaw)   fetch ────────────────────────▶ tail ─┐
                               container ▶ context ▶ libraries ──────┼─▶ ready
                                                   ▶ copy ───────────┘
sequential (vLLM)              container ▶ libraries ▶ context ▶ fetch ▶ load ▶ extra ▶ ready
precreated (ServerlessLLM)     start ▶ fetch ▶ copy ▶ ready

The copy follows the bytes, so it adds only what Eq. 5 says: max(t_cc + t_cu + max(part/pcie, t_l), part/b).  The tail
(last tensors, engine) follows the last byte and so hides behind a runtime that is slower than the fetch.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from bench.simulation.cluster import SimServer
from bench.simulation.constants import STEM_FORK_S
from bench.simulation.engine import Engine, Kind
from bench.simulation.network import Transfer


@dataclass(slots=True)
class Worker:
    """A promise of device memory, and the part of the model it is to hold."""

    index: int
    server: SimServer
    device: int
    reserve: int
    part: float  # bytes it needs first
    full: bool = True
    transfer: Transfer | None = None
    fetch_end_s: float = 0.0
    runtime_end_s: float = 0.0
    ready_s: float = 0.0


class Starter:
    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def sequential(self, worker: Worker, ready: Callable[[], None]) -> None:
        kind = worker.server.kind
        after = [worker.part / kind.vllm_load, kind.vllm_extra]
        fetch = self._fetching(worker, worker.part, math.inf, lambda: self._chain(worker, after, ready))
        self._chain(worker, [kind.t_cc, kind.t_l, kind.t_cu], fetch)

    def precreated(self, worker: Worker, hit: bool, ready: Callable[[], None]) -> None:
        kind = worker.server.kind
        copy = [worker.part / kind.sllm_copy]
        n_bytes = 0.0 if hit else worker.part
        fetch = self._fetching(worker, n_bytes, math.inf, lambda: self._chain(worker, copy, ready))
        self._chain(worker, [kind.sllm_start], fetch)

    def overlapped(
        self, worker: Worker, n_fetch: float, deadline: float, stem_cell: bool, ready: Callable[[], None]
    ) -> None:
        """``n_fetch`` 0: the part is in this host's memory already."""
        kind = worker.server.kind
        left = 3

        def one_less() -> None:
            nonlocal left
            left -= 1
            if left == 0:
                ready()

        def libraries() -> None:
            worker.runtime_end_s = self._engine.now
            one_less()

        def context() -> None:
            self._chain(worker, [0.0 if stem_cell else kind.t_l], libraries)
            self._chain(worker, [worker.part / kind.pcie], one_less)

        tail = [kind.tail + kind.tail_per_byte * worker.part]
        self._chain(worker, [STEM_FORK_S if stem_cell else kind.t_cc, kind.t_cu], context)
        self._fetching(worker, n_fetch, deadline, lambda: self._chain(worker, tail, one_less))()

    def fetch(self, worker: Worker, n_bytes: float, deadline: float, done: Callable[[], None]) -> None:
        self._fetching(worker, n_bytes, deadline, done)()

    def _fetching(
        self, worker: Worker, n_bytes: float, deadline: float, done: Callable[[], None]
    ) -> Callable[[], None]:
        def ended() -> None:
            worker.transfer = None
            worker.fetch_end_s = self._engine.now
            self._engine.note(Kind.FETCH_END, worker.index)
            done()

        def begin() -> None:
            if n_bytes <= 0:
                self._engine.after(0.0, ended)
            else:
                worker.transfer = worker.server.link.start(n_bytes, deadline, ended)

        return begin

    def _chain(self, worker: Worker, durations: list[float], done: Callable[[], None], i: int = 0) -> None:
        """Phases one after another, each end an event."""
        self._engine.after(durations[i], self._phase_end, worker, durations, done, i)

    def _phase_end(self, worker: Worker, durations: list[float], done: Callable[[], None], i: int) -> None:
        self._engine.note(Kind.PHASE_END, worker.index, i)
        if i + 1 < len(durations):
            self._chain(worker, durations, done, i + 1)
        else:
            done()
