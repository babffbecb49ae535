"""The connections that wait for one of a pool's threads.  They wait here and not in the pool, where nothing could be
taken out again that holds memory or has waited too long."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from gateway.front.connection import Connection


class Turns:
    def __init__(self, pool: ThreadPoolExecutor, n_threads: int) -> None:
        self.pool = pool
        self._free = n_threads
        self._line: dict[Connection, None] = {}

    def take(self) -> bool:
        if not self._free:
            return False
        self._free -= 1
        return True

    def join(self, connection: Connection) -> None:
        self._line[connection] = None

    def leave(self, connection: Connection) -> None:
        self._line.pop(connection, None)

    def pass_on(self) -> Connection | None:
        """A thread is free: return who has its turn now, if anybody waits."""
        following = next(iter(self._line), None)
        if following is None:
            self._free += 1
        else:
            del self._line[following]
        return following
