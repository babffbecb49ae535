"""The page of a list that a request asks for."""

from __future__ import annotations

from typing import Final

from gateway.api.http import query_int

LIST_DEFAULT: Final = 30
LIST_MAX: Final = 200


def page() -> tuple[int, int]:
    """Return ``limit`` (0 means the most) and ``skip``."""
    limit = query_int("limit", LIST_DEFAULT, high=LIST_MAX)
    return limit or LIST_MAX, query_int("skip", 0) or 0
