"""The credentials that let a group's stages into the relay server.  They are made before the commands and taken back
when the group has ended."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import redis

from relay.state import credentials, redis_link
from thaw.ids import GroupId

_PREFIX: Final = credentials.ref(GroupId(""))
_TIMEOUT_S: Final = 2.0
"""The time limit of one call to the relay server.  One more call is made if the connection turned out to be old."""


class GroupCredentials:
    """``relay_url`` may be empty: then there are no groups of several stages either."""

    def __init__(self, state: redis.Redis, relay_url: str) -> None:
        self._state = state
        self._relay = redis_link.connect(relay_url, timeout_s=_TIMEOUT_S, n_retries=1) if relay_url else None

    def issue(self, group_id: GroupId) -> None:
        """Raises PlatformError when either server does not accept it."""
        if self._relay is not None:
            credentials.issue(self._state, self._relay, group_id)

    def revoke(self, group_id: GroupId) -> None:
        """Raises PlatformError; the state server then still names the credential."""
        if self._relay is not None:
            credentials.revoke(self._state, self._relay, group_id)

    def groups(self) -> Iterator[GroupId]:
        """Yield the groups whose credentials the state server knows."""
        with redis_link.translated("list the credentials of groups"):
            for key in self._state.scan_iter(match=f"{_PREFIX}*", count=1_000):
                yield GroupId(redis_link.text(key).removeprefix(_PREFIX))

    def close(self) -> None:
        if self._relay is not None:
            self._relay.close()
