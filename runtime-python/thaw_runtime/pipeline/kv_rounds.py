"""When a consolidation copies another round of KV blocks, and when it stops the pipeline for the last one.  Pure.

While the pipeline decodes, full blocks are copied round by round.  What is left for the last round, for which no step
is scheduled, is the *tail*: blocks that have become full since, and of each request the one block that is not full.
"""

from __future__ import annotations

import enum
import math
from typing import Final

MAX_ROUNDS: Final = 8
"""Each round copies what was computed during the one before.  A relay that is faster than the pipeline computes needs
two or three; with a slower one more rounds do not help."""
TAIL_STEPS: Final = 2.0
"""The tail may take as long as so many decode steps (the aim for the stall)."""
MAX_STALL_S: Final = 2.0
"""After MAX_ROUNDS, a tail that would take longer than this is not copied: the group stays a pipeline."""
STOPPED_S: Final = 2 * MAX_STALL_S
"""How long the pipeline stays stopped for a tail that does not come, once its batches in flight are back."""
CHANGED_PART: Final = 8
"""A round sends about so small a part of a block that has a copy: a bit for each element, and the new elements."""
ROUND_BYTES: Final = 64 << 20
"""A round copies at most so much of all stages, so that what a stage holds for sending is bounded."""


class Next(enum.Enum):
    COPY = enum.auto()  # another round beside the decoding
    STOP = enum.auto()  # the last round: no step is scheduled until the blocks are here
    GIVE_UP = enum.auto()


def after_round(n_rounds: int, tail_bytes: int, bytes_per_s: float, step_s: float, *, is_catching_up: bool) -> Next:
    """What follows ``n_rounds`` rounds.

    ``tail_bytes`` are missing now.  ``bytes_per_s`` is the rate of the rounds so far, and ``step_s`` the time of one
    decode step (infinity: nothing is being decoded).  ``is_catching_up`` says that the last round left blocks out
    because of its limit, and that fewer bytes are missing than before it.
    """
    if is_catching_up:
        return Next.COPY
    tail_s = tail_bytes / bytes_per_s if bytes_per_s > 0 else math.inf
    if tail_bytes == 0 or tail_s <= TAIL_STEPS * step_s:
        return Next.STOP
    if n_rounds < MAX_ROUNDS:
        return Next.COPY
    return Next.STOP if tail_s <= MAX_STALL_S else Next.GIVE_UP
