"""One object of a store, as every kind of store describes it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Stored:
    """``modified_s`` is the store's own time of the object's last change, in seconds since 1970."""

    n_bytes: int
    modified_s: float
