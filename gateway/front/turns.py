"""The connections that wait for one of a pool's threads.  They wait here and not in the pool, where nothing could be
taken out again that holds memory or has waited too long.  Namespaces take turns, without weights; all whose keys
were not asked for lately are one."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from gateway.fair import FairQueue, Owner
from gateway.front.connection import Connection


class Turns:
    def __init__(self, pool: ThreadPoolExecutor, n_threads: int) -> None:
        self.pool = pool
        self._free = n_threads
        self._line = FairQueue[Owner, Connection]()
        self._owners: dict[Connection, Owner] = {}  # as they were when their connections joined

    def take(self) -> bool:
        if not self._free:
            return False
        self._free -= 1
        return True

    def join(self, connection: Connection, owner: Owner) -> None:
        self._owners[connection] = owner
        self._line.put(owner, connection)

    def leave(self, connection: Connection) -> None:
        if connection in self._owners:
            self._line.remove(self._owners.pop(connection), connection)

    def pass_on(self) -> Connection | None:
        """A thread is free: return the connection whose turn it is, if any waits."""
        following = self._line.take()
        if following is None:
            self._free += 1
        else:
            del self._owners[following]
        return following
