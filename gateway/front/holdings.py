"""Accounts of one thing by owner: each connection's amount, and the order in which they came.  Pure.

Where something is full, the owner that holds most gives way (longest queue drop; Suter et al., 1998): a crowd closes
its own connections, and a tenant that hoards takes nothing from another one.
"""

from __future__ import annotations

from collections.abc import Iterator

from gateway.fair import Owner
from gateway.front.connection import Connection


class Holdings:
    def __init__(self) -> None:
        self.total = 0
        self._held: dict[Connection, tuple[Owner, int]] = {}
        self._sums: dict[Owner, int] = {}
        self._of: dict[Owner, dict[Connection, None]] = {}

    def __contains__(self, connection: Connection) -> bool:
        return connection in self._held

    def __len__(self) -> int:
        return len(self._held)

    def __iter__(self) -> Iterator[Connection]:
        return iter(self._held)

    def set(self, connection: Connection, amount: int = 1) -> None:
        """Set the amount that the owner holds by this connection.  It replaces an earlier amount, and keeps its age."""
        owner = connection.namespace
        before = self._held.get(connection)
        if before is not None:
            if before[0] != owner:
                self.drop(connection)
            else:
                self.total -= before[1]
                self._sums[owner] -= before[1]
        self._held[connection] = (owner, amount)
        self.total += amount
        self._sums[owner] = self._sums.get(owner, 0) + amount
        self._of.setdefault(owner, {})[connection] = None

    def drop(self, connection: Connection) -> None:
        held = self._held.pop(connection, None)
        if held is None:
            return
        owner, amount = held
        self.total -= amount
        self._sums[owner] -= amount
        of = self._of[owner]
        del of[connection]
        if not of:
            del self._of[owner], self._sums[owner]

    def heaviest(self, more_than: int = 0) -> Iterator[Connection]:
        """Yield the connections of the owner that holds most, the oldest first.  Yield none if it holds
        ``more_than`` or less.  The caller must not change anything between two of them."""
        if not self._held:
            return iter(())
        owner = max(self._sums, key=lambda o: (self._sums[o], o is None))
        return iter(self._of[owner] if self._sums[owner] > more_than else ())
