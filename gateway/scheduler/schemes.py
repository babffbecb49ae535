"""What Algorithm 1 chooses among: servers as offers, a size (s, w), its candidates, and the scheme that results."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Final, Literal, NamedTuple

from gateway.scheduler import predict
from gateway.scheduler.predict import Times

Variant = Literal["paper", "slides", "min_sharing"]
VARIANTS: Final[tuple[Variant, ...]] = ("paper", "slides", "min_sharing")
_NOISE: Final = 1e-9
"""An SLO that is met exactly counts as met; sums of floats miss it by ulps."""
_DEFAULT_TIMES: Final = Times()


class Seat(NamedTuple):
    gpu: int
    shares: bool  # the device already hosts a worker


Seats = dict[tuple[float, bool], Seat | None]
"""(bytes, idle devices preferred) → seat; None: no device has so many bytes free."""


class Gpu(NamedTuple):
    free: int
    n_workers: int = 0


class Server(NamedTuple):
    """``id`` breaks ties, so callers number servers by preference (least loaded first)."""

    id: int
    bandwidth: float
    pcie: float
    gpus: tuple[Gpu, ...]
    times: Times | None = None  # of its own kind of device; None: the request's
    seats: Seats | None = None
    """What ``gpus`` answered before: a caller whose devices have not changed gives the same one again."""
    parts: tuple[int, ...] | None = None
    """How many of the largest parts of a model in 1, 2, … stages its memory for models has room for; None: any."""

    def takes_part(self, s: int, n_here: int = 0) -> bool:
        """Beside ``n_here`` other parts there is room for one of ``s``."""
        return self.parts is None or s > len(self.parts) or self.parts[s - 1] > n_here

    def seat(self, need: float, variant: Variant) -> Seat | None:
        """``paper``: best fit.  The others prefer an idle device, then best fit."""
        asked = need, variant != "paper"
        if self.seats is None:
            return _seat(self.gpus, *asked)
        if asked not in self.seats:
            self.seats[asked] = _seat(self.gpus, *asked)
        return self.seats[asked]


@dataclass(frozen=True, slots=True)
class Request:
    n_bytes: float  # M
    reserve: float = 0.0  # K
    slo_ttft: float = math.inf
    slo_tpot: float = math.inf
    t_w: float = 0.0
    times: Times = _DEFAULT_TIMES
    overlap: bool = True  # Eq. 5; False: Eq. 1
    largest_parts: tuple[float, ...] = ()  # bytes of the largest stage of 1, 2, … stages; else M/s

    def part(self, s: int) -> float:
        """What the worker with most to fetch fetches: layers do not divide evenly, a tied embedding is had twice."""
        return self.largest_parts[s - 1] if s <= len(self.largest_parts) else self.n_bytes / s

    @property
    def need_full(self) -> float:
        return self.n_bytes + self.reserve

    def need_low(self, s: int) -> float:
        return math.ceil(self.need_full / s)


class Placement(NamedTuple):
    server: int
    gpu: int
    shares: bool  # the device already hosts a worker


@dataclass(frozen=True, slots=True)
class Scheme:
    s: int
    w: int
    full: tuple[Placement, ...]
    low: tuple[Placement, ...]
    ttft: float
    tpot: float
    memory: float
    fetch_within_s: float  # deadline of every fetch from now; infinite for a fallback
    fallback: bool = False

    @property
    def sharing(self) -> int:
        return sum(p.shares for p in (*self.full, *self.low))

    @property
    def full_ids(self) -> tuple[int, ...]:
        return tuple(p.server for p in self.full)

    @property
    def low_ids(self) -> tuple[int, ...]:
        return tuple(p.server for p in self.low)


Bandwidth = Callable[[Server, float, float], float]
"""b_i for (server, bytes, seconds until the deadline): the ledger's answer.  0 = must not start there."""


def static_bandwidth(server: Server, n_bytes: float, within_s: float) -> float:
    return server.bandwidth


class Candidate(NamedTuple):
    """A server as one (s, w) sees it; seats are None where the need does not fit."""

    server: Server
    key: tuple[float, float, int]
    full: Seat | None
    low: Seat | None

    @property
    def kappa(self) -> float:
        return self.key[0]

    @property
    def shares(self) -> tuple[bool | None, bool | None]:
        """As full, as low."""
        return self.full and self.full.shares, self.low and self.low.shares


