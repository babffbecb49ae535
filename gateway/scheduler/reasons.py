"""Why a group has the size it has: what every other size was worth, and why it was not taken.  For the trace."""

from __future__ import annotations

import enum
import math
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
    """A size, with the least memory among those of its number of stages that do as well."""

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
    found: dict[int, Considered] = {}
    for size, scheme in weighing.tried:
        each = _judge(weighing, size, scheme, servers, variant, bandwidth)
        best = found.get(size.s)
        if best is None or _rank(each) < _rank(best):
            found[size.s] = each
    return tuple(found.values())


def _rank(each: Considered) -> tuple[int, float, int]:
    """Of several w of one s: the chosen one, else the first that was possible, else the earliest."""
    if each.reason is Reason.CHOSEN:
        return 0, 0.0, each.w
    if each.reason in (Reason.SHARING, Reason.MEMORY, Reason.LARGER):
        return 1, 0.0, each.w
    return 2, math.inf if each.ttft is None else each.ttft, each.w


def _judge(
    weighing: Weighing, size: Size, scheme: Scheme | None, servers: Sequence[Server], variant: Variant,
    bandwidth: Bandwidth,
) -> Considered:  # fmt: skip
    chosen = weighing.chosen
    if scheme is not None and chosen is not None:
        reason = Reason.CHOSEN if scheme == chosen else _lost_to(chosen, scheme)
        return Considered(size.s, size.w, reason, scheme.ttft, scheme.tpot)
    relaxed = _without_objectives(size, servers, variant, bandwidth)
    if relaxed is None:
        return Considered(size.s, size.w, Reason.NO_ROOM)
    if chosen is not None and chosen.fallback and (size.s, size.w) == (chosen.s, chosen.w):
        reason = Reason.CHOSEN
    elif relaxed.ttft > size.request.slo_ttft:
        reason = Reason.TTFT
    else:
        reason = Reason.TPOT if relaxed.tpot > size.request.slo_tpot else Reason.PROMISED
    return Considered(size.s, size.w, reason, relaxed.ttft, relaxed.tpot)


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
