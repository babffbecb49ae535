"""How much of the state server each namespace has, and how much it may have.

::

    thaw:used:NS     records  h491011  h491012 …     accepted  accepted_bytes    code
                     bytes of all records   of each hour         202s that have not ended, and their bytes    of actions

The scripts that write a record or a 202, and end one, count it in the same step, so a gateway that is killed leaves no
count behind.  Records expire by themselves, so their bytes are counted by the hour in which they will (h491011: those
that expire a week after hour 491011), and an hour is subtracted when all of it has expired.  A record that gives way to
a newer one before is subtracted from its hour.  Actions and their code are counted where they are, when one is written,
and their sum is noted for those who write records.

The server's memory has a limit and it evicts nothing, so a full server would refuse everything, the platform's own
state included.  A namespace may therefore have as much as is still free, code and records together, and at most its
quotas (the dynamic threshold of Choudhury and Hahne, 1998): alone it gets half, and however many fill what they may
have, the next one still gets something.  An eighth of the memory is what a namespace may have whatever others have, as
long as anything is free.  A tenth of the memory is the platform's own.

That threshold refuses 202s and actions, and leaves the results out of long records.  Calls whose answer goes to their
client are refused when a namespace has its quota, or when little is left for all.
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
from thaw.errors import StorageFull, ThawError, TooLarge
from thaw.ids import Namespace
from thaw.quotas import RECORD_AGE_S, Quotas, who_raises

RECORD_TTL_S: Final = RECORD_AGE_S
_OVERHEAD: Final = 512
"""What the state server needs for a record or a 202 beside its bytes: keys, and its place in the index."""
SHORT_BYTES: Final = 4096
"""A record up to this length is written whether its namespace has room or not."""
_FOR_TENANTS: Final = 0.9
_FLOOR, _RESERVE = 1 / 8, 1 / 16
"""Parts of the tenants' memory: what a namespace may have however little is free, and what is little for all."""
_NO_LIMIT: Final = 2**53
_MUCH_BYTES: Final = 256 * 1024
"""After having written so much, a gateway asks with its next write how much memory is left."""
_ASK_AGAIN_S: Final = 1.0
"""A namespace without room is asked for anew this often, however many of its requests are refused."""

COUNTING: Final = f"""
local OVERHEAD, WEEK_H = {_OVERHEAD}, {RECORD_TTL_S // 3600}
local function hour_now() return math.floor(redis.call('TIME')[1] / 3600) end
local function sweep(used, hour)
    for _, field in ipairs(redis.call('HKEYS', used)) do
        local of = string.match(field, '^h(%d+)$')
        if of and tonumber(of) < hour - WEEK_H then
            redis.call('HINCRBY', used, 'records', '-' .. redis.call('HGET', used, field))
            redis.call('HDEL', used, field)
        end
    end
end
local function hour_field(expires_s) return 'h' .. (math.floor(expires_s / 3600) - WEEK_H) end
local function add(used, n, expires_s)
    redis.call('HINCRBY', used, 'records', n)
    if redis.call('HINCRBY', used, hour_field(expires_s), n) == n then
        sweep(used, hour_now())
    end
end
local function subtract(used, n, expires_s)
    local field = hour_field(expires_s)
    local counted = tonumber(redis.call('HGET', used, field)) or 0
    n = math.min(n, counted)  -- else a version without quotas wrote some of it
    redis.call('HINCRBY', used, 'records', -n)
    if n == counted then redis.call('HDEL', used, field) else redis.call('HINCRBY', used, field, -n) end
end
local function all_bytes(used)
    local found = redis.call('HMGET', used, 'records', 'accepted_bytes')
    return (tonumber(found[1]) or 0) + (tonumber(found[2]) or 0)
end
-- quota: of records and 202s; share: with the code; free: for all
local function has_room(used, n, quota, share, free)
    local all = all_bytes(used)
    local with_code = all + (tonumber(redis.call('HGET', used, 'code')) or 0)
    return n <= tonumber(free) and all + n <= tonumber(quota) and with_code + n <= tonumber(share)
end
"""
"""Lua that other scripts begin with.  ``used`` is the key of a namespace."""

CODE_BYTES: Final = """
local function code_bytes(actions, sizes)
    local n_bytes = 0
    for _, name in ipairs(redis.call('HKEYS', actions)) do
        n_bytes = n_bytes + redis.call('HSTRLEN', actions, name)
    end
    for _, n in ipairs(redis.call('HVALS', sizes)) do n_bytes = n_bytes + n end
    return n_bytes
end
"""
"""Lua: the bytes of a namespace's actions, with their code in pieces."""