@dataclass(frozen=True, slots=True)
class Size:
    """One (s, w) under consideration and what follows from it alone."""

    request: Request
    s: int
    w: int
    factor: float = field(init=False)
    need_low: float = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "factor", predict.f_factor(self.s, self.w))
        object.__setattr__(self, "need_low", self.request.need_low(self.s))

    @property
    def within_s(self) -> float:
        r = self.request
        left = predict.fetch_time_left(r.slo_ttft, r.t_w, self.s, self.factor, r.times)
        return left if r.overlap else left - r.times.t_c

    @property
    def tpot(self) -> float:
        return predict.tpot(self.s, self.factor, self.request.times)

    @property
    def memory(self) -> float:
        return self.w * self.request.need_full + (self.s - self.w) * self.need_low

    def meets(self, kappa: float) -> bool:
        ttft = self.request.t_w + kappa + predict.pass_s(self.s, self.factor, self.request.times)
        return ttft <= self.request.slo_ttft + _NOISE and self.meets_tpot

    @property
    def meets_tpot(self) -> bool:
        return self.tpot <= self.request.slo_tpot + _NOISE

    def seats(self, server: Server, variant: Variant) -> tuple[Seat | None, Seat | None]:
        """Where a full worker would go, and a low one.  What fits full fits low."""
        if not server.takes_part(self.s):
            return None, None
        full = server.seat(self.request.need_full, variant)
        return full, full if self.s == 1 else server.seat(self.need_low, variant)

    def scheme(self, full: Sequence[Candidate], low: Sequence[Candidate], *, fallback: bool = False) -> Scheme:
        ttft = predict.ttft(self.request.t_w, [c.kappa for c in (*full, *low)], self.factor, self.request.times)
        return Scheme(
            self.s, self.w, tuple(Placement(c.server.id, *c.full) for c in full if c.full),
            tuple(Placement(c.server.id, *c.low) for c in low if c.low), ttft, self.tpot, self.memory,
            math.inf if fallback else self.within_s, fallback,
        )  # fmt: skip


def sizes(request: Request, min_stages: int, max_stages: int, min_full: int) -> list[Size]:
    """Every (s, w) in order."""
    return [size for size in _sizes(request, max_stages) if size.s >= min_stages and size.w >= min(min_full, size.s)]


@lru_cache(maxsize=8)
def _sizes(request: Request, max_stages: int) -> tuple[Size, ...]:
    """One start looks at them several times.  (1, 0) is (1, 1): one worker has everything."""
    return tuple(Size(request, s, w) for s in range(1, max_stages + 1) for w in range(s + 1) if (s, w) != (1, 0))


def candidates(
    servers: Sequence[Server], size: Size, variant: Variant, bandwidth: Bandwidth, *, fallback: bool = False
) -> list[Candidate]:
    """Servers that may take part, by (kappa, 1/b + 1/p, id)."""
    request = size.request
    part, within_s = request.part(size.s), math.inf if fallback else size.within_s
    if within_s < 0:
        return []
    found = []
    for server in servers:
        full, low = size.seats(server, variant)
        if low is None:
            continue
        b = bandwidth(server, part, within_s)
        if b > 0:
            found.append(Candidate(server, key_of(server, part, b, request), full, low))
    return sorted(found, key=lambda c: c.key)


def key_of(server: Server, part: float, b: float, request: Request) -> tuple[float, float, int]:
    times = server.times or request.times
    predictor = predict.kappa if request.overlap else predict.kappa_sequential
    further_tail = times.t_tail - request.times.t_tail  # its own kind of device takes longer over the last tensors
    return predictor(part, b, server.pcie, times) + further_tail, 1 / b + 1 / server.pcie, server.id


def _seat(gpus: Sequence[Gpu], need: float, prefers_idle: bool) -> Seat | None:
    fits = [(gpu.n_workers > 0 and prefers_idle, gpu.free, i) for i, gpu in enumerate(gpus) if gpu.free >= need]
    if not fits:
        return None
    index = min(fits)[2]
    return Seat(index, gpus[index].n_workers > 0)
