"""Parts of the policy that can be left out.

The simulator leaves one out to measure its effect (docs/simulation.md).  A scheduler in production has all of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Parts:
    overlap: bool = True
    """Eq. 5 predicts starts, whose phases overlap.  Without it Eq. 1 predicts them, one phase after another."""
    succession: bool = True
    """One worker takes the place of an idle group."""
    consolidation: bool = True
    """A group becomes one worker while it answers."""


EVERY_PART: Final = Parts()
