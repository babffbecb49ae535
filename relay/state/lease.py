"""The scheduler's lease with a fencing token.

One script takes the lease and raises the epoch, also at a full server.  The epoch counter is the token: every command
carries it, and hosts refuse an older one, so a scheduler that was only slow can do no harm (M. Kleppmann, "How to do
distributed locking").
"""

from __future__ import annotations

from typing import Any, Final

import redis

from relay.state import keys, redis_link
from relay.state.bounded_stream import REPLACE

LEASE_MS: Final = 2_000
"""A successor takes over within 3 s of a kill: at most this, and one more try."""

_ACQUIRE: Final = (
    REPLACE
    + """
if redis.call('EXISTS', KEYS[1]) == 1 then return 0 end
replace_string(KEYS[1], ARGV[1], ARGV[2])
return redis.call('INCR', KEYS[2])
"""
)
_RENEW: Final = (
    "if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('PEXPIRE', KEYS[1], ARGV[2]) end return 0"
)
_RELEASE: Final = "if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('DEL', KEYS[1]) end return 0"


class SchedulerLease:
    def __init__(self, client: redis.Redis, owner: str) -> None:
        self._redis, self._owner = client, owner

    def acquire(self) -> int | None:
        """The new epoch, or None while another scheduler holds the lease."""
        with redis_link.translated("take the scheduler's lease"):
            owned = (keys.SCHEDULER_LEASE, keys.SCHEDULER_EPOCH)
            epoch: Any = self._redis.eval(_ACQUIRE, len(owned), *owned, self._owner, str(LEASE_MS))
        return int(epoch) or None

    def remaining_s(self) -> float:
        """How long the present holder's lease still runs; 0 when there is none."""
        with redis_link.translated("read the scheduler's lease"):
            left_ms: Any = self._redis.pttl(keys.SCHEDULER_LEASE)
        return max(0.0, int(left_ms) / 1000)

    def renew(self) -> bool:
        """Extend the lease.  False means that it was lost: the caller must stop deciding at once."""
        with redis_link.translated("renew the scheduler's lease"):
            kept: Any = self._redis.eval(_RENEW, 1, keys.SCHEDULER_LEASE, self._owner, str(LEASE_MS))
            return bool(kept)

    def release(self) -> None:
        with redis_link.translated("give the scheduler's lease back"):
            self._redis.eval(_RELEASE, 1, keys.SCHEDULER_LEASE, self._owner)
