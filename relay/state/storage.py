"""How much of the state server each namespace has, and how much it may have.

::

    thaw:used:NS     records     h491011  h491012 …    kept               accepted   accepted_bytes   code
                     all bytes   those of each hour    may give way       202s that have not ended    of actions

The scripts that write a record or a 202, and end one, count it in the same step, so a gateway that is killed leaves no
count behind.  Records expire by themselves, so their bytes are counted by the hour in which they will (h491011: those
that expire a week after hour 491011), and an hour is subtracted when all of it has expired.  A record that gives way to
a newer one before (retention.py) is subtracted from its hour.  Those that versions without that order wrote are among
"records" and not among "kept": the quota of bytes is not asked for them, so that newer ones do not give way to them.
Actions and their code are counted where they are, when one is written, and their sum is noted for the writers of
records.

The server's memory has a limit and it evicts nothing, so a full server would refuse everything, the platform's own
state included.  A namespace may therefore have as much as is still free, code and records together, and at most its
quotas (the dynamic threshold of Choudhury and Hahne, 1998): alone it gets half, and even if many namespaces fill their
parts, the next one still gets something.  A namespace may have an eighth of the memory in any case, as long as anything
is free.  A tenth of the memory is the platform's own.

That threshold refuses 202s and actions, and leaves the results out of long records.  Calls whose answer goes to their
client are refused when little is left for all.  A namespace's quota of bytes refuses an invocation only because of
bytes that cannot give way: 202s that have not ended, and results that wait to be written.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import redis

from relay.state import keys, redis_link
from relay.state.retention import make_room
from relay.state.usage_counting import CODE_BYTES, COUNTING, N_ACTIONS, OVERHEAD
from thaw.errors import StorageFull, ThawError, TooLarge
from thaw.ids import Namespace
from thaw.quotas import Quotas, who_raises

SHORT_BYTES: Final = 4096
"""A record up to this length is written whether its namespace has room or not."""
_FOR_TENANTS: Final = 0.9
_FLOOR, _RESERVE = 1 / 8, 1 / 16
"""Parts of the tenants' memory: the part that a namespace may always have, and the free part that counts as little."""
_NO_LIMIT: Final = 2**53
_MUCH_BYTES: Final = 256 * 1024
"""After so many written bytes, a gateway asks with its next write how much memory is left."""
_ASK_AGAIN_S: Final = 1.0
"""A namespace without room is asked for anew this often, however many of its requests are refused."""

_USAGE: Final = (
    COUNTING
    + CODE_BYTES
    + N_ACTIONS
    + """
local had_code = redis.call('HDEL', KEYS[1], 'code')  -- so that a full server takes the rest, too
sweep(KEYS[1], hour_now())
local n_bytes = code_bytes(KEYS[2], KEYS[4])
if n_bytes > 0 or had_code == 1 then redis.call('HSET', KEYS[1], 'code', n_bytes) end
local accepted = tonumber(redis.call('HGET', KEYS[1], 'accepted')) or 0
local held = tonumber(redis.call('HGET', KEYS[3], ARGV[1])) or 0
return {n_actions(KEYS[2]), n_bytes, all_bytes(KEYS[1]), held, accepted, redis.call('ZCARD', KEYS[5]),
    accepted_bytes(KEYS[1])}
"""
)


@dataclass(frozen=True, slots=True)
class Usage:
    """How much of its quotas a namespace uses."""

    actions: int
    code_bytes: int
    record_bytes: int
    held: int
    accepted: int
    records: int


def expected_bytes(n_result: int) -> int:
    """The fewest bytes that a record to be written will take, even if its namespace has no room."""
    return OVERHEAD + min(n_result, SHORT_BYTES)


