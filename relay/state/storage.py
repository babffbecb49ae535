"""How much of the state server each namespace has, and how much it may have.

::

    thaw:used:NS     records  h491011  h491012 …     accepted  accepted_bytes
                     bytes of all records   of each hour         202s that have not ended, and their bytes

The scripts that write a record or a 202, and end one, count it in the same step, so a gateway that is killed leaves no
count behind.  Records expire by themselves after a week, so their bytes are counted by the hour, and an hour is
subtracted when all of it has expired.  Actions and their code are counted where they are, when one is written.

The server's memory has a limit and it evicts nothing, so a full server would refuse everything, the platform's own
state included.  A namespace may therefore have as much as is still free, and at most its quota (the dynamic threshold
of Choudhury and Hahne, 1998): alone it gets half, and however many fill what they may have, the next one still gets
something.  A tenth of the memory is the platform's own.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import redis

from relay.state import keys, redis_link
from thaw.errors import StorageFull, ThawError, TooLarge
from thaw.ids import Namespace
from thaw.quotas import Quotas, who_raises

RECORD_TTL_S: Final = 7 * 24 * 3600
_OVERHEAD: Final = 512
"""What the state server needs for a record or a 202 beside its bytes: keys, and its place in the index."""
_FOR_TENANTS: Final = 0.9
_NO_LIMIT: Final = 2**53
_MUCH_BYTES: Final = 256 * 1024
"""After having written so much, a gateway asks with its next write how much memory is left."""
_ASK_AGAIN_S: Final = 1.0
"""A namespace without room is asked for anew this often, however many of its requests are refused."""

COUNTING: Final = f"""
local OVERHEAD = {_OVERHEAD}
local function sweep(used, hour)
    for _, field in ipairs(redis.call('HKEYS', used)) do
        local of = string.match(field, '^h(%d+)$')
        if of and tonumber(of) < hour - {RECORD_TTL_S // 3600} then
            redis.call('HINCRBY', used, 'records', '-' .. redis.call('HGET', used, field))
            redis.call('HDEL', used, field)
        end
    end
end
local function hour_now() return math.floor(redis.call('TIME')[1] / 3600) end
local function add(used, n)
    local hour = hour_now()
    redis.call('HINCRBY', used, 'records', n)
    if redis.call('HINCRBY', used, 'h' .. hour, n) == n then
        sweep(used, hour)
        redis.call('EXPIRE', used, {RECORD_TTL_S + 7200})
    end
end
local function all_bytes(used)
    local found = redis.call('HMGET', used, 'records', 'accepted_bytes')
    return (tonumber(found[1]) or 0) + (tonumber(found[2]) or 0)
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
local accepted = tonumber(redis.call('HGET', KEYS[1], 'accepted')) or 0
local held = tonumber(redis.call('HGET', KEYS[3], ARGV[1])) or 0
return {redis.call('HLEN', KEYS[2]), n_bytes, all_bytes(KEYS[1]), held, accepted}
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


class Storage:
    """One gateway's knowledge of the state server's room.  It comes with the answers to what the gateway writes anyway.
    Threads may use it."""

    def __init__(
        self, client: redis.Redis, quotas_of: Callable[[Namespace], Quotas], now_s: Callable[[], float] = time.monotonic
    ) -> None:
        self._redis, self.quotas_of, self._now_s = client, quotas_of, now_s
        self._free = _NO_LIMIT
        self._written = 0  # since it was known how much is free
        self._used: dict[Namespace, int] = {}
        self._asked_s: dict[Namespace, float] = {}

    def usage(self, namespace: Namespace) -> Usage:
        """Raises PlatformError."""
        with redis_link.translated("read what a namespace has"):
            found: Any = self._redis.eval(
                _USAGE,
                4,
                keys.used(namespace),
                keys.actions(namespace),
                keys.HELD,
                keys.code_sizes(namespace),
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
        self._free = max(0, int(_FOR_TENANTS * most) - used) if most else _NO_LIMIT

    def is_look_due(self, n_bytes: int) -> bool:
        """``n_bytes`` are about to be written.  True when the answer is to bring INFO memory, too."""
        self._written += n_bytes
        return self._written > _MUCH_BYTES

    def learn(self, namespace: Namespace, used: int) -> None:
        self._used[namespace] = used

    def limit(self, namespace: Namespace) -> int:
        """The bytes of records and 202s that a namespace may have now."""
        return min(self.quotas_of(namespace).record_bytes, self._free)

    def check(self, namespace: Namespace) -> None:
        """Called before an invocation whose record would be kept; costs nothing while there is room.  Raises
        StorageFull."""
        used = self._used.get(namespace, 0)
        if used < self.limit(namespace):
            return
        now_s = self._now_s()
        if now_s - self._asked_s.get(namespace, -_ASK_AGAIN_S) >= _ASK_AGAIN_S:
            self._asked_s[namespace] = now_s
            self.look()
            used = self.usage(namespace).record_bytes
        if used >= self.limit(namespace):
            raise self.full(namespace, used)

    def code_limit(self, namespace: Namespace) -> int:
        """The bytes of actions with their code that a namespace may have now, if they are to become more."""
        return min(self.quotas_of(namespace).code_bytes, self._free)

    def too_much_code(self, namespace: Namespace, n_bytes: int) -> ThawError:
        allowed = self.quotas_of(namespace).code_bytes
        if self._free < allowed:
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
                f"{self._free} are free for all); records expire after a week, an operator raises its maxmemory."
            )
        return StorageFull(
            f"The namespace has no room for more records ({used} of {allowed} bytes); they expire after a week. "
            f"{who_raises('record_bytes', namespace)}."
        )
