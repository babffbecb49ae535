"""The objects of Algorithm 1: servers as offers, a size (s, w), its candidates, and the scheme that results.

A pass is the sum of what each worker adds to it, and that depends on the worker's own device: its kind (t_p, t_d) and
the share of it that a low worker really gets.  A size is therefore examined once for each *mix*: how many full and how
many low workers it takes from servers of each *speed*.  For one mix the pass is a number, and so is the deadline of
every fetch.  Where all servers are of one speed, as in the papers, there is one mix.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Final, Literal, NamedTuple

from gateway.scheduler.placement import predict
from gateway.scheduler.placement.predict import Times, WorkerStart

Variant = Literal["paper", "slides", "min_sharing"]
VARIANTS: Final[tuple[Variant, ...]] = ("paper", "slides", "min_sharing")
_NOISE: Final = 1e-9
"""An SLO that is met exactly counts as met: sums of floats may miss it by ulps."""
_DEFAULT_TIMES: Final = Times()


class DeviceFit(NamedTuple):
    gpu: int
    shares: bool  # the device already hosts a worker


DeviceFits = dict[tuple[float, bool], DeviceFit | None]
"""(bytes, idle devices preferred) → fit; None: no device has so many bytes free."""


class Gpu(NamedTuple):
    free: int
    n_workers: int = 0


class Server(NamedTuple):
    """``id`` breaks ties, so callers number servers by preference (least loaded first)."""

    id: int
    bandwidth: float
    pcie: float
    gpus: tuple[Gpu, ...]
    times: Times | None = None  # those of its own kind of device; None: the request's
    fits: DeviceFits | None = None
    """Earlier answers of ``gpus``.  A caller whose devices have not changed passes the same dictionary again."""
    parts: tuple[int, ...] | None = None
    """For how many of the largest parts of a model in 1, 2, … stages its memory for models has room; None: for any
    number."""
    cell_wait_s: float = 0.0  # until the stem cell that a start takes is there
    is_enforced: bool = True  # a low worker is held to 1/s of its device

    def takes_part(self, s: int, n_here: int = 0) -> bool:
        """True when there is room for a part of ``s`` stages beside ``n_here`` other parts."""
        return self.parts is None or s > len(self.parts) or self.parts[s - 1] > n_here

    def fit(self, need: float, variant: Variant) -> DeviceFit | None:
        """Return the best fit for ``paper``.  The other variants prefer an idle device, then the best fit."""
        asked = need, variant != "paper"
        if self.fits is None:
            return _best_fit(self.gpus, *asked)
        if asked not in self.fits:
            self.fits[asked] = _best_fit(self.gpus, *asked)
        return self.fits[asked]


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
        """Return the bytes of the worker that has most to fetch: layers do not divide evenly, and a tied embedding is
        fetched twice."""
        return self.largest_parts[s - 1] if s <= len(self.largest_parts) else self.n_bytes / s

    @property
    def need_full(self) -> float:
        return self.n_bytes + self.reserve

    def need_low(self, s: int) -> float:
        return math.ceil(self.need_full / s)


class Speed(NamedTuple):
    """The properties that decide how much a worker adds to a pass: the times of its kind of device, and a low worker's
    share."""

    t_p: float
    t_d: float
    t_n: float
    t_tail: float
    low_share: float


class Quota(NamedTuple):
    """Numbers of full and of low workers on servers of one speed."""

    speed: Speed
    n_full: int
    n_low: int


Mix = tuple[Quota, ...]


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
    work_s: float = 0.0  # from readiness to the first token

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
"""b_i for (server, bytes, seconds until the deadline): the ledger's answer.  0 means that the fetch must not start
there, infinite that nothing is fetched.  Where it is less than the server's own bandwidth, fetches that are served
before take the difference."""


def static_bandwidth(server: Server, n_bytes: float, within_s: float) -> float:
    return server.bandwidth


class Candidate(NamedTuple):
    """A server as one (s, w) sees it; fits are None where the need does not fit."""

    server: Server
    key: tuple[float, float, int]
    full: DeviceFit | None
    low: DeviceFit | None
    speed: Speed

    @property
    def kappa(self) -> float:
        return self.key[0]

    @property
    def shares(self) -> tuple[bool | None, bool | None]:
        """True where a worker would share its device, as (full, low); None where it has no fit."""
        return self.full and self.full.shares, self.low and self.low.shares


@dataclass(frozen=True, slots=True)
class Size:
    """One (s, w) under consideration and the values that follow from it alone.  Without a mix, every server is assumed
    to have the request's times, and low workers to be held to 1/s."""

    request: Request
    s: int
    w: int
    mix: Mix = ()
    factor: float = field(init=False)
    times: Times = field(init=False)
    need_low: float = field(init=False)
    _mixed: dict[Mix, Size] = field(init=False, default_factory=dict, compare=False, repr=False)

    def __post_init__(self) -> None:
        factor, times = predict.f_factor(self.s, self.w), self.request.times
        if self.mix:
            factor, times = _blended(self.mix, self.s, times)
        object.__setattr__(self, "factor", factor)
        object.__setattr__(self, "times", times)
        object.__setattr__(self, "need_low", self.request.need_low(self.s))

    def of(self, mix: Mix) -> Size:
        """The same size on servers of these speeds."""
        if mix not in self._mixed:
            self._mixed[mix] = Size(self.request, self.s, self.w, mix)
        return self._mixed[mix]

    def mixes(self, fits: Sequence[tuple[Speed, tuple[int, int]]]) -> list[Size]:
        """This size for every mix of speeds that keeps the objective for a token, the shortest pass first.  ``fits``:
        how many servers of each speed have room for a full worker, and for any."""
        found = [self.of(mix) for mix in _divisions(self.w, self.s - self.w, fits)]
        return sorted((size for size in found if size.meets_tpot), key=lambda size: size.work_s)

    def latest_s(self, times: Sequence[Times]) -> float:
        """The latest deadline, from now, that any mix leaves to the fetches of ``s`` stages on devices of these
        times."""
        if not times:
            return -1.0
        r, t_p, t_n = self.request, min(t.t_p for t in times), min(t.t_n for t in times)
        fastest = replace(r.times, t_p=t_p, t_n=t_n, t_tail=min(t.t_tail for t in times))
        left = predict.fetch_time_left(r.slo_ttft, r.t_w, self.s, 1.0, fastest)
        return left if r.overlap else left - fastest.t_c

    def speed(self, server: Server, low: DeviceFit) -> Speed:
        """``low``: the fit that a low worker would have there."""
        times = server.times or self.request.times
        share = predict.low_share(self.s, is_enforced=server.is_enforced, is_alone=not low.shares)
        return Speed(times.t_p, times.t_d, times.t_n, times.t_tail, share)

    def quotas(self, found: Sequence[Candidate]) -> list[tuple[Sequence[Candidate], int, int]]:
        """The candidates of each speed, with how many full and low workers are to be taken of them."""
        if len(self.mix) <= 1:
            return [(found, self.w, self.s - self.w)]
        return [([c for c in found if c.speed == q.speed], q.n_full, q.n_low) for q in self.mix]

    @property
    def within_s(self) -> float:
        r = self.request
        left = predict.fetch_time_left(r.slo_ttft, r.t_w, self.s, self.factor, self.times)
        return left if r.overlap else left - self.times.t_c

    @property
    def work_s(self) -> float:
        return predict.work_s(self.s, self.factor, self.times)

    @property
    def tpot(self) -> float:
        return predict.tpot(self.s, self.factor, self.times)

    @property
    def memory(self) -> float:
        return self.w * self.request.need_full + (self.s - self.w) * self.need_low

    def meets(self, kappa: float) -> bool:
        ttft = self.request.t_w + kappa + predict.pass_s(self.s, self.factor, self.times)
        return ttft <= self.request.slo_ttft + _NOISE and self.meets_tpot

    @property
    def meets_tpot(self) -> bool:
        return self.tpot <= self.request.slo_tpot + _NOISE

    def fits(self, server: Server, variant: Variant) -> tuple[DeviceFit | None, DeviceFit | None]:
        """Return the fits of a full worker and of a low one.  Where a full worker fits, a low one fits too."""
        if not server.takes_part(self.s):
            return None, None
        full = server.fit(self.request.need_full, variant)
        return full, full if self.s == 1 else server.fit(self.need_low, variant)

    def scheme(self, full: Sequence[Candidate], low: Sequence[Candidate], *, fallback: bool = False) -> Scheme:
        size = self if self.mix else self.of(_mix_of(full, low))
        ttft = predict.ttft(self.request.t_w, [c.kappa for c in (*full, *low)], size.factor, size.times)
        return Scheme(
            self.s,
            self.w,
            tuple(Placement(c.server.id, *c.full) for c in full if c.full),
            tuple(Placement(c.server.id, *c.low) for c in low if c.low),
            ttft,
            size.tpot,
            self.memory,
            math.inf if fallback else size.within_s,
            fallback,
            size.work_s,
        )