class Storage:
    """One gateway's knowledge of the free memory on the state server.  It comes with the answers to the gateway's
    ordinary writes.  Thread-safe."""

    def __init__(
        self, client: redis.Redis, quotas_of: Callable[[Namespace], Quotas], now_s: Callable[[], float] = time.monotonic
    ) -> None:
        self._redis, self.quotas_of, self._now_s = client, quotas_of, now_s
        self._free = self._for_tenants = _NO_LIMIT
        self._written = 0  # since it was known how much is free
        self._used: dict[Namespace, int] = {}
        self._accepted: dict[Namespace, int] = {}  # the part of it that 202s take
        self._expected = Counter[Namespace]()
        self._expects = threading.Lock()
        self._asked_s: dict[Namespace, float] = {}

    def usage(self, namespace: Namespace) -> Usage:
        """Raises PlatformError."""
        with redis_link.translated("read what a namespace has"):
            found: Any = self._redis.eval(
                _USAGE,
                5,
                keys.used(namespace),
                keys.actions(namespace),
                keys.HELD,
                keys.code_sizes(namespace),
                keys.activations(namespace),
                namespace,
            )
        *numbers, accepted_bytes = map(int, found)
        usage = Usage(*numbers)
        self.learn(namespace, usage.record_bytes, accepted_bytes)
        return usage

    def look(self) -> None:
        """Learn how much memory is left.  Raises PlatformError."""
        with redis_link.translated("read the state server's memory"):
            self.learn_memory(self._redis.info("memory"))

    def learn_memory(self, info: Any) -> None:
        """``info``: the answer to INFO memory.  A server without a limit has room."""
        self._written = 0
        most, used = int(info["maxmemory"]), int(info["used_memory"])
        self._for_tenants = int(_FOR_TENANTS * most) if most else _NO_LIMIT
        self._free = max(0, self._for_tenants - used) if most else _NO_LIMIT

    @property
    def is_limited(self) -> bool:
        """Whether the state server has a limit of memory, as far as it was asked."""
        return self._for_tenants < _NO_LIMIT

    def is_look_due(self, n_bytes: int) -> bool:
        """``n_bytes`` are about to be written.  True when the answer is to bring INFO memory, too."""
        self._written += n_bytes
        return self._written > _MUCH_BYTES

    def learn(self, namespace: Namespace, used: int, accepted: int) -> None:
        """``used``: the bytes of records and 202s; ``accepted``: those of the latter."""
        self._used[namespace], self._accepted[namespace] = used, accepted

    def expect(self, namespace: Namespace, n_bytes: int) -> None:
        """Count ``n_bytes`` more that wait to be written; a negative number: they no longer wait."""
        with self._expects:
            self._expected[namespace] += n_bytes
            if not self._expected[namespace]:
                del self._expected[namespace]

    def room(self, namespace: Namespace, *, promised: bool = False) -> tuple[int, int, int]:
        """Return the quota of records and 202s, the bytes that a namespace may have now of these and code together, and
        the bytes that are free for all.  ``promised``: the bytes are for the result of a 202, so the use of others must
        not displace it."""
        share = _NO_LIMIT if promised else self._share()
        return self.quotas_of(namespace).record_bytes, share, self._free

    def room_of_202s(self, namespace: Namespace) -> tuple[int, int, int]:
        """Like room(), for a 202.  202s that have not ended take at most half of the quota, so that their results have
        the other half."""
        quota, share, free = self.room(namespace)
        return quota // 2, share, free

    def _share(self) -> int:
        return max(self._free, int(_FLOOR * self._for_tenants))

    def check(self, namespace: Namespace) -> None:
        """Called before an invocation whose record would be kept; costs nothing while there is room.  Raises
        StorageFull."""
        if self._may_run(namespace):
            return
        now_s = self._now_s()
        if now_s - self._asked_s.get(namespace, -_ASK_AGAIN_S) >= _ASK_AGAIN_S:
            self._asked_s[namespace] = now_s
            make_room(self._redis, namespace, self.quotas_of(namespace))  # it may have become smaller
            self.look()
            self.usage(namespace)
        if not self._may_run(namespace):
            waiting, allowed = self._waiting(namespace), self.quotas_of(namespace).record_bytes
            if waiting < allowed:
                raise self.full(self._used.get(namespace, 0))
            raise self.too_much_waits(namespace, waiting, allowed)

    def _may_run(self, namespace: Namespace) -> bool:
        expected = self._expected.get(namespace, 0)
        has_little = self._used.get(namespace, 0) + expected < _FLOOR * self._for_tenants and self._free > 0
        is_enough_left = self._free >= _RESERVE * self._for_tenants
        return self._waiting(namespace) < self.quotas_of(namespace).record_bytes and (has_little or is_enough_left)

    def _waiting(self, namespace: Namespace) -> int:
        """The bytes that do not give way to others."""
        return self._accepted.get(namespace, 0) + self._expected.get(namespace, 0)

    def code_share(self) -> tuple[int, int]:
        """Return the bytes that a namespace may have now of code and records together, and the bytes that are free for
        all."""
        return self._share(), self._free

    def too_much_code(self, namespace: Namespace, n_bytes: int) -> ThawError:
        allowed = self.quotas_of(namespace).code_bytes
        if n_bytes <= allowed:
            return StorageFull(
                f"The state server has no room for so many actions of the namespace ({n_bytes} bytes, and {self._free} "
                "are free for all); an operator raises its maxmemory."
            )
        return TooLarge(
            f"The namespace's actions are larger than allowed: {n_bytes} > {allowed} bytes. "
            f"{who_raises('code_bytes', namespace)}."
        )

    def full(self, used: int) -> StorageFull:
        return StorageFull(
            f"The state server has no room for more records of the namespace (it has {used} bytes, and {self._free} "
            "are free for all). They expire at the age that its quota says; an operator makes room at once with "
            "smaller quotas (thaw namespace quota), or raises the server's maxmemory."
        )

    def too_much_waits(self, namespace: Namespace, n_bytes: int, allowed: int) -> StorageFull:
        return StorageFull(
            "The namespace has no room for more records: its 202s that have not ended, and results that wait to be "
            f"written, have {n_bytes} of {allowed} bytes. Try again when some of them have ended. "
            f"{who_raises('record_bytes', namespace)}."
        )
