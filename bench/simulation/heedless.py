"""The ledger without admission, for an ablation: it predicts the bandwidth of a fetch and refuses no fetch."""

from __future__ import annotations

import math

from gateway.scheduler.placement.link_ledger import LinkLedger


class HeedlessLedger(LinkLedger):
    """Promises a new fetch its deadline even if earlier promises are then broken."""

    def bandwidth(self, n_bytes: float, deadline: float, now_s: float) -> float:
        if not math.isfinite(deadline):
            return super().bandwidth(n_bytes, deadline, now_s)
        self.advance(now_s)
        promises = [fetch for fetch in self.fetches().values() if fetch.promised]
        if self.discipline == "equal":
            return self.bytes_per_s / (len(promises) + 1)
        return self._mean_rate(n_bytes, sum(fetch.pending for fetch in promises if fetch.deadline <= deadline))

    def _in_line_after_s(self) -> float:
        """Return inf where there are promises, because this time is not known then.

        An index of hosts therefore excludes no link because of its promises.
        """
        return math.inf if any(fetch.promised for fetch in self.fetches().values()) else -math.inf
