"""Follows the calls of a namespace in the order in which they end.

Each request is held by the gateway until there is something new, and gives back the cursor of the answer before it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Final

from thaw.errors import PlatformError

if TYPE_CHECKING:
    from thaw.cli.platform_api.client import Client

_HELD_S: Final = 20.0
_PAGE: Final = 200
_KNOWN: Final = 5_000
"""A call may be reported twice: by the list and as one that ended meanwhile, or by two gateways that both ended it."""


def ended(
    client: Client,
    *,
    name: str | None = None,
    since_ms: int | None = None,
    for_s: float | None = None,
    passed_over: Callable[[int], None] = lambda _: None,
) -> Iterator[dict[str, Any]]:
    """Whole records of those that end from now on, and before them of those that began at ``since_ms`` or later.  It
    ends after ``for_s``, or never.  ``passed_over`` is told how many calls, of any name, ended too fast to be followed.
    Raises PlatformError if the platform does not report endings."""
    until_s = None if for_s is None else time.monotonic() + for_s
    cursor = _cursor_of_now(client)
    known = _Known()
    if since_ms is not None:
        yield from filter(known.is_new, _begun_since(client, name, since_ms))
    while (left_s := _HELD_S if until_s is None else min(_HELD_S, until_s - time.monotonic())) > 0:
        reply = _next(client, left_s, after=cursor, name=name)
        if reply is None:
            continue
        cursor = reply["cursor"]
        if reply["passed_over"]:
            passed_over(int(reply["passed_over"]))
        yield from filter(known.is_new, reply["activations"])


class _Known:
    def __init__(self) -> None:
        self._order: deque[str] = deque()
        self._ids: set[str] = set()

    def is_new(self, record: dict[str, Any]) -> bool:
        found = str(record["activationId"])
        if found in self._ids:
            return False
        self._ids.add(found)
        self._order.append(found)
        if len(self._order) > _KNOWN:
            self._ids.discard(self._order.popleft())
        return True


def _cursor_of_now(client: Client) -> str:
    from thaw.cli.platform_api.client import ApiError

    try:
        return str(client.get("endings")["cursor"])
    except ApiError as e:
        if e.http_status != HTTPStatus.NOT_FOUND:
            raise
        raise PlatformError(
            "this platform does not tell what ends, so its calls cannot be followed", hint="update its gateways"
        ) from e


def _next(client: Client, left_s: float, **asked: object) -> dict[str, Any] | None:
    """None: ask again; there was a pause if it was not held."""
    from thaw.cli.platform_api.client import ApiError
    from thaw.cli.platform_api.pauses import pause

    asked_s = time.monotonic()
    try:
        reply: dict[str, Any] = client.get("endings", limit=_PAGE, wait_s=f"{left_s:.3f}", **asked)
    except ApiError as e:
        # 404: of several gateways this one is of an older version
        if e.http_status not in (HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.NOT_FOUND):
            raise
        reply = {}
    if reply and (reply["cursor"] != asked["after"] or time.monotonic() - asked_s >= left_s / 2):
        return reply
    pause(left_s)
    return None


def _begun_since(client: Client, name: str | None, since_ms: int) -> Iterator[dict[str, Any]]:
    """The oldest first.  The list is newest first, and no record that had ended when it was first asked for is newer
    than the first one, so pages up to that one miss nothing."""
    found: list[dict[str, Any]] = []
    upto_ms: int | None = None
    skip = 0
    while page := client.get(
        "activations", name=name, docs=True, limit=_PAGE, skip=skip or None, since=since_ms, upto=upto_ms
    ):
        found += page
        upto_ms = int(found[0]["start"])
        skip += _PAGE
    yield from reversed(found)
