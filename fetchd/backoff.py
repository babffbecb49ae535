"""How long to wait before a store is asked again."""

from __future__ import annotations

import random
from typing import Final

from fetchd.sources.base import Busy
from thaw.errors import StoreUnavailable

_FIRST_S: Final = 0.1
_LONGEST_S: Final = 5.0


def backoff_s(failures: int) -> float:
    """Exponential in the failures so far, jittered, so that many hosts do not come back at once."""
    return random.uniform(0.5, 1.0) * min(_LONGEST_S, _FIRST_S * 2.0 ** (failures - 1))  # noqa: S311


def pause_s(failures: int, error: StoreUnavailable) -> float:
    """The pause after the last of ``failures`` failures: longer than the store has asked for, by a different random
    part on each host."""
    return backoff_s(failures) + (error.after_s if isinstance(error, Busy) else 0.0)
