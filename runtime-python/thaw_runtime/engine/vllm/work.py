"""How the engine thread spends the time of a request: the evidence of the ``prefill`` phase."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Final

from relay.thread_account import BlockedTime, ThreadAccount
from thaw.tracing.evidence import SHORT_S
from thaw_runtime.process.thread_accounts import Look, OtherThreads

OTHER_STAGES: Final = "the other stages"
_FIRST_REQUESTS: Final = 16
_SHORT_TOKENS: Final = 64
"""Reading the counters of the kernels' threads takes some 40 µs.  This is done only for requests that may take so long
that their time must be explained: those that waited for the start, and those with a long prompt.
"""
_WORTH_SAYING_S: Final = 0.001


@dataclass(frozen=True, slots=True)
class Mark:
    """The engine thread's time spent when a request began.  ``kernels`` is None for a request too short to explain."""

    at_s: float
    spent: tuple[float, float]
    stages_s: float
    kernels: Look | None


class Work:
    """The time that the engine thread has spent.  That thread makes and uses it after a batch, when its kernels'
    threads exist.

    ``stages`` counts the sleep until the other stages of a pipeline have answered; None for a whole model.
    """

    def __init__(self, stages: BlockedTime | None) -> None:
        self._account, self._kernels, self._stages = ThreadAccount(), OtherThreads(), stages
        self._first_left = _FIRST_REQUESTS

    def mark(self, n_tokens: int) -> Mark:
        """Note the time spent by now, when a request of ``n_tokens`` prompt tokens begins."""
        is_looked_at = self._first_left > 0 or n_tokens > _SHORT_TOKENS
        self._first_left = max(0, self._first_left - 1)
        kernels = self._kernels.look() if is_looked_at else None
        return Mark(time.monotonic(), self._account.spent(), self._stages_s(), kernels)

    def since(self, mark: Mark) -> dict[str, object]:
        """The time spent since ``mark``, as attributes of the phase's end."""
        cpu_s, core_wait_s = (now - then for now, then in zip(self._account.spent(), mark.spent, strict=True))
        stages_s = self._stages_s() - mark.stages_s
        waits = {"core_wait_s": core_wait_s, "threads_wait_s": self._threads_wait_s(mark), "wait_s": stages_s}
        found: dict[str, object] = {"cpu_s": round(cpu_s, 4)}
        found |= {name: round(seconds, 4) for name, seconds in waits.items() if seconds > _WORTH_SAYING_S}
        return found | ({"waits_for": OTHER_STAGES} if "wait_s" in found else {})

    def _threads_wait_s(self, mark: Mark) -> float:
        """The wait for the kernels' threads; 0 for a request that is too short to need evidence."""
        if mark.kernels is None or time.monotonic() - mark.at_s <= SHORT_S:
            return 0.0
        return self._kernels.waited_s(mark.kernels, self._kernels.look(scan=True))

    def _stages_s(self) -> float:
        return self._stages.seconds if self._stages is not None else 0.0
