"""Algorithm 2: how much of one host's link each fetch gets, and which new fetch the link can promise a deadline.

There are two disciplines.  Each has its own advance and admission, and is exact for a link that really shares in its
way (fluid):

``equal``  deadline fetches share the link equally (ParaServe Eq. 3 and 4)
``edf``    the earliest deadline is served first; admits all that ``equal`` admits, and more

Fetches without a deadline (background, fallback) count in neither admission and get the bandwidth that is left over.
The ledger is a belief, which the host's reports of each fetch correct (``correct``).  Units are bytes, bytes/s and
seconds of the scheduler's clock; time never runs backwards in here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final, Literal

Discipline = Literal["equal", "edf"]
DISCIPLINES: Final[tuple[Discipline, ...]] = ("equal", "edf")

_DONE: Final = 1e-3
"""Less than a thousandth of a byte is float noise, not data."""
_SLACK: Final = 1e-9
"""Relative: ``share * time`` may round one ulp below the bytes it was computed from."""


@dataclass(slots=True)
class Fetch:
    """``pending`` bytes at the ledger's time; ``deadline`` is absolute, infinite for background and fallback."""

    pending: float
    deadline: float

    @property
    def promised(self) -> bool:
        return math.isfinite(self.deadline)


class LinkLedger:
    def __init__(self, bytes_per_s: float, discipline: Discipline = "edf", now_s: float = 0.0) -> None:
        if discipline not in DISCIPLINES:
            raise ValueError(f"no such discipline: {discipline}")
        if not (math.isfinite(bytes_per_s) and bytes_per_s > 0):
            raise ValueError(f"a link has a positive bandwidth, not {bytes_per_s!r}")
        self.bytes_per_s, self.discipline, self.now_s = bytes_per_s, discipline, now_s
        self._promises: dict[str, Fetch] = {}  # in order of deadline: admission reads them often, and few are made
        self._others: dict[str, Fetch] = {}
        self._unsaid: dict[str, float] = {}
        """Fetches that have ended by our account and not yet by a report: key → deadline, in case a report says that
        they go on."""
        self.promised_until_s = now_s
        self.busy_until_s = now_s
        """The times when the promised fetches, and when all fetches, will have ended.  A link that is never idle while
        it has work moves the same bytes in any order, so both hold until a fetch comes or goes."""
        self.in_line_after_s = -math.inf
        """A fetch that is due at this time or later waits for every promise and endangers none.  Infinite where no such
        time is known (equal shares, or a promise that is broken already)."""

    # state ---------------------------------------------------------------------------------------------------------

    def pending(self, key: str) -> float:
        fetch = self._known(key)
        return 0.0 if fetch is None else fetch.pending

    def fetches(self) -> dict[str, Fetch]:
        return self._promises | self._others

    @property
    def keeps_one_promise(self) -> bool:
        """True when the link serves in order of deadline and has one promise, which it keeps by all that is known."""
        return len(self._promises) == 1 and math.isfinite(self.in_line_after_s)

    def _known(self, key: str) -> Fetch | None:
        return self._promises.get(key) or self._others.get(key)

    def _book(self, key: str, fetch: Fetch) -> None:
        if not fetch.promised:
            self._others[key] = fetch
            return
        self._promises[key] = fetch
        in_order = sorted(self._promises.items(), key=lambda p: (p[1].deadline, p[0]))
        self._promises = dict(in_order)

    def advance(self, now_s: float) -> None:
        """Let the link run until ``now_s``.  A clock that jumped back changes nothing."""
        if now_s <= self.now_s:
            return
        left, self.now_s = now_s - self.now_s, now_s
        if self._promises:
            run = self._run_equal if self.discipline == "equal" else self._run_in_order
            left = run(self._promises, left)
        if self._others:
            self._run_equal(self._others, left)

    def set_bandwidth(self, bytes_per_s: float, now_s: float) -> None:
        """The link was measured anew.  Fetches that were admitted stay admitted."""
        self.advance(now_s)
        self.bytes_per_s = bytes_per_s
        self._foresee()

    def correct(self, key: str, pending: float, now_s: float) -> None:
        """The host reports how many bytes of a fetch are really left.  One that has ended by our account goes on under
        its old deadline; one that was never booked (or was removed) is ignored."""
        self.advance(now_s)
        fetch = self._known(key)
        if fetch is None and key in self._unsaid and pending > _DONE:
            fetch = Fetch(pending, self._unsaid.pop(key))
            self._book(key, fetch)
        if fetch is None:
            return
        fetch.pending = pending
        if pending <= _DONE:
            self._end(self._promises if fetch.promised else self._others, key)
        self._foresee()

    # admission -----------------------------------------------------------------------------------------------------

    def node_bandwidth(self, now_s: float) -> float:
        """Algorithm 2 as printed (with B/(N+1)): the rate that a new fetch gets, 0 when that would break a promise."""
        self.advance(now_s)
        share = self.bytes_per_s / (len(self._promises) + 1)
        kept = all(_fits(f.pending, share * (f.deadline - now_s)) for f in self._promises.values())
        return share if kept else 0.0

    def bandwidth(self, n_bytes: float, deadline: float, now_s: float) -> float:
        """b_i of Eq. 5 for a fetch of ``n_bytes`` due at ``deadline``; 0 when it must not start."""
        if not math.isfinite(deadline):
            return self._leftover(n_bytes, now_s)
        if self.discipline == "equal":
            share = self.node_bandwidth(now_s)
            return share if _fits(n_bytes, share * (deadline - now_s)) else 0.0
        if not _fits(n_bytes, self.bytes_per_s * (deadline - now_s)):
            return 0.0  # not even on a link that is idle
        if not self._promises:
            return self._mean_rate(n_bytes, 0.0)
        self.advance(now_s)
        ahead = self._ahead(n_bytes, deadline)
        return 0.0 if ahead is None else self._mean_rate(n_bytes, ahead)

    def add(self, key: str, n_bytes: float, deadline: float, now_s: float) -> bool:
        """Admit and book a fetch.  Return False, and book nothing, when a promise would break (its own included)."""
        self.advance(now_s)
        if self._known(key) is not None:
            return True
        if math.isfinite(deadline) and self.bandwidth(n_bytes, deadline, now_s) <= 0:
            return False
        if n_bytes > _DONE:
            self._book(key, Fetch(n_bytes, deadline))
            self._unsaid.pop(key, None)
            self._foresee()
        return True

    def remove(self, key: str, now_s: float) -> None:
        """The fetch completed, failed or was cancelled.  An unknown key is that of a fetch whose end the ledger has
        already seen."""
        self.advance(now_s)
        self._unsaid.pop(key, None)
        if (self._promises.pop(key, None) or self._others.pop(key, None)) is not None:
            self._foresee()

    def _foresee(self) -> None:
        promised = math.fsum(f.pending for f in self._promises.values())
        everything = math.fsum(f.pending for f in self.fetches().values())
        self.promised_until_s = self.now_s + promised / self.bytes_per_s
        self.busy_until_s = self.now_s + everything / self.bytes_per_s
        self.in_line_after_s = self._in_line_after_s()

    def _in_line_after_s(self) -> float:
        last = self._promises[next(reversed(self._promises))].deadline if self._promises else -math.inf
        if math.isinf(last) or (self.discipline == "edf" and self._ahead(0.0, last) is not None):
            return last
        return math.inf

    def _ahead(self, n_bytes: float, deadline: float) -> float | None:
        """Return the bytes served before a new fetch, earliest deadline first; None when some deadline, or its own, is
        not kept."""
        due, ahead = 0.0, None
        for fetch in self._promises.values():
            if ahead is None and fetch.deadline > deadline:
                ahead, due = due, due + n_bytes
                if not _fits(due, self.bytes_per_s * (deadline - self.now_s)):
                    return None
            due += fetch.pending
            if not _fits(due, self.bytes_per_s * (fetch.deadline - self.now_s)):
                return None
        if ahead is None and not _fits(due + n_bytes, self.bytes_per_s * (deadline - self.now_s)):
            return None
        return due if ahead is None else ahead

    def _leftover(self, n_bytes: float, now_s: float) -> float:
        """Return the mean rate of a fetch that waits for all others (an upper bound on what they take, so
        pessimistic)."""
        self.advance(now_s)
        return self._mean_rate(n_bytes, sum(f.pending for f in self.fetches().values()))

    def _mean_rate(self, n_bytes: float, ahead: float) -> float:
        return n_bytes * self.bytes_per_s / (ahead + n_bytes) if n_bytes > 0 else self.bytes_per_s

    def _end(self, among: dict[str, Fetch], key: str) -> None:
        self._unsaid[key] = among.pop(key).deadline

    # the fluid model -----------------------------------------------------------------------------------------------

    def _run_equal(self, fetches: dict[str, Fetch], left: float) -> float:
        """Serve all in equal shares for ``left`` seconds; return the seconds that remain when all have ended."""
        while fetches and left > 0:
            smallest = min(f.pending for f in fetches.values())
            step = min(left, smallest * len(fetches) / self.bytes_per_s)
            moved = smallest if step < left else step * self.bytes_per_s / len(fetches)
            left -= step
            for key in list(fetches):
                fetches[key].pending -= moved
                if fetches[key].pending <= _DONE:
                    self._end(fetches, key)
        return left

    def _run_in_order(self, fetches: dict[str, Fetch], left: float) -> float:
        """Serve one after another for ``left`` seconds; return the seconds that remain when all have ended."""
        for key in list(fetches):
            if left <= 0:
                break
            step = min(left, fetches[key].pending / self.bytes_per_s)
            left -= step
            fetches[key].pending -= step * self.bytes_per_s
            if fetches[key].pending <= _DONE:
                self._end(fetches, key)
        return left


def _fits(n_bytes: float, room: float) -> bool:
    return n_bytes <= room * (1 + _SLACK) + _DONE
