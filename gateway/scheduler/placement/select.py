"""ParaServe's Algorithm 1 (4.1.2): how many stages, how many of them full, and where.

``paper``        the first (s, w) whose greedy placement meets both SLOs
``slides``       the greedy placement of least (sharing, memory, s, w)
``min_sharing``  the same objective over every placement, then least TTFT, then least ids (the default)

The servers of one group are distinct; a need fits a server if it fits one of the server's devices.  If no scheme meets
the SLOs, the fallback is one full worker on the best server.  If it fits no server, the answer is None: wait.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from gateway.scheduler.placement.schemes import (
    Bandwidth,
    Candidate,
    DeviceFit,
    Request,
    Scheme,
    Server,
    Size,
    Variant,
    candidates,
    key_of,
    sizes,
    static_bandwidth,
)
from gateway.scheduler.placement.search import Possible, least_sharing


@dataclass(frozen=True, slots=True)
class Weighing:
    """Every size that was examined, with its best scheme (None: none meets both objectives), and the scheme that was
    taken."""

    chosen: Scheme | None
    tried: tuple[tuple[Size, Scheme | None], ...]


def select(
    servers: Sequence[Server],
    request: Request,
    *,
    variant: Variant = "min_sharing",
    min_stages: int = 1,
    max_stages: int = 4,
    min_full: int = 0,
    bandwidth: Bandwidth = static_bandwidth,
) -> Scheme | None:
    """Return the scheme of this variant, else the fallback, else None (wait).  ``min_full=0`` is the paper's."""
    return weigh(
        servers,
        request,
        variant=variant,
        min_stages=min_stages,
        max_stages=max_stages,
        min_full=min_full,
        bandwidth=bandwidth,
        thorough=False,
    ).chosen


def weigh(
    servers: Sequence[Server],
    request: Request,
    *,
    variant: Variant,
    min_stages: int,
    max_stages: int,
    min_full: int,
    bandwidth: Bandwidth,
    thorough: bool = True,
    may_be_late: bool = True,
) -> Weighing:
    """Do what :func:`select` does, and return every size that was examined.  If not ``thorough``, sizes are left out
    that can no longer win, that no servers could have in time, or whose time per token is beyond the objective.  The
    choice is the same.  If nothing ``may_be_late``, there is no fallback."""
    best: Scheme | None = None
    tried: list[tuple[Size, Scheme | None]] = []
    possible = Possible(servers, variant, bandwidth)
    every = sizes(request, min_stages, max_stages, min_full)
    for size in every if thorough else in_order(every, variant):
        if not thorough and best is not None and (best.sharing == 0 or best.sharing <= possible.least_sharing(size)):
            continue  # this size cannot share less, and is no smaller
        mixes = possible.mixes(size)
        if not thorough and not mixes:
            continue
        scheme = _best_mix(possible, mixes, variant)
        tried.append((size, scheme))
        if scheme is not None and (best is None or objective(scheme) < objective(best)):
            best = scheme
        if best is not None and variant == "paper":
            break
    if best is None and may_be_late:
        best = fallback(servers, request, variant, bandwidth)
    return Weighing(best, tuple(tried))


def best_of(size: Size, servers: Sequence[Server], variant: Variant, bandwidth: Bandwidth) -> Scheme | None:
    """The best scheme of one size that meets both objectives."""
    possible = Possible(servers, variant, bandwidth)
    return _best_mix(possible, possible.mixes(size), variant)


def _best_mix(possible: Possible, mixes: Iterable[Size], variant: Variant) -> Scheme | None:
    """Return the best scheme of a size on servers of any speeds: the earliest, or for ``min_sharing`` the least shared
    and then the earliest.  ``mixes``: the shortest pass first."""
    best: Scheme | None = None
    for mixed in mixes:
        soonest_s = mixed.request.t_w + possible.runtime_s(mixed) + mixed.work_s
        if best is not None and best.sharing == 0 and best.ttft < soonest_s:
            break  # this pass and every longer one end later; one that ends at the same time may have lesser ids
        found = possible.candidates(mixed)
        scheme = least_sharing(mixed, found) if variant == "min_sharing" else greedy(mixed, found)
        if scheme is not None and (best is None or _order(scheme, variant) < _order(best, variant)):
            best = scheme
    return best


