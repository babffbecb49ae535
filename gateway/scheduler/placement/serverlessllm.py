"""When a model would be ready on each server, if runs make way for it: ServerlessLLM's choice (6.1, 6.3; 5, 6.2).

Times are seconds from now, rates are bytes/s.  The cost model (``predict.worker_start``) says how long a load takes
from its tier and its queue: remote → SSD and SSD → DRAM have one queue for each server, DRAM → GPU has none.  Where
GPUs are busy, runs may move elsewhere first.  They move one after another, so their costs add up, and the load begins
when the last run has gone.

The platform places without this choice, because a host's devices are shared here and a start waits for no run; the
simulator's ServerlessLLM places by it.  Gateways move runs off a host that is emptied
(gateway/serving/moving/migration.py).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from gateway.scheduler.placement.predict import NO_RUNTIME, Tier, worker_start


@dataclass(frozen=True, slots=True)
class ResumeCost:
    """``a * tokens + b``, and the mean time per token that turns elapsed time into tokens."""

    a: float
    b: float
    token_s: float

    def resume_s(self, t_in: float, elapsed_s: float) -> float:
        return self.a * (t_in + elapsed_s / self.token_s) + self.b


@dataclass(frozen=True, slots=True)
class Run:
    """An inference in progress, which might move."""

    id: str
    model: str
    n_gpus: int
    n_bytes: float  # its model's bytes, in case a destination has to load it
    t_in: float
    elapsed_s: float
    cost: ResumeCost

    @property
    def resume_s(self) -> float:
        return self.cost.resume_s(self.t_in, self.elapsed_s)


@dataclass(frozen=True, slots=True)
class LoadServer:
    id: int
    n_free: int
    dram: float
    ssd: float
    net: float
    q_ssd: float = 0.0  # when each queue is empty again
    q_net: float = 0.0
    tiers: Mapping[str, Tier] = field(default_factory=dict)  # absent: remote
    runs: tuple[Run, ...] = ()
    idle_models: tuple[str, ...] = ()  # one for each idle instance: a run that moves into one loads nothing
    migrating_in: bool = False  # its runs may not move on

    def tier(self, model: str) -> Tier:
        return self.tiers.get(model, Tier.REMOTE)

    def load_s(self, model: str, n_bytes: float, start_s: float = 0.0) -> float:
        """When the load ends if it may begin at ``start_s``."""
        match self.tier(model):
            case Tier.RESIDENT | Tier.MEMORY:
                rate, queue_s = math.inf, 0.0
            case Tier.SSD:
                rate, queue_s = self.ssd, self.q_ssd
            case Tier.REMOTE:
                rate, queue_s = min(self.net, self.ssd), max(self.q_net, self.q_ssd)
        return worker_start(n_bytes, rate, self.dram, NO_RUNTIME, queue_s=max(queue_s, start_s)).ready_s


@dataclass(frozen=True, slots=True)
class Move:
    run: str
    to: int
    cost_s: float


@dataclass(frozen=True, slots=True)
class StartupChoice:
    server: int
    startup_s: float
    moves: tuple[Move, ...] = ()


def choose(servers: Sequence[LoadServer], model: str, n_bytes: float, n_gpus: int) -> StartupChoice | None:
    """Return the server of least start-up time; a tie goes to the one without migration, then to the lower id.  Return
    None when no server can take the model now."""
    options = [c for s in servers if (c := startup(servers, s, model, n_bytes, n_gpus)) is not None]
    return min(options, key=lambda c: (c.startup_s, len(c.moves), c.server), default=None)


def startup(
    servers: Sequence[LoadServer], server: LoadServer, model: str, n_bytes: float, n_gpus: int
) -> StartupChoice | None:
    """Return the start-up time on ``server``, with the cheapest migration away from it if it needs one, or None."""
    missing = n_gpus - server.n_free
    moves = () if missing <= 0 else cheapest_moves(servers, server, missing)
    if moves is None:
        return None
    total_s = math.fsum(m.cost_s for m in moves)
    return StartupChoice(server.id, server.load_s(model, n_bytes, total_s), moves)


class _Left(NamedTuple):
    """The room that is left at one destination: free GPUs, and idle instances of these models, each of which takes one
    run."""

    n_free: int
    idle_models: tuple[str, ...]


_State = tuple[int, tuple[_Left, ...]]
"""The number of GPUs that are free by then, and what is left at each destination."""


def cheapest_moves(servers: Sequence[LoadServer], source: LoadServer, missing: int) -> tuple[Move, ...] | None:
    """The set of runs and destinations of least total cost that frees ``missing`` GPUs.

    Dynamic programming over (runs considered, GPUs freed, what is left at each destination).
    """
    if source.migrating_in:
        return None
    others = [s for s in servers if s.id != source.id]
    nothing_moved = 0, tuple(_Left(s.n_free, tuple(sorted(s.idle_models))) for s in others)
    best: dict[_State, tuple[float, tuple[Move, ...]]] = {nothing_moved: (0.0, ())}
    for run in source.runs:
        found = dict(best)
        for (freed, left), (cost, moves) in best.items():
            if freed >= missing:
                continue
            for i, move_s, after in _ways(run, others, left):
                state = min(missing, freed + run.n_gpus), (*left[:i], after, *left[i + 1 :])
                if state not in found or cost + move_s < found[state][0]:
                    found[state] = cost + move_s, (*moves, Move(run.id, others[i].id, move_s))
        best = found
    done = [option for (freed, _), option in best.items() if freed >= missing]
    return min(done, key=lambda o: (o[0], len(o[1])), default=(0.0, None))[1]


def _ways(run: Run, others: Sequence[LoadServer], left: Sequence[_Left]) -> Iterator[tuple[int, float, _Left]]:
    """Yield where a run can move: (destination, seconds, what is left there).  An idle instance of its model already
    holds its GPUs and takes one run; elsewhere the model is loaded into free GPUs.  The tokens so far are recomputed in
    both cases."""
    for i, (server, at) in enumerate(zip(others, left, strict=True)):
        if run.model in at.idle_models:
            k = at.idle_models.index(run.model)
            yield i, run.resume_s, at._replace(idle_models=(*at.idle_models[:k], *at.idle_models[k + 1 :]))
        if at.n_free >= run.n_gpus:
            yield i, server.load_s(run.model, run.n_bytes) + run.resume_s, at._replace(n_free=at.n_free - run.n_gpus)