def sizes(request: Request, min_stages: int, max_stages: int, min_full: int) -> list[Size]:
    """Every (s, w) in order."""
    return [size for size in _sizes(request, max_stages) if size.s >= min_stages and size.w >= min(min_full, size.s)]


@lru_cache(maxsize=8)
def _sizes(request: Request, max_stages: int) -> tuple[Size, ...]:
    """Cached, because one start asks for them several times.  (1, 0) is the same as (1, 1): one worker has
    everything."""
    return tuple(Size(request, s, w) for s in range(1, max_stages + 1) for w in range(s + 1) if (s, w) != (1, 0))


def candidates(
    servers: Sequence[Server], size: Size, variant: Variant, bandwidth: Bandwidth, *, fallback: bool = False
) -> list[Candidate]:
    """Servers that may take part, by (kappa, 1/b + 1/p, id)."""
    return admitted(fitting(servers, size, variant), size, bandwidth, fallback=fallback)


class Fitting(NamedTuple):
    """A server with a device for at least a low worker of some number of stages."""

    server: Server
    full: DeviceFit | None
    low: DeviceFit
    speed: Speed


def fitting(servers: Iterable[Server], size: Size, variant: Variant) -> list[Fitting]:
    """Return the servers with room for a low worker.  They are the same for every number of full workers."""
    fits = ((server, *size.fits(server, variant)) for server in servers)
    return [Fitting(server, full, low, size.speed(server, low)) for server, full, low in fits if low is not None]