def _order(scheme: Scheme, variant: Variant) -> tuple[int, float, list[int], list[int]]:
    sharing = scheme.sharing if variant == "min_sharing" else 0
    return sharing, scheme.ttft, sorted(scheme.full_ids), sorted(scheme.low_ids)


def in_order(every: Iterable[Size], variant: Variant) -> list[Size]:
    """Return the sizes in the order of examination.  ``paper`` takes the first that meets the SLOs, the others the
    smallest, so that one comes first."""
    return list(every) if variant == "paper" else sorted(every, key=lambda size: (size.memory, size.s, size.w))


def objective(scheme: Scheme) -> tuple[float, ...]:
    return scheme.sharing, scheme.memory, scheme.s, scheme.w


def greedy(size: Size, found: Sequence[Candidate]) -> Scheme | None:
    """Take the w best servers that fit a full worker, then the best of the rest: this is the least max kappa of all
    subsets."""
    full, low = list[Candidate](), list[Candidate]()
    for of_speed, n_full, n_low in size.quotas(found):
        best = [c for c in of_speed if c.full is not None][:n_full]
        taken = {c.server.id for c in best}
        full += best
        low += [c for c in of_speed if c.low is not None and c.server.id not in taken][:n_low]
    if len(full) < size.w or len(low) < size.s - size.w:
        return None
    if not size.meets(max(c.kappa for c in (*full, *low))):
        return None
    return size.scheme(full, low)


def fallback(servers: Sequence[Server], request: Request, variant: Variant, bandwidth: Bandwidth) -> Scheme | None:
    """Return (1, 1) on the best server that it fits.  Its fetch has no deadline, so it never blocks others."""
    size = Size(request, 1, 1)
    found = [c for c in candidates(servers, size, variant, bandwidth, fallback=True) if c.full is not None]
    return size.scheme(found[:1], [], fallback=True) if found else None


def spread(
    servers: Sequence[Server], request: Request, s: int, w: int, *, bandwidth: Bandwidth = static_bandwidth
) -> Scheme | None:
    """Place a forced size that meets no SLO, or has fewer servers than stages: ``s`` workers, the first ``w`` full, on
    as many servers as there are.  The fetches have no deadline.  Return None when there is not enough memory for all
    workers."""
    size = Size(request, s, w)
    free = {server.id: [gpu.free for gpu in server.gpus] for server in servers}
    n_here = dict.fromkeys(free, 0)
    placed: list[Candidate] = []
    for worker in range(s):
        need = request.need_full if worker < w else request.need_low(s)
        options = [_next_seat(server, need, n_here[server.id], free[server.id], size, bandwidth) for server in servers]
        best = min((o for o in options if o is not None), key=lambda c: (n_here[c.server.id], c.key), default=None)
        if best is None or best.full is None:
            return None
        free[best.server.id][best.full.gpu] -= int(need)
        n_here[best.server.id] += 1
        placed.append(best)
    return size.scheme(placed[:w], [c._replace(low=c.full) for c in placed[w:]], fallback=True)


def _next_seat(
    server: Server, need: float, n_here: int, free: Sequence[int], size: Size, bandwidth: Bandwidth
) -> Candidate | None:
    """Place one more worker on ``server``, whose link then carries ``n_here + 1`` parts at once."""
    fits = [(left, i) for i, left in enumerate(free) if left >= need]
    n_bytes = size.request.part(size.s) * (n_here + 1)
    if not fits or not server.takes_part(size.s, n_here) or (b := bandwidth(server, n_bytes, math.inf)) <= 0:
        return None
    gpu = min(fits)[1]
    fit = DeviceFit(gpu, server.gpus[gpu].n_workers > 0 or free[gpu] < server.gpus[gpu].free)
    return Candidate(server, key_of(server, n_bytes, b, size.request), fit, fit, size.speed(server, fit))
