"""Decides when a consolidation copies another round of KV blocks, and when it stops the pipeline for the last one.
Pure.

While the pipeline decodes, full blocks are copied round by round.  No step is scheduled during the last round.  It
copies the *tail*: the blocks that have become full since, and each request's one block that is not full.
"""

from __future__ import annotations

import enum
import math
from typing import Final

MAX_ROUNDS: Final = 8
"""Each round copies what was computed during the one before.  If the relay is faster than the pipeline computes, two or
three rounds are enough; if it is slower, more rounds do not help."""
TAIL_STEPS: Final = 2.0
"""The number of decode steps that the tail may take (the aim for the stall)."""
MAX_STALL_S: Final = 2.0
"""After MAX_ROUNDS, a tail that would take longer than this is not copied: the group stays a pipeline."""
STOPPED_S: Final = 2 * MAX_STALL_S
"""The longest stop of the pipeline for a tail that does not arrive, counted from the return of the batches in
flight."""
CHANGED_PART: Final = 8
"""About the part of a block with a copy that a round sends: a bit for each element, and the new elements."""
ROUND_BYTES: Final = 64 << 20
"""The most bytes that a round copies from all stages, so that a stage's memory for sending is bounded."""


class Next(enum.Enum):
    COPY = enum.auto()  # another round beside the decoding
    STOP = enum.auto()  # the last round: no step is scheduled until the blocks are here
    GIVE_UP = enum.auto()


def after_round(n_rounds: int, tail_bytes: int, bytes_per_s: float, step_s: float, *, is_catching_up: bool) -> Next:
    """Return what to do after ``n_rounds`` rounds.  ``tail_bytes`` are missing now.  ``bytes_per_s`` is the rate of the
    rounds so far, and ``step_s`` the time of one decode step (infinity: nothing is being decoded).  ``is_catching_up``
    says that the last round left blocks out because of its limit, and that fewer bytes are missing than before it.
    """
    if is_catching_up:
        return Next.COPY
    tail_s = tail_bytes / bytes_per_s if bytes_per_s > 0 else math.inf
    if tail_bytes == 0 or tail_s <= TAIL_STEPS * step_s:
        return Next.STOP
    if n_rounds < MAX_ROUNDS:
        return Next.COPY
    return Next.STOP if tail_s <= MAX_STALL_S else Next.GIVE_UP
