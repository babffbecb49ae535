"""Follows the calls of a namespace as they end.  Each request is held by the gateway until there is something new."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

from thaw.errors import PlatformError

if TYPE_CHECKING:
    from thaw.cli.client import Client

_HELD_S: Final = 20.0
_PAGE: Final = 200
_UNHELD: Final = 5
"""So many answers in a row that came early and had nothing new are those of a platform that does not know wait_s."""
_KEPT: Final = 50
"""A page that is half full is begun anew with so many records, so that calls which began earlier and end later still
have a place in it."""


def ended(
    client: Client, *, name: str | None = None, since_ms: int | None = None, for_s: float | None = None
) -> Iterator[dict[str, Any]]:
    """Whole records, in the order of their starts where several come at once: those that began at ``since_ms`` or
    later, by default those that end from now on.  It ends after ``for_s``, or never.  Raises PlatformError where the
    platform holds no requests: asking it all the time would be a flood."""
    until_s = None if for_s is None else time.monotonic() + for_s
    page: list[dict[str, Any]] = []
    if since_ms is None:
        page = client.get("activations", limit=_KEPT, name=name)
        since_ms = min((record["start"] for record in page), default=0)
    seen = {record["activationId"] for record in page}
    n_unheld = 0
    while n_unheld < _UNHELD:
        asked_s = time.monotonic()
        left_s = _HELD_S if until_s is None else min(_HELD_S, until_s - asked_s)
        if left_s <= 0:
            return
        page = client.get(
            "activations", name=name, docs=True, limit=_PAGE, since=since_ms, known=len(page), wait_s=f"{left_s:.3f}"
        )
        news = [record for record in reversed(page) if record["activationId"] not in seen]
        is_early = left_s > 1 and time.monotonic() - asked_s < left_s / 2
        n_unheld = n_unheld + 1 if is_early and not news else 0
        yield from news
        seen |= {record["activationId"] for record in page}
        if len(page) > _PAGE // 2:
            since_ms = page[_KEPT]["start"]
            page = [record for record in page if record["start"] >= since_ms]
    raise PlatformError("this platform holds no requests, so its calls cannot be followed", hint="update its gateways")
