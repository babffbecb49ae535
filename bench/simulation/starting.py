"""One worker's start, phase by phase, from its decision until it is ready.  The times add up as in the formulas.

overlapped (ParaServe, Thaw)   fetch ────────────────────────▶ tail ─┐
                               container ▶ context ▶ libraries ──────┼─▶ ready
                                                   ▶ copy ───────────┘
sequential (vLLM)              container ▶ libraries ▶ context ▶ fetch ▶ load ▶ extra ▶ ready
precreated (ServerlessLLM)     start ▶ fetch ▶ copy ▶ ready
apart (an ablation)            container ▶ context ▶ libraries ▶ fetch ▶ copy ▶ tail ▶ ready

The copy follows the bytes, so it adds only what Eq. 5 says: max(t_cc + t_cu + max(part/pcie, t_l), part/b).  The tail
(last tensors, engine) follows the last byte, so it is hidden if the runtime takes longer than the fetch.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from bench.simulation.cluster import SimServer
from bench.simulation.constants import STEM_FORK_S, GpuKind
from bench.simulation.engine import Engine, Kind
from bench.simulation.network import Transfer
from bench.simulation.waits import Cause, Span

Phase = tuple[Cause, float]
"""The cause that the phase counts as, and the seconds that it takes."""


class Phases(enum.StrEnum):
    """How the phases of a start follow one another."""

    OVERLAPPED = "overlapped"
    SEQUENTIAL = "sequential"
    PRECREATED = "precreated"
    APART = "apart"  # the phases of OVERLAPPED, one after another


@dataclass(slots=True)
class Worker:
    """A promise of device memory, and the part of the model that the worker will hold."""

    index: int
    server: SimServer
    device: int
    reserve: int
    part: float  # the bytes that it needs first
    full: bool = True
    transfer: Transfer | None = None
    fetch_begin_s: float = math.inf  # inf where nothing is fetched
    fetch_end_s: float = 0.0
    runtime_end_s: float = 0.0
    ready_s: float = 0.0
    chain: list[Span] = field(default_factory=list)
    """The chain of phases that ended last: these phases are the time of the start (or of the last fetch)."""


@dataclass(frozen=True, slots=True)
class Bytes:
    """The bytes that a start fetches.  With 0 bytes the part is in this host's memory already."""

    n_bytes: float
    deadline_s: float = math.inf


class Starter:
    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def start(
        self, phases: Phases, worker: Worker, wanted: Bytes, ready: Callable[[], None], *, stem_cell: bool = False
    ) -> None:
        kind, part = worker.server.kind, worker.part
        match phases:
            case Phases.OVERLAPPED:
                self._overlapped(worker, wanted, stem_cell, ready)
            case Phases.SEQUENTIAL:
                before = _runtime(kind.t_cc, kind.t_l, kind.t_cu)
                self._in_turn(worker, before, wanted, _load(part / kind.vllm_load, kind.vllm_extra), ready)
            case Phases.PRECREATED:
                self._in_turn(worker, _runtime(kind.sllm_start), wanted, _load(part / kind.sllm_copy), ready)
            case Phases.APART:
                before = _runtime(STEM_FORK_S, kind.t_cu) if stem_cell else _runtime(kind.t_cc, kind.t_cu, kind.t_l)
                self._in_turn(worker, before, wanted, _load(part / kind.pcie, _tail_s(kind, part)), ready)

    def _in_turn(
        self,
        worker: Worker,
        before: Sequence[Phase],
        wanted: Bytes,
        after: Sequence[Phase],
        ready: Callable[[], None],
    ) -> None:
        """Run the phases one after another, as one chain."""
        chain = worker.chain = list[Span]()

        def fetched() -> None:
            self._phases(worker, after, chain, ready)

        def begun() -> None:
            worker.runtime_end_s = self._engine.now
            self._fetch(worker, wanted, chain, fetched)

        self._phases(worker, before, chain, begun)

    def _overlapped(self, worker: Worker, wanted: Bytes, stem_cell: bool, ready: Callable[[], None]) -> None:
        kind = worker.server.kind
        left = 3

        def ended(chain: list[Span]) -> None:
            nonlocal left
            left -= 1
            if left == 0:
                worker.chain = chain
                ready()

        def libraries(chain: list[Span]) -> None:
            worker.runtime_end_s = self._engine.now
            ended(chain)

        def context() -> None:
            imports, copy = list(begin), list(begin)
            t_l = _runtime(0.0 if stem_cell else kind.t_l)
            self._phases(worker, t_l, imports, lambda: libraries(imports))
            self._phases(worker, _load(worker.part / kind.pcie), copy, lambda: ended(copy))

        begin, fetch = list[Span](), list[Span]()
        tail = _load(_tail_s(kind, worker.part))
        self._phases(worker, _runtime(STEM_FORK_S if stem_cell else kind.t_cc, kind.t_cu), begin, context)
        self._fetch(worker, wanted, fetch, lambda: self._phases(worker, tail, fetch, lambda: ended(fetch)))

    def fetch(self, worker: Worker, n_bytes: float, done: Callable[[], None]) -> None:
        """Fetch the missing bytes, with lower priority than all fetches that have a deadline."""
        worker.chain = list[Span]()
        self._fetch(worker, Bytes(n_bytes), worker.chain, done)

    def _fetch(self, worker: Worker, wanted: Bytes, chain: list[Span], done: Callable[[], None]) -> None:
        began_s = self._engine.now

        def ended() -> None:
            now_s = self._engine.now
            shared_s = 0.0 if worker.transfer is None else min(now_s - began_s, worker.transfer.shared_s)
            chain.append(Span(Cause.SHARED_LINK, began_s, began_s + shared_s))
            chain.append(Span(Cause.FETCH, began_s + shared_s, now_s))
            worker.transfer = None
            worker.fetch_end_s = now_s
            self._engine.note(Kind.FETCH_END, worker.index)
            done()

        if wanted.n_bytes <= 0:
            self._engine.after(0.0, ended)
        else:
            worker.fetch_begin_s = began_s
            worker.transfer = worker.server.link.start(wanted.n_bytes, wanted.deadline_s, ended)

    def _phases(
        self, worker: Worker, phases: Sequence[Phase], chain: list[Span], done: Callable[[], None], i: int = 0
    ) -> None:
        """Run the phases one after another.  Each end is an event."""
        self._engine.after(phases[i][1], self._phase_end, worker, phases, chain, done, i, self._engine.now)

    def _phase_end(
        self,
        worker: Worker,
        phases: Sequence[Phase],
        chain: list[Span],
        done: Callable[[], None],
        i: int,
        began_s: float,
    ) -> None:
        chain.append(Span(phases[i][0], began_s, self._engine.now))
        self._engine.note(Kind.PHASE_END, worker.index, i)
        if i + 1 < len(phases):
            self._phases(worker, phases, chain, done, i + 1)
        else:
            done()


def _runtime(*seconds: float) -> list[Phase]:
    return [(Cause.RUNTIME, s) for s in seconds]


def _load(*seconds: float) -> list[Phase]:
    return [(Cause.LOAD, s) for s in seconds]


def _tail_s(kind: GpuKind, part: float) -> float:
    return kind.tail + kind.tail_per_byte * part
