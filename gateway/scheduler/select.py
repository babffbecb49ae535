"""Algorithm 1: how many stages, how many of them full, and where.  scheduling-algorithms.md section 3 in code.

``paper``        the first (s, w) whose greedy placement meets both SLOs
``slides``       the greedy placement of least (sharing, memory, s, w)
``min_sharing``  the same objective over every placement, then least TTFT, then least ids (the default)

Servers of one group are distinct; a server fits a need if one of its devices does.  If no scheme meets the SLOs the
fallback is one full worker on the best server, and if none fits, None: wait.
"""

from __future__ import annotations

from collections.abc import Sequence

from gateway.scheduler.schemes import (
    Bandwidth,
    Candidate,
    Request,
    Scheme,
    Server,
    Size,
    Variant,
    candidates,
    sizes,
    static_bandwidth,
)
from gateway.scheduler.search import least_sharing


def select(
    servers: Sequence[Server], request: Request, *, variant: Variant = "min_sharing", min_stages: int = 1,
    max_stages: int = 4, min_full: int = 0, bandwidth: Bandwidth = static_bandwidth,
) -> Scheme | None:  # fmt: skip
    """The scheme of this variant, else the fallback, else None (wait).  ``min_full=0`` is the paper's."""
    best: Scheme | None = None
    for size in sizes(request, min_stages, max_stages, min_full):
        found = candidates(servers, size, variant, bandwidth)
        scheme = least_sharing(size, found) if variant == "min_sharing" else greedy(size, found)
        if scheme is None:
            continue
        if variant == "paper":
            return scheme
        if best is None or _objective(scheme) < _objective(best):
            best = scheme
    return best or fallback(servers, request, variant, bandwidth)


def _objective(scheme: Scheme) -> tuple[float, ...]:
    return scheme.sharing, scheme.memory, scheme.s, scheme.w


def greedy(size: Size, found: Sequence[Candidate]) -> Scheme | None:
    """The w best that fit a full worker, then the best of the rest: least max kappa over all subsets."""
    full = [c for c in found if c.full is not None][: size.w]
    taken = {c.server.id for c in full}
    low = [c for c in found if c.low is not None and c.server.id not in taken][: size.s - size.w]
    if len(full) < size.w or len(low) < size.s - size.w:
        return None
    if not size.meets(max(c.kappa for c in (*full, *low))):
        return None
    return size.scheme(full, low)


def fallback(servers: Sequence[Server], request: Request, variant: Variant, bandwidth: Bandwidth) -> Scheme | None:
    """(1, 1) on the best server that fits it; its fetch has no deadline, so it never blocks others."""
    size = Size(request, 1, 1)
    found = [c for c in candidates(servers, size, variant, bandwidth, fallback=True) if c.full is not None]
    return size.scheme(found[:1], [], fallback=True) if found else None
