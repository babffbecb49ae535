"""Why a group has the size and the hosts it has, for the trace.

The trace says how good every other size was and why it was not taken, and when a worker would have had its part on each
host.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gateway.scheduler.placement.predict import Tier, WorkerStart
from gateway.scheduler.placement.schemes import (
    Bandwidth,
    Request,
    Scheme,
    Server,
    Size,
    Variant,
    candidates,
    queue_s,
    start_of,
)
from gateway.scheduler.placement.select import Weighing, objective


class Reason(enum.StrEnum):
    CHOSEN = "chosen"
    NO_ROOM = "no room"  # too few servers with enough memory
    TTFT = "ttft"  # later than the objective
    TPOT = "tpot"
    PROMISED = "promised"  # in time, but it would break the deadline of a fetch that was admitted
    SHARING = "sharing"  # more of its workers share a device
    MEMORY = "memory"  # holds more memory
    LARGER = "larger"  # more stages without a gain


@dataclass(frozen=True, slots=True)
class Considered:
    """The scheme or the size that stands for one number of stages."""

    s: int
    w: int
    reason: Reason
    ttft: float | None = None  # None: there is no room, so nothing to predict
    tpot: float | None = None

    def plain(self) -> dict[str, object]:
        times = (
            {}
            if self.ttft is None or self.tpot is None
            else {"ttft_s": round(self.ttft, 3), "tpot_s": round(self.tpot, 4)}
        )
        return {"stages": self.s, "full": self.w, "why": str(self.reason), **times}


@dataclass(frozen=True, slots=True)
class Estimate:
    """The cost model's answer for a worker of the chosen size on one server.  ``start`` is None where no worker can
    begin: there is no memory for one, or the link has promises to keep."""

    role: str  # "full", "low"; empty: it was not chosen
    tier: Tier
    start: WorkerStart | None
    queue_s: float = 0.0  # its fetch waits for others
    cell_wait_s: float = 0.0  # its runtime waits for the stem cell
    why: Reason | None = None  # why it has no start

    def plain(self) -> dict[str, object]:
        found: dict[str, object] = {"from": str(self.tier), **({"role": self.role} if self.role else {})}
        if self.start is None:
            return found | {"why": str(self.why)}
        seconds = {
            "ready_s": self.start.ready_s,
            "runtime_s": self.start.runtime_s,
            "fetched_s": self.start.fetched_s,
            "copied_s": self.start.copied_s,
            "queue_s": self.queue_s,
            "cell_wait_s": self.cell_wait_s,
        }
        return found | {name: round(value, 3) for name, value in seconds.items() if value}


def estimates(
    scheme: Scheme,
    servers: Sequence[Server],
    request: Request,
    variant: Variant,
    bandwidth: Bandwidth,
    tier: Callable[[Server, float], Tier],
) -> list[tuple[int, Estimate]]:
    """Return (server id, estimate) of each server: the chosen ones in order of stage, then the others by when they
    would be ready."""
    stages = [*((p.server, "full") for p in scheme.full), *((p.server, "low") for p in scheme.low)]
    order = {server: (k, role) for k, (server, role) in reversed(list(enumerate(stages)))}
    size = Size(request, scheme.s, scheme.w)
    n_here = {server: sum(s == server for s, _ in stages) for server, _ in stages}
    found = []
    for server in servers:
        place, role = order.get(server.id, (len(stages), ""))
        n_bytes = request.part(scheme.s) * n_here.get(server.id, 1)
        has_room = bool(role) or size.fits(server, variant)[1] is not None
        b = bandwidth(server, n_bytes, scheme.fetch_within_s) if has_room else 0.0
        each = _estimate(server, request, n_bytes, b, (role, tier(server, n_bytes)), has_room=has_room)
        found.append((place, float("inf") if each.start is None else each.start.ready_s, server.id, each))
    return [(server_id, each) for *_, server_id, each in sorted(found, key=lambda f: f[:3])]


def _estimate(
    server: Server, request: Request, n_bytes: float, b: float, seen: tuple[str, Tier], *, has_room: bool
) -> Estimate:
    role, tier = seen
    if b <= 0:
        return Estimate(role, tier, None, why=Reason.PROMISED if has_room else Reason.NO_ROOM)
    waits_s = queue_s(server, n_bytes, b) if tier is Tier.REMOTE else 0.0
    start = start_of(server, n_bytes, b, server.times or request.times)
    return Estimate(role, tier, start, waits_s, server.cell_wait_s)


def considered(
    weighing: Weighing, servers: Sequence[Server], variant: Variant, bandwidth: Bandwidth
) -> tuple[Considered, ...]:
    """Return one entry for each number of stages that was examined, the fewest stages first."""
    by_stages: dict[int, list[tuple[Size, Scheme | None]]] = {}
    for size, scheme in weighing.tried:
        by_stages.setdefault(size.s, []).append((size, scheme))
    judged = (
        _possible(weighing.chosen, each) or _failed(weighing.chosen, each, servers, variant, bandwidth)
        for each in by_stages.values()
    )
    return tuple(judged)


def _possible(chosen: Scheme | None, tried: Sequence[tuple[Size, Scheme | None]]) -> Considered | None:
    """Return the entry of the chosen scheme, else of the one with the fewest full workers."""
    schemes = [scheme for _, scheme in tried if scheme is not None]
    if chosen is None or not schemes:
        return None
    if chosen in schemes:
        return Considered(chosen.s, chosen.w, Reason.CHOSEN, chosen.ttft, chosen.tpot)
    return Considered(schemes[0].s, schemes[0].w, _lost_to(chosen, schemes[0]), schemes[0].ttft, schemes[0].tpot)


def _failed(
    chosen: Scheme | None,
    tried: Sequence[tuple[Size, Scheme | None]],
    servers: Sequence[Server],
    variant: Variant,
    bandwidth: Bandwidth,
) -> Considered:
    """Return the entry of the size with the most full workers that there is room for: it would be the earliest."""
    for size, _ in reversed(tried):
        relaxed = _without_objectives(size, servers, variant, bandwidth)
        if relaxed is None:
            continue
        request = size.request
        if chosen is not None and chosen.fallback and (size.s, size.w) == (chosen.s, chosen.w):
            reason = Reason.CHOSEN
        elif relaxed.ttft > request.slo_ttft:
            reason = Reason.TTFT
        else:
            reason = Reason.TPOT if relaxed.tpot > request.slo_tpot else Reason.PROMISED
        return Considered(size.s, size.w, reason, relaxed.ttft, relaxed.tpot)
    return Considered(tried[0][0].s, tried[0][0].w, Reason.NO_ROOM)


def _lost_to(chosen: Scheme, scheme: Scheme) -> Reason:
    mine, best = objective(scheme), objective(chosen)
    if mine[0] > best[0]:
        return Reason.SHARING
    return Reason.MEMORY if mine[1] > best[1] else Reason.LARGER


def _without_objectives(size: Size, servers: Sequence[Server], variant: Variant, bandwidth: Bandwidth) -> Scheme | None:
    """Return the result that the size would have had on links where it has no deadline to keep."""
    found = candidates(servers, size, variant, bandwidth, fallback=True)
    full = [c for c in found if c.full is not None][: size.w]
    taken = {c.server.id for c in full}
    low = [c for c in found if c.low is not None and c.server.id not in taken][: size.s - size.w]
    return size.scheme(full, low) if len(full) + len(low) == size.s else None
