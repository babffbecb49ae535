"""Why a group has the size it has: what every other size was worth, and why it was not taken.  For the trace."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

from gateway.scheduler.schemes import Bandwidth, Scheme, Server, Size, Variant, candidates
from gateway.scheduler.select import Weighing, objective


class Reason(enum.StrEnum):
    CHOSEN = "chosen"
    NO_ROOM = "no room"  # not so many servers with so much memory
    TTFT = "ttft"  # later than the objective
    TPOT = "tpot"
    PROMISED = "promised"  # in time, but it would break the deadline of a fetch that was admitted
    SHARING = "sharing"  # more of its workers share a device
    MEMORY = "memory"  # holds more memory
    LARGER = "larger"  # more stages for nothing


@dataclass(frozen=True, slots=True)
class Considered:
    """What stands for a number of stages."""

    s: int
    w: int
    reason: Reason
    ttft: float | None = None  # None: there is no room to say it for
    tpot: float | None = None

    def plain(self) -> dict[str, object]:
        times = {} if self.ttft is None or self.tpot is None else {
            "ttft_s": round(self.ttft, 3), "tpot_s": round(self.tpot, 4)}  # fmt: skip
        return {"stages": self.s, "full": self.w, "why": str(self.reason), **times}


def considered(
    weighing: Weighing, servers: Sequence[Server], variant: Variant, bandwidth: Bandwidth
) -> tuple[Considered, ...]:
    """One for each number of stages that was looked at, fewest first."""
    by_stages: dict[int, list[tuple[Size, Scheme | None]]] = {}
    for size, scheme in weighing.tried:
        by_stages.setdefault(size.s, []).append((size, scheme))
    judged = (_possible(weighing.chosen, each) or _failed(weighing.chosen, each, servers, variant, bandwidth)
              for each in by_stages.values())  # fmt: skip
    return tuple(judged)


def _possible(chosen: Scheme | None, tried: Sequence[tuple[Size, Scheme | None]]) -> Considered | None:
    """The chosen one, else the one with the fewest full workers."""
    schemes = [scheme for _, scheme in tried if scheme is not None]
    if chosen is None or not schemes:
        return None
    if chosen in schemes:
        return Considered(chosen.s, chosen.w, Reason.CHOSEN, chosen.ttft, chosen.tpot)
    return Considered(schemes[0].s, schemes[0].w, _lost_to(chosen, schemes[0]), schemes[0].ttft, schemes[0].tpot)


def _failed(
    chosen: Scheme | None, tried: Sequence[tuple[Size, Scheme | None]], servers: Sequence[Server], variant: Variant,
    bandwidth: Bandwidth,
) -> Considered:  # fmt: skip
    """The one with the most full workers that there is room for: it is the earliest."""
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
    """What the size would have come to on links where it has no deadline to keep."""
    found = candidates(servers, size, variant, bandwidth, fallback=True)
    full = [c for c in found if c.full is not None][: size.w]
    taken = {c.server.id for c in full}
    low = [c for c in found if c.low is not None and c.server.id not in taken][: size.s - size.w]
    return size.scheme(full, low) if len(full) + len(low) == size.s else None
