"""A start's client of fetchd: it waits for a fetchd that is coming up.

A fetchd that was killed is back within seconds; it spends most of them on filling its pool.  A start that failed
meanwhile would be tried again a few times within one second, and then its request would be lost.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final, TypeVar

from invoker.drivers.socket_wait import wait_listens
from relay.clients.fetch import FetchClient
from relay.protocol.messages import FetchStart, FetchStarted
from thaw.errors import PlatformError, PoolFull, Unavailable
from thaw.model import ModelFacts

T = TypeVar("T")

_COMES_UP_S: Final = 15.0
"""A pool of some gigabytes is filled in this time; a fetchd that needs longer is too late for this start."""


class PatientFetchClient(FetchClient):
    """Calls that begin something wait for fetchd.  Calls that end something do not wait: without fetchd there is
    nothing to end."""

    def inspect(self, uri: str, namespaces: tuple[str, ...] = (), *, deadline_s: float = 60.0) -> ModelFacts:
        return self._once_it_listens(partial(super().inspect, uri, namespaces, deadline_s=deadline_s))

    def start(self, request: FetchStart, *, deadline_s: float = 60.0) -> FetchStarted:
        return self._once_it_listens(partial(super().start, request, deadline_s=deadline_s))

    def _once_it_listens(self, ask: Callable[[], T]) -> T:
        """Both requests may be sent twice: a fetch that has begun is joined."""
        try:
            return ask()
        except PoolFull:
            raise
        except Unavailable:
            if not self._comes_up():
                raise
            return ask()

    def _comes_up(self) -> bool:
        try:
            return wait_listens(self.path, deadline_s=_COMES_UP_S)
        except PlatformError:  # not even its directory is there
            return False
