"""The best placement over every subset of servers, without trying them.

For one (s, w) servers differ only in kappa, in what they fit, and in whether their device is shared, so counts of the
five classes (fits full / low, idle / shared) decide what a set of servers can do.  The least sharing of all admissible
servers comes first; then the shortest prefix by kappa that still reaches it; then the least ids inside that prefix.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence
from dataclasses import dataclass

from gateway.scheduler.schemes import Candidate, Scheme, Server, Size, Variant

Shares = bool | None
"""The device that a worker would have hosts one already; None: there is no such device."""


@dataclass(slots=True)
class Classes:
    """How many servers are (as full, as low): ``a`` idle/idle, ``b`` shared/idle, ``c`` shared/shared,
    ``d`` no/idle, ``e`` no/shared."""

    a: int = 0
    b: int = 0
    c: int = 0
    d: int = 0
    e: int = 0

    def count(self, full: Shares, low: Shares, by: int) -> None:
        if full is False:
            self.a += by
        elif full and low:
            self.c += by
        elif full:
            self.b += by
        elif low:
            self.e += by
        elif low is False:
            self.d += by

    def least_sharing(self, n_full: int, n_low: int) -> float:
        """Fewest shared devices with which n_full + n_low distinct servers can be had; infinite: they cannot."""
        best = math.inf
        for from_a in range(min(n_full, self.a) + 1):
            for from_b in range(min(n_full - from_a, self.b) + 1):
                from_c = n_full - from_a - from_b
                if from_c > self.c:
                    continue
                idle = self.a - from_a + self.b - from_b + self.d
                shared = max(0, n_low - idle)
                if shared <= self.c - from_c + self.e:
                    best = min(best, from_b + from_c + shared)
        return best


class DevicesAlone:
    """What servers have memory for, whatever their links: no scheme of a size shares less than that allows."""

    def __init__(self, servers: Sequence[Server], variant: Variant) -> None:
        self._servers, self._variant = servers, variant
        self._of: dict[int, Classes] = {}

    def least_sharing(self, size: Size) -> float:
        if (counts := self._of.get(size.s)) is None:
            counts = self._of[size.s] = Classes()
            for server in self._servers:
                full, low = size.seats(server, self._variant)
                counts.count(full and full.shares, low and low.shares, 1)
        return counts.least_sharing(size.w, size.s - size.w)


def least_sharing(size: Size, found: Sequence[Candidate]) -> Scheme | None:
    """Of all placements that meet the SLOs: least sharing, then TTFT, then sorted full ids, then low ids."""
    admissible = found[: bisect.bisect(found, False, key=lambda c: not size.meets(c.kappa))]  # found is sorted by kappa
    everyone = Classes()
    for candidate in admissible:
        everyone.count(*candidate.shares, 1)
    least = everyone.least_sharing(size.w, size.s - size.w)
    if not math.isfinite(least):
        return None
    prefix = _shortest_prefix(size, admissible, least)
    full = _least_full(size, sorted(prefix, key=lambda c: c.server.id), least)
    return size.scheme(full, _least_low(size, prefix, full, least))


def _shortest_prefix(size: Size, admissible: Sequence[Candidate], least: float) -> list[Candidate]:
    counts, n = Classes(), 0
    for n, candidate in enumerate(admissible, 1):
        counts.count(*candidate.shares, 1)
        if n >= size.s and counts.least_sharing(size.w, size.s - size.w) == least:
            break
    worst = admissible[n - 1].kappa
    return [c for c in admissible if c.kappa <= worst]


def _least_full(size: Size, by_id: Sequence[Candidate], least: float) -> list[Candidate]:
    """Take each server as full, lowest id first, if the rest can still be had; a skipped one may yet be low."""
    counts, taken, cost = Classes(), list[Candidate](), 0
    for candidate in by_id:
        counts.count(*candidate.shares, 1)
    for candidate in by_id:
        if len(taken) == size.w:
            break
        counts.count(*candidate.shares, -1)
        if candidate.full is not None:
            after = cost + candidate.full.shares
            if after + counts.least_sharing(size.w - len(taken) - 1, size.s - size.w) <= least:
                taken.append(candidate)
                cost = after
                continue
        counts.count(None, candidate.shares[1], 1)
    return taken


def _least_low(size: Size, prefix: Sequence[Candidate], full: Sequence[Candidate], least: float) -> list[Candidate]:
    used = {c.server.id for c in full}
    rest = sorted((c for c in prefix if c.server.id not in used), key=lambda c: c.server.id)
    budget = least - sum(c.full.shares for c in full if c.full)
    idle_left = sum(1 for c in rest if c.low and not c.low.shares)
    taken: list[Candidate] = []
    for candidate in rest:
        if len(taken) == size.s - size.w or candidate.low is None:
            continue
        wanted = size.s - size.w - len(taken) - 1
        if candidate.low.shares:
            if budget < 1 or wanted - idle_left > budget - 1:
                continue
            budget -= 1
        else:
            idle_left -= 1
        taken.append(candidate)
    return taken
