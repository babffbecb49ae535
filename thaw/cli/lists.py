"""The options that lists have in common, and their order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import typer

NameSort = Annotated[bool, typer.Option("--name-sort", "-n", help="Sort by name, not by the last change.")]
Limit = Annotated[int, typer.Option("--limit", "-l", help="Show at most this many; 0 means 200.")]
Skip = Annotated[int, typer.Option("--skip", "-s", help="Leave out this many at the beginning.")]


def by_name(entities: Sequence[dict[str, Any]], wanted: bool) -> list[dict[str, Any]]:
    """Sorted by whole names if that is ``wanted``, else as they came."""
    return sorted(entities, key=lambda e: f"{e['namespace']}/{e['name']}") if wanted else list(entities)
