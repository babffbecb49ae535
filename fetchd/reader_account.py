"""How a connection's thread spent its time: the evidence of the ``fetch`` phase."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Final

from relay.thread_account import ThreadAccount

STORE: Final = "the store"
SHARE: Final = "its share of the link"
OTHERS: Final = "bytes that another fetch reads"


class ReaderAccount:
    """The account of one reader's thread.  That thread creates and uses it; the account begins then."""

    def __init__(self) -> None:
        self._account = ThreadAccount()
        self._spent = self._account.spent()
        self._waits: dict[str, float] = {}

    @contextmanager
    def waiting_for(self, whom: str) -> Iterator[None]:
        """Count the time that the block sleeps as waiting for ``whom``; the time that it computes does not count."""
        began, busy_s = time.monotonic(), self._account.busy_s()
        try:
            yield
        finally:
            slept_s = time.monotonic() - began - (self._account.busy_s() - busy_s)
            self._waits[whom] = self._waits.get(whom, 0.0) + max(0.0, slept_s)

    def attrs(self) -> dict[str, object]:
        """Attributes of the phase's end.  ``waits_for`` names the longest of the waits."""
        cpu_s, core_wait_s = (now - then for now, then in zip(self._account.spent(), self._spent, strict=True))
        found: dict[str, object] = {"reader_cpu_s": round(cpu_s, 4), "core_wait_s": round(core_wait_s, 4)}
        if self._waits:
            longest = max(self._waits, key=lambda whom: self._waits[whom])
            found |= {"wait_s": round(sum(self._waits.values()), 4), "waits_for": longest}
        return found


def less_stops(attrs: Mapping[str, object], stopped_s: float) -> dict[str, object]:
    """Subtract the time in which the process was stopped: a stopped process waits for nothing, even inside a wait."""
    waited_s = attrs.get("wait_s")
    if not isinstance(waited_s, float):
        return dict(attrs)
    return {**attrs, "wait_s": round(max(0.0, waited_s - stopped_s), 4)}
