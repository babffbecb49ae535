"""When a model would be ready on each server: ServerlessLLM's start-up time (6.1, 6.3) and migration (5, 6.2).

Seconds from now and bytes/s.  A load crosses tiers as a pipeline, so the slowest one sets its rate; remote → SSD and
SSD → DRAM have one queue a server, DRAM → GPU has none.  Where GPUs are busy, runs may move elsewhere first; they move
one after another, so their costs add up, and the load begins when the last has gone.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace


class Tier(enum.StrEnum):
    DRAM = "dram"
    SSD = "ssd"
    REMOTE = "remote"


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
    n_bytes: float  # of its model, should a destination have to load it
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
    idle_models: frozenset[str] = frozenset()  # idle instances: a run that moves there loads nothing
    migrating_in: bool = False  # its runs may not move on

    def tier(self, model: str) -> Tier:
        return self.tiers.get(model, Tier.REMOTE)

    def load_s(self, model: str, n_bytes: float, start_s: float = 0.0) -> float:
        """When the load ends if it may begin at ``start_s``."""
        tier = self.tier(model)
        if tier is Tier.DRAM:
            return start_s + n_bytes / self.dram
        if tier is Tier.SSD:
            return max(self.q_ssd, start_s) + n_bytes / min(self.ssd, self.dram)
        queue_s = max(self.q_net, self.q_ssd)
        return max(queue_s, start_s) + n_bytes / min(self.net, self.ssd, self.dram)

    def assign(self, model: str, n_bytes: float, start_s: float = 0.0) -> LoadServer:
        """The server after a load was given to it: every queue it crosses ends with it."""
        end_s, tier = self.load_s(model, n_bytes, start_s), self.tier(model)
        if tier is Tier.DRAM:
            return self
        return replace(self, q_ssd=end_s, q_net=end_s if tier is Tier.REMOTE else self.q_net)


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
    """The server of least start-up time; ties: no migration, then the lower id.  None: nowhere now."""
    options = [c for s in servers if (c := startup(servers, s, model, n_bytes, n_gpus)) is not None]
    return min(options, key=lambda c: (c.startup_s, len(c.moves), c.server), default=None)


def startup(
    servers: Sequence[LoadServer], server: LoadServer, model: str, n_bytes: float, n_gpus: int
) -> StartupChoice | None:
    """Start-up time on ``server``, with the cheapest migration away from it if it needs one."""
    missing = n_gpus - server.n_free
    moves = () if missing <= 0 else cheapest_moves(servers, server, missing)
    if moves is None:
        return None
    total_s = math.fsum(m.cost_s for m in moves)
    return StartupChoice(server.id, server.load_s(model, n_bytes, total_s), moves)


def cheapest_moves(servers: Sequence[LoadServer], source: LoadServer, missing: int) -> tuple[Move, ...] | None:
    """The set of runs and destinations of least total cost that frees ``missing`` GPUs.

    Dynamic programming over (runs considered, GPUs freed, capacity left at each destination).
    """
    if source.migrating_in:
        return None
    others = [s for s in servers if s.id != source.id]
    State = tuple[int, tuple[int, ...]]
    best: dict[State, tuple[float, tuple[Move, ...]]] = {(0, tuple(s.n_free for s in others)): (0.0, ())}
    for run in source.runs:
        found = dict(best)
        for (freed, room), (cost, moves) in best.items():
            if freed >= missing:
                continue
            for i, destination in enumerate(others):
                if room[i] < run.n_gpus:
                    continue
                move = Move(run.id, destination.id, move_cost_s(run, destination))
                left = (*room[:i], room[i] - run.n_gpus, *room[i + 1 :])
                state = (min(missing, freed + run.n_gpus), left)
                if state not in found or cost + move.cost_s < found[state][0]:
                    found[state] = (cost + move.cost_s, (*moves, move))
        best = found
    done = [option for (freed, _), option in best.items() if freed >= missing]
    return min(done, key=lambda o: (o[0], len(o[1])), default=(0.0, None))[1]


def move_cost_s(run: Run, destination: LoadServer) -> float:
    """Load the model there unless an idle instance has it; then recompute what was said so far."""
    load_s = 0.0 if run.model in destination.idle_models else destination.load_s(run.model, run.n_bytes)
    return load_s + run.resume_s
