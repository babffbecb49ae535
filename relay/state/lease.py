"""The scheduler's lease with a fencing token.

``SET NX PX`` takes the lease.  The epoch counter is the token: every command carries it, and hosts refuse an older one,
so a scheduler that was only slow can do no harm (M. Kleppmann, "How to do distributed locking").
"""

from __future__ import annotations

from typing import Any, Final

import redis

from relay.state import keys, redis_link

LEASE_MS: Final = 2_000
"""A successor takes over within 3 s of a kill: at most this, and one more try."""

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
            if not self._redis.set(keys.SCHEDULER_LEASE, self._owner, nx=True, px=LEASE_MS):
                return None
            epoch: Any = self._redis.incr(keys.SCHEDULER_EPOCH)
            return int(epoch)

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