_USAGE: Final = (
    COUNTING
    + CODE_BYTES
    + """
sweep(KEYS[1], hour_now())
local n_bytes = code_bytes(KEYS[2], KEYS[4])
if n_bytes > 0 or redis.call('HEXISTS', KEYS[1], 'code') == 1 then redis.call('HSET', KEYS[1], 'code', n_bytes) end
local accepted = tonumber(redis.call('HGET', KEYS[1], 'accepted')) or 0
local held = tonumber(redis.call('HGET', KEYS[3], ARGV[1])) or 0
return {redis.call('HLEN', KEYS[2]), n_bytes, all_bytes(KEYS[1]), held, accepted, redis.call('ZCARD', KEYS[5])}
"""
)


@dataclass(frozen=True, slots=True)
class Usage:
    """What a namespace has of its quotas."""

    actions: int
    code_bytes: int
    record_bytes: int
    held: int
    accepted: int
    records: int


def expected_bytes(n_result: int) -> int:
    """What a record that is not written yet is going to take at least, if it has no room."""
    return _OVERHEAD + min(n_result, SHORT_BYTES)


class Storage:
    """One gateway's knowledge of the state server's room.  It comes with the answers to what the gateway writes anyway.
    Threads may use it."""

    def __init__(
        self, client: redis.Redis, quotas_of: Callable[[Namespace], Quotas], now_s: Callable[[], float] = time.monotonic
    ) -> None:
        self._redis, self.quotas_of, self._now_s = client, quotas_of, now_s
        self._free = self._for_tenants = _NO_LIMIT
        self._written = 0  # since it was known how much is free
        self._used: dict[Namespace, int] = {}
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
        usage = Usage(*map(int, found))
        self.learn(namespace, usage.record_bytes)
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

    def learn(self, namespace: Namespace, used: int) -> None:
        self._used[namespace] = used

    def expect(self, namespace: Namespace, n_bytes: int) -> None:
        """So many bytes more wait to be written; below 0: they do no longer."""
        with self._expects:
            self._expected[namespace] += n_bytes
            if not self._expected[namespace]:
                del self._expected[namespace]

    def room(self, namespace: Namespace, *, promised: bool = False) -> tuple[int, int, int]:
        """Return the quota of records and 202s, what a namespace may have now of these and code together, and what is
        free for all.  ``promised``: of a result that a 202 has promised; others' greed does not take its place."""
        share = _NO_LIMIT if promised else self._share()
        return self.quotas_of(namespace).record_bytes, share, self._free

    def _share(self) -> int:
        return max(self._free, int(_FLOOR * self._for_tenants))

    def check(self, namespace: Namespace) -> None:
        """Called before an invocation whose record would be kept; costs nothing while there is room.  Raises
        StorageFull."""
        used = self._used.get(namespace, 0) + self._expected.get(namespace, 0)
        if self._may_run(namespace, used):
            return
        now_s = self._now_s()
        if now_s - self._asked_s.get(namespace, -_ASK_AGAIN_S) >= _ASK_AGAIN_S:
            self._asked_s[namespace] = now_s
            self.look()
            used = self.usage(namespace).record_bytes + self._expected.get(namespace, 0)
        if not self._may_run(namespace, used):
            raise self.full(namespace, used)

    def _may_run(self, namespace: Namespace, used: int) -> bool:
        has_little = used < _FLOOR * self._for_tenants and self._free > 0
        is_enough_left = self._free >= _RESERVE * self._for_tenants
        return used < self.quotas_of(namespace).record_bytes and (has_little or is_enough_left)

    def code_limit(self, namespace: Namespace) -> int:
        """The bytes of actions with their code that a namespace may have, if they are to become more."""
        return self.quotas_of(namespace).code_bytes

    def code_share(self) -> tuple[int, int]:
        """Return what a namespace may have now of code and records together, and what is free for all."""
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

    def full(self, namespace: Namespace, used: int) -> StorageFull:
        allowed = self.quotas_of(namespace).record_bytes
        if self._free < allowed:
            return StorageFull(
                f"The state server has no room for more records of the namespace (it has {used} bytes, and "
                f"{self._free} are free for all); records expire, an operator raises its maxmemory."
            )
        return StorageFull(
            f"The namespace has no room for more records ({used} of {allowed} bytes); they expire. "
            f"{who_raises('record_bytes', namespace)}."
        )
