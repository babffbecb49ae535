"""How the priorities of one link share the bytes that the link may have on their way through the relay server.

::

    inference │ its part │ what KV and bulk do not use
    KV        │          │ its part │ what bulk does not use
    bulk      │          │          │ its part

Each priority has one part of its own.  It may borrow the parts of the priorities below it, never those of the ones
above: an inference message therefore never waits until a KV message was read.  A priority that begins to send again
while its part is lent gets the part back as the receiver reads, in the order of the priorities; until then the borrower
gets no more than its own part.  The sum of all parts is never exceeded.
"""

from __future__ import annotations

import threading

from relay.protocol.frames import Priority
from relay.transports.base import Flow


class LinkQuota:
    """The quota from one stage to another.  Thread-safe: every priority has a thread that sends."""

    def __init__(self, flow: Flow) -> None:
        self._part_bytes, self._idle_bytes, self._shared = flow.window_bytes, flow.credit_bytes, flow.shared
        self._lock = threading.Lock()
        self._ahead = [0 for _ in Priority]  # bytes on their way, also those of a message that is being sent
        self._total = 0  # the sum of _ahead
        self._taken = [0 for _ in Priority]  # bytes since the link was made, as the receiver has reported them
        self._n_sending = [0 for _ in Priority]

    def begin(self, priority: Priority) -> None:
        """A message waits for room, or is sent chunk by chunk: until ``end`` no other priority borrows this part."""
        with self._lock:
            self._n_sending[priority] += 1

    def end(self, priority: Priority) -> None:
        with self._lock:
            self._n_sending[priority] -= 1

    def take(self, priority: Priority, n_bytes: int) -> bool:
        """Count ``n_bytes`` as being on their way.  False when there is no room for them, and nothing was counted."""
        with self._lock:
            if self._total + n_bytes > self._part_bytes:  # rare; less than one part satisfies every rule
                fits = self._fits_shared if self._shared else self._fits
                if not fits(priority, n_bytes):
                    return False
            self._ahead[priority] += n_bytes
            self._total += n_bytes
            return True

    def report(self, priority: Priority, taken_bytes: int) -> None:
        """The receiver has taken ``taken_bytes`` since the link was made.  Two threads may report the same."""
        with self._lock:
            news = max(0, taken_bytes - self._taken[priority])
            self._taken[priority] += news
            self._ahead[priority] -= news
            self._total -= news

    def reported(self) -> tuple[int, ...]:
        """Bytes that the receiver has taken since the link was made, by priority."""
        with self._lock:
            return tuple(self._taken)

    @property
    def unread_bytes(self) -> int:
        """The sum over all priorities."""
        return self._total

    def _fits(self, priority: Priority, n_bytes: int) -> bool:
        """The rule without sharing.  A message longer than the window begins when nothing else is on its way."""
        ahead = self._ahead[priority]
        return not ahead or ahead + n_bytes <= self._part_bytes

    def _fits_shared(self, priority: Priority, n_bytes: int) -> bool:
        for level in Priority:
            if level <= priority and self._ahead_from(level) + n_bytes > self._parts_from(level):
                return False  # it would take a higher priority's part
        ahead = self._ahead[priority] + n_bytes
        below = sum(self._kept(p) for p in Priority if p > priority)
        return ahead <= self._part_bytes or ahead + below <= self._parts_from(priority)

    def _ahead_from(self, level: Priority) -> int:
        """Bytes ahead at ``level`` and at every lower priority."""
        return sum(self._ahead[level:])

    def _parts_from(self, level: Priority) -> int:
        return (len(Priority) - level) * self._part_bytes

    def _kept(self, priority: Priority) -> int:
        """The bytes that a higher priority must leave to this one.

        A receiver does not report the last bytes it took, so a small rest on its way does not mean that it is in use.
        """
        ahead = self._ahead[priority]
        in_use = self._n_sending[priority] > 0 or ahead > self._idle_bytes
        return max(ahead, self._part_bytes) if in_use else ahead
