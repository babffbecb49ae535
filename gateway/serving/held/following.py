"""Goes through a namespace's endings (relay/state/endings.py), for a request that follows them."""

from __future__ import annotations

import redis

from gateway.serving.held.until_news import Looks
from relay.state.endings import Cursor, Ending, Endings, endings_after
from thaw.ids import Namespace


class Followers:
    """The followers of this gateway.  Requests with the same cursor, as all waiting ones have, share one look."""

    def __init__(self, client: redis.Redis) -> None:
        self._client = client
        self._looks = Looks[Endings]()

    def now(self, namespace: Namespace) -> Cursor:
        return endings_after(self._client, namespace, None).cursor

    def after(self, namespace: Namespace, cursor: Cursor) -> tuple[float, Endings]:
        return self._looks.recent((namespace, cursor), lambda: endings_after(self._client, namespace, cursor))


class Following:
    """One request: up to ``limit`` endings after ``cursor`` of records that are listed by ``name``, or of all if it is
    empty.  Each look goes on where the one before ended."""

    def __init__(self, followers: Followers, namespace: Namespace, cursor: Cursor, name: str, limit: int) -> None:
        self._followers, self._namespace, self._name, self._limit = followers, namespace, name, limit
        self.cursor, self.n_missed = cursor, 0
        self.found: list[Ending] = []

    @property
    def has_news(self) -> bool:
        return bool(self.found or self.n_missed)

    def look(self) -> tuple[float, Following]:
        """Raises Unavailable."""
        while True:
            began_s, page = self._followers.after(self._namespace, self.cursor)
            self.n_missed += page.n_missed
            self.cursor = page.cursor
            for ending in page.found:
                if not self._name or ending.is_named(self._name, self._namespace):
                    self.found.append(ending)
                if len(self.found) == self._limit:
                    self.cursor = ending.cursor
                    return began_s, self
            if self.found or not page.has_more:
                return began_s, self
