"""The best placement over every subset of servers, without trying each of them.

For one (s, w) servers differ only in kappa, in which workers fit, and in whether their device is shared.  So counts of
the five classes (fits full / low, idle / shared) decide what a set of servers can do.  The least sharing of all
admissible servers comes first; then the shortest prefix by kappa that still reaches it; then the least ids inside that
prefix.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence
from dataclasses import dataclass

from gateway.scheduler.placement.schemes import (
    Bandwidth,
    Candidate,
    Fitting,
    Scheme,
    Server,
    Size,
    Speed,
    Variant,
    admitted,
    fitting,
    key_of,
)

Shares = bool | None
"""True when the device that a worker would get already hosts one; None when there is no such device."""


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
        """Return the fewest shared devices with which n_full + n_low distinct servers can be taken; infinite when that
        is impossible."""
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


class Possible:
    """Servers that could have a worker: they have a device with room, and a link that could promise the latest deadline
    that any mix of speeds leaves.  They are worked out once for each number of stages.  A fetch that is refused the
    latest deadline is refused every earlier one, and while many links fetch, this leaves out most servers."""

    def __init__(self, servers: Sequence[Server], variant: Variant, bandwidth: Bandwidth) -> None:
        self._servers, self._variant, self._bandwidth = servers, variant, bandwidth
        self._times = list({id(s.times): s.times for s in servers}.values())
        self._of: dict[int, _Offered] = {}

    def least_sharing(self, size: Size) -> float:
        """Return a lower limit: no scheme of this size shares fewer devices."""
        return self._known(size).classes.least_sharing(size.w, size.s - size.w)

    def mixes(self, size: Size) -> list[Size]:
        """Return the mixes of ``Size.mixes`` without those in which even a worker that fetches nothing would be
        late."""
        known = self._known(size)
        if not known.fits:
            return []
        return [mixed for mixed in size.mixes(list(known.fits.items())) if mixed.meets(known.runtime_s)]

    def candidates(self, mixed: Size) -> list[Candidate]:
        return admitted(self._known(mixed).fitting, mixed, self._bandwidth)

    def runtime_s(self, size: Size) -> float:
        """Return when the first worker would be ready if no worker had to fetch; 0 where there is only one mix."""
        return self._known(size).runtime_s

    def _known(self, size: Size) -> _Offered:
        if (known := self._of.get(size.s)) is None:
            known = self._of[size.s] = self._look(size)
        return known

    def _look(self, size: Size) -> _Offered:
        part, within_s = size.request.part(size.s), size.latest_s([t or size.request.times for t in self._times])
        promising = [s for s in self._servers if self._bandwidth(s, part, within_s) > 0] if within_s >= 0 else []
        found = fitting(promising, size, self._variant)
        classes, fits = Classes(), dict[Speed, tuple[int, int]]()
        for each in found:
            classes.count(each.full and each.full.shares, each.low.shares, 1)
            n_full, n_any = fits.get(each.speed, (0, 0))
            fits[each.speed] = n_full + (each.full is not None), n_any + 1
        runtime_s = 0.0
        if len(fits) > 1:  # else there is one mix, and nothing to leave out
            runtime_s = min(key_of(each.server, part, math.inf, size.request)[0] for each in found)
        return _Offered(found, classes, fits, runtime_s)


@dataclass(slots=True)
class _Offered:
    """The servers that are offered for one number of stages."""

    fitting: Sequence[Fitting]
    classes: Classes
    fits: dict[Speed, tuple[int, int]]  # by speed: servers with room for a full worker, and for any
    runtime_s: float


def least_sharing(size: Size, found: Sequence[Candidate]) -> Scheme | None:
    """Return the best of all placements that meet the SLOs: least sharing, then TTFT, then sorted full ids, then low
    ids."""
    admissible = found[: bisect.bisect(found, False, key=lambda c: not size.meets(c.kappa))]  # found is sorted by kappa
    parts = [_Part(*quota) for quota in size.quotas(admissible)]
    if not all(math.isfinite(part.least) for part in parts):
        return None
    worst = max(part.worst_kappa() for part in parts)
    full, low = list[Candidate](), list[Candidate]()
    for part in parts:
        prefix = [c for c in part.found if c.kappa <= worst]
        taken = _least_full(part, sorted(prefix, key=lambda c: c.server.id))
        full += taken
        low += _least_low(part, prefix, taken)
    return size.scheme(_by_id(full), _by_id(low))


def _by_id(found: Sequence[Candidate]) -> list[Candidate]:
    return sorted(found, key=lambda c: c.server.id)


class _Part:
    """The servers of one speed, by kappa, and how many full and low workers are to be taken of them."""

    def __init__(self, found: Sequence[Candidate], n_full: int, n_low: int) -> None:
        self.found, self.n_full, self.n_low = found, n_full, n_low
        everyone = Classes()
        for candidate in found:
            everyone.count(*candidate.shares, 1)
        self.least = everyone.least_sharing(n_full, n_low)

    def worst_kappa(self) -> float:
        """The largest kappa in the shortest prefix that reaches the least sharing."""
        counts = Classes()
        for n, candidate in enumerate(self.found, 1):
            counts.count(*candidate.shares, 1)
            if n >= self.n_full + self.n_low and counts.least_sharing(self.n_full, self.n_low) == self.least:
                return candidate.kappa
        return -math.inf


def _least_full(part: _Part, by_id: Sequence[Candidate]) -> list[Candidate]:
    """Take servers as full workers, lowest id first, where the rest can still be placed; a skipped one may yet be
    low."""
    counts, taken, cost = Classes(), list[Candidate](), 0
    for candidate in by_id:
        counts.count(*candidate.shares, 1)
    for candidate in by_id:
        if len(taken) == part.n_full:
            break
        counts.count(*candidate.shares, -1)
        if candidate.full is not None:
            after = cost + candidate.full.shares
            if after + counts.least_sharing(part.n_full - len(taken) - 1, part.n_low) <= part.least:
                taken.append(candidate)
                cost = after
                continue
        counts.count(None, candidate.shares[1], 1)
    return taken


def _least_low(part: _Part, prefix: Sequence[Candidate], full: Sequence[Candidate]) -> list[Candidate]:
    used = {c.server.id for c in full}
    rest = sorted((c for c in prefix if c.server.id not in used), key=lambda c: c.server.id)
    budget = part.least - sum(c.full.shares for c in full if c.full)
    idle_left = sum(1 for c in rest if c.low and not c.low.shares)
    taken: list[Candidate] = []
    for candidate in rest:
        if len(taken) == part.n_low or candidate.low is None:
            continue
        wanted = part.n_low - len(taken) - 1
        if candidate.low.shares:
            if budget < 1 or wanted - idle_left > budget - 1:
                continue
            budget -= 1
        else:
            idle_left -= 1
        taken.append(candidate)
    return taken
