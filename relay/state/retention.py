"""How long records are kept: the oldest give way to newer ones.

::

    thaw:written:NS     microsecond of writing → ID\\nBYTES\\nNAME…     every record, the names under which it is listed

A record gives way when its namespace has more records or more bytes than its quotas, or when it is older than they say;
whichever comes first.  The oldest is the one that was written first, by the state server's clock, and not the one that
began first: a run may take an hour, and its result has been there for a moment then.  The records of one transaction
stay until the next, so a 202's result is never deleted in the step that writes it.  202s that have not ended count as
bytes and do not give way.

Most records expire by themselves, and later writes remove their places in the indexes.  A write removes at most as many
bytes as it brings, and a hundred records more: the state server serves no other client meanwhile.  So after a quota has
become smaller, the next writes remove the records beyond it.
"""

from __future__ import annotations

from typing import Any, Final

import redis

from relay.state import keys, redis_link
from relay.state.usage_counting import COUNTING, RECORD_TTL_S
from thaw.ids import Namespace
from thaw.quotas import RECORDS, Quotas

_AT_ONCE: Final = 100
_PARTS: Final = 10
_MOST_AGE_S: Final = 10 * 365 * 24 * 3600
"""The state server takes no longer times than some hundred million years, and an operator's typing error must not cost
records."""
_NO_LIMIT: Final = 2**53

GIVE_WAY: Final = f"""
local AT_ONCE = {_AT_ONCE}
local function now_us()
    local now = redis.call('TIME')
    return now[1] * 1e6 + now[2]
end
-- at: the keys "written", "index" and "used", and what keys of "names", "records", "traces", "runs" and "streams"
-- begin with
local function take_away(at, member, expires_s)
    local id, n_bytes, names = string.match(member, '^([^\\n]*)\\n(%d+)(.*)$')
    redis.call('ZREM', at.written, member)
    redis.call('HINCRBY', at.used, 'kept', -tonumber(n_bytes))
    redis.call('ZREM', at.index, id)
    for name in string.gmatch(names, '[^\\n]+') do redis.call('ZREM', at.names .. name, id) end
    if expires_s < 0 then return 0 end
    redis.call('UNLINK', at.records .. id, at.traces .. id, at.runs .. id, at.streams .. id)
    subtract(at.used, tonumber(n_bytes), expires_s)
    return tonumber(n_bytes)
end
-- n_more: bytes that are about to be written; n_kept: so many of the newest stay; n_most: so many go at most.  Returns
-- how many went, and their bytes
local function give_way(at, n_more, n_kept, n_most, seconds, most, quota)
    local since = now_us() - seconds * 1e6
    local n, n_gone, freed = redis.call('ZCARD', at.written), 0, 0
    if n == 0 then redis.call('HDEL', at.used, 'kept') end  -- the index has expired with all that was in it
    while n_gone < n_most and n > n_kept do
        local oldest = redis.call('ZRANGE', at.written, 0, 0, 'WITHSCORES')
        local expires_s = redis.call('EXPIRETIME', at.records .. string.match(oldest[1], '^[^\\n]*'))
        local is_due = n > most or tonumber(oldest[2]) < since or of_quota(at.used) + n_more > quota
        if expires_s >= 0 and not is_due then break end
        freed = freed + take_away(at, oldest[1], expires_s)
        n, n_gone = n - 1, n_gone + 1
    end
    return n_gone, freed
end
-- the record is listed in the order of writing, whatever the clock does
local function note_written(at, member, n_bytes)
    local last = redis.call('ZRANGE', at.written, -1, -1, 'WITHSCORES')[2]
    if not last then redis.call('HDEL', at.used, 'kept') end
    redis.call('ZADD', at.written, math.max(now_us(), (tonumber(last) or 0) + 1), member)
    redis.call('HINCRBY', at.used, 'kept', n_bytes)
end
local function keep(key, seconds)
    if redis.call('TTL', key) < seconds then redis.call('EXPIRE', key, seconds) end
end
-- records that versions without this index wrote expire, or those versions took them out of one index only
local function drop_expired(index, seconds, records)
    local before = string.format('(%.0f', now_us() / 1e3 - seconds * 1e3)
    for _, id in ipairs(redis.call('ZRANGEBYSCORE', index, '-inf', before, 'LIMIT', 0, 2)) do
        if redis.call('EXISTS', records .. id) == 0 then redis.call('ZREM', index, id) end
    end
end
"""
"""Lua, after COUNTING.  EXPIRE … GT would leave a key as it is that does not expire yet, so keep() asks."""

_FORGET: Final = (
    COUNTING
    + GIVE_WAY
    + """
local at = {written = KEYS[1], index = KEYS[2], used = KEYS[3], names = KEYS[4], records = KEYS[5], traces = KEYS[6],
    runs = KEYS[7], streams = KEYS[8]}
local n_kept, seconds, most, quota = tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4])
local n_gone = give_way(at, 0, n_kept, n_kept + AT_ONCE, seconds, most, quota)
return {n_gone == n_kept + AT_ONCE and 1 or 0, all_bytes(at.used), accepted_bytes(at.used)}
"""
)


def limits(quotas: Quotas | None) -> tuple[int, int, int]:
    """Return for how many seconds records are kept, how many of them, and how many bytes."""
    if quotas is None:
        return RECORD_TTL_S, RECORDS, _NO_LIMIT
    return min(max(1, quotas.record_age_s), _MOST_AGE_S), max(1, quotas.records), quotas.record_bytes


def forget(client: Any, namespace: Namespace, quotas: Quotas | None, n_written: int = 0) -> Any:
    """Let a part of the oldest records give way.  ``client`` may be a pipeline, ``n_written`` of whose writes are
    records of the namespace; these stay.  The answer: whether there may be more, and the bytes of all records and 202s,
    and of the latter."""
    own = (keys.written(namespace), keys.activations(namespace), keys.used(namespace), *keys.of_records(namespace))
    return client.eval(_FORGET, len(own), *own, *map(str, (n_written, *limits(quotas))))


def make_room(client: redis.Redis, namespace: Namespace, quotas: Quotas) -> None:
    """Let the oldest records of a namespace give way, a thousand at most.  Raises PlatformError."""
    with redis_link.translated("take old records away"):
        for _ in range(_PARTS):
            if not forget(client, namespace, quotas)[0]:
                return
