"""The scheduler's knowledge of stem cells: which kinds are deployed, and when starts of them began on which host."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from thaw.host import StemTarget
from thaw.ids import ActionName, HostId

REPEAT_S: Final = 10.0
"""A host that has not done what it was told after this time is told again.  Hosts report once a second."""


@dataclass(slots=True)
class StemCells:
    """``deployed``, ``deleted`` and ``began`` note what happens; the others answer how many cells are worth keeping."""

    kinds: dict[ActionName, str] = field(default_factory=dict)
    _n_deployed: dict[str, int] = field(default_factory=dict)
    _unused_since_s: dict[str, float] = field(default_factory=dict)
    _began: dict[tuple[HostId, str], deque[float]] = field(default_factory=dict)
    _asked: dict[tuple[HostId, str], tuple[int, float]] = field(default_factory=dict)
    _since_s: float | None = None  # when this memory began

    def deployed(self, name: ActionName, kind: str) -> None:
        if self.kinds.get(name) == kind:
            return
        self.kinds[name] = kind
        self._n_deployed[kind] = self._n_deployed.get(kind, 0) + 1
        self._unused_since_s.pop(kind, None)

    def deleted(self, name: ActionName, now_s: float) -> None:
        if (kind := self.kinds.pop(name, None)) is not None:
            self._n_deployed[kind] -= 1
            if self._n_deployed[kind] == 0:
                self._unused_since_s[kind] = now_s

    def began(self, host_id: HostId, kind: str, window_s: float, now_s: float) -> None:
        """Note that a start began.  Starts older than ``window_s`` are forgotten here, because ``at_once`` is never
        called for a host that names no kind."""
        began = self._began.setdefault((host_id, kind), deque())
        began.append(now_s)
        while began[0] < now_s - window_s:
            began.popleft()

    def unused_s(self, kind: str, now_s: float) -> float | None:
        """Return for how long no action of this kind has been deployed; None while one is."""
        if self._n_deployed.get(kind, 0) > 0:
            return None
        return now_s - self._unused_since_s.setdefault(kind, now_s)

    def watched_s(self, now_s: float) -> float:
        """Return for how long starts have been noted here: a successor has seen none yet."""
        if self._since_s is None:
            self._since_s = now_s
        return now_s - self._since_s

    def at_once(self, host_id: HostId, kind: str, window_s: float, within_s: float, now_s: float) -> int:
        """The most starts that began within ``within_s`` of one another, in the last ``window_s``."""
        began = self._began.get((host_id, kind))
        if began is None:
            return 0
        while began and began[0] <= now_s - window_s:
            began.popleft()
        if not began:
            del self._began[host_id, kind]
        most, times = 0, list(began)
        first = 0
        for last, at_s in enumerate(times):
            while times[first] <= at_s - within_s:
                first += 1
            most = max(most, last - first + 1)
        return most

    def is_asked(self, host_id: HostId, target: StemTarget, wanted: int, now_s: float) -> bool:
        """True when the host keeps ``wanted`` cells, or was told to a moment ago.  Otherwise it counts as told now."""
        key = host_id, target.kind
        if target.count == wanted:
            self._asked.pop(key, None)
            return True
        count, asked_s = self._asked.get(key, (-1, -math.inf))
        if count == wanted and now_s - asked_s < REPEAT_S:
            return True
        self._asked[key] = wanted, now_s
        return False

    def forget_hosts(self, present: Iterable[HostId]) -> None:
        here = frozenset(present)
        for key in [k for k in {*self._began, *self._asked} if k[0] not in here]:
            self._began.pop(key, None)
            self._asked.pop(key, None)
