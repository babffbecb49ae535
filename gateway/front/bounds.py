"""How long a client may take, and how much memory clients may take together.

A body has to come at a minimum rate, and an answer has to be read at one: after ``k`` bytes the deadline is
``began + grace + k / rate``.  The connection of a client that makes no progress is therefore closed after the grace
time, for any announced length.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

MIB: Final = 1024 * 1024
UNCHECKED_BODY_BYTES: Final = 64 * 1024
"""A body of at most this length is read before its key is checked.  Many clients send head and body in two writes, and
a check of its own for each of them would cost every small request a second turn on a thread."""


CHUNKED_STEP_BYTES: Final = MIB
"""How much memory a long body in chunks gets at a time.  It does not say how long it is."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """Times are seconds, rates bytes a second."""

    head_s: float = 10.0
    idle_s: float = 75.0
    body_s: float = 10.0
    line_s: float = 10.0
    """How long a long body may wait for memory, its head for an answer, and a request for a thread."""
    answer_s: float = 60.0
    rate: float = 64 * 1024
    linger_s: float = 2.0
    """How long a client may be silent before it closes after its last answer."""
    linger_on_s: float = 5.0
    """The same while it still sends: closed then, it would lose the answer."""
    linger_total_s: float = 30.0
    connections: int = 16_384
    per_address: int = 4_096
    """Connections of one address, or one /64 of IPv6; 0: as many as there are."""
    unchecked_bytes: int = 32 * MIB
    """Upper limit for requests that are not complete, wait for a thread, or have one while their keys are not checked.
    Long bodies do not count here."""
    body_bytes: int = 128 * MIB
    """Upper limit for long bodies, from the check of their keys until they are answered."""
    answer_bytes: int = 64 * MIB
    """Upper limit for whole answers that their clients have not read."""

    def body_deadline_s(self, began_s: float, n_bytes: int) -> float:
        return began_s + self.body_s + n_bytes / self.rate

    def answer_deadline_s(self, began_s: float, n_bytes: int) -> float:
        return began_s + self.answer_s + n_bytes / self.rate