def admitted(
    offered: Sequence[Fitting], size: Size, bandwidth: Bandwidth, *, fallback: bool = False
) -> list[Candidate]:
    """Return the servers of the size's speeds whose links keep the deadline that its mix leaves, by (kappa, 1/b + 1/p,
    id)."""
    request = size.request
    part, within_s = request.part(size.s), math.inf if fallback else size.within_s
    if within_s < 0:
        return []
    speeds, found = {quota.speed for quota in size.mix}, list[Candidate]()
    for server, full, low, speed in offered:
        if speeds and speed not in speeds:
            continue
        b = bandwidth(server, part, within_s)
        if b > 0:
            found.append(Candidate(server, key_of(server, part, b, request), full, low, speed))
    return sorted(found, key=lambda c: c.key)


def key_of(server: Server, part: float, b: float, request: Request) -> tuple[float, float, int]:
    times = server.times or request.times
    if request.overlap:
        kappa = start_of(server, part, b, times).ready_s
    else:
        kappa = predict.kappa_sequential(part, b, server.pcie, times)
    return kappa, 1 / b + 1 / server.pcie, server.id


def start_of(server: Server, part: float, b: float, times: Times) -> WorkerStart:
    """When a worker has its part on ``server``, whose link gives its fetch ``b``."""
    rate, held_s = max(b, server.bandwidth), queue_s(server, part, b)
    return predict.worker_start(part, rate, server.pcie, times, queue_s=held_s, cell_wait_s=server.cell_wait_s)


def queue_s(server: Server, part: float, b: float) -> float:
    """Return how long the link serves other fetches before this fetch ends."""
    return part / b - part / server.bandwidth if b < server.bandwidth else 0.0


def _blended(mix: Mix, s: int, base: Times) -> tuple[float, Times]:
    """F and the times of a pass over workers of several speeds, such that ``t_p * F + t_n * s`` is the sum of what each
    of them adds.  The sums go over the workers and not over the quotas, so that mixes whose workers add the same have
    exactly the same pass.  Rounding would otherwise decide between them, and not the ids."""
    workers = [(q.speed, share) for q in mix for share in [1.0] * q.n_full + [q.speed.low_share] * q.n_low]
    factor = predict.f_general([share for _, share in workers], s)
    times = {(q.speed.t_p, q.speed.t_d, q.speed.t_n, q.speed.t_tail) for q in mix}
    if len(times) == 1:
        ((t_p, t_d, t_n, t_tail),) = times
    else:
        t_p = math.fsum(speed.t_p / s / share for speed, share in workers) / factor
        t_d = math.fsum(speed.t_d / s / share for speed, share in workers) / factor
        t_n = math.fsum(speed.t_n for speed, _ in workers) / s
        t_tail = max(speed.t_tail for speed, _ in workers)
    return factor, replace(base, t_p=t_p, t_d=t_d, t_n=t_n, t_tail=t_tail)


def _mix_of(full: Sequence[Candidate], low: Sequence[Candidate]) -> Mix:
    n_full, n_low = Counter(c.speed for c in full), Counter(c.speed for c in low)
    return tuple(Quota(speed, n_full[speed], n_low[speed]) for speed in n_full | n_low)


def _divisions(n_full: int, n_low: int, fits: Sequence[tuple[Speed, tuple[int, int]]]) -> Iterator[Mix]:
    """Yield every way to take ``n_full`` and ``n_low`` workers from servers of these speeds.  ``fits`` is that of
    ``Size.mixes``."""
    if not fits:
        if n_full == n_low == 0:
            yield ()
        return
    speed, (fit_full, fit_any) = fits[0]
    for full in range(min(n_full, fit_full) + 1):
        for low in range(min(n_low, fit_any - full) + 1):
            mine = (Quota(speed, full, low),) if full + low else ()
            for rest in _divisions(n_full - full, n_low - low, fits[1:]):
                yield (*mine, *rest)


def _best_fit(gpus: Sequence[Gpu], need: float, prefers_idle: bool) -> DeviceFit | None:
    fits = [(gpu.n_workers > 0 and prefers_idle, gpu.free, i) for i, gpu in enumerate(gpus) if gpu.free >= need]
    if not fits:
        return None
    index = min(fits)[2]
    return DeviceFit(index, gpus[index].n_workers > 0)
