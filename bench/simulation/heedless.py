"""The ledger without its admission: it foretells what a fetch would get and refuses none.  For an ablation."""

from __future__ import annotations

import math

from gateway.scheduler.placement.link_ledger import LinkLedger


class HeedlessLedger(LinkLedger):
    """A new fetch is promised its deadline whatever becomes of the deadlines that were promised before."""

    def bandwidth(self, n_bytes: float, deadline: float, now_s: float) -> float:
        if not math.isfinite(deadline):
            return super().bandwidth(n_bytes, deadline, now_s)
        self.advance(now_s)
        promises = [fetch for fetch in self.fetches().values() if fetch.promised]
        if self.discipline == "equal":
            return self.bytes_per_s / (len(promises) + 1)
        return self._mean_rate(n_bytes, sum(fetch.pending for fetch in promises if fetch.deadline <= deadline))

    def _in_line_after_s(self) -> float:
        """Where promises are there it cannot be said, so an index of hosts leaves no link out for them."""
        return math.inf if any(fetch.promised for fetch in self.fetches().values()) else -math.inf
