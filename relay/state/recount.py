"""Corrects counts: a version of the platform without quotas, or a server that lost a write, changes the data without
its count.  The scheduler does this at its start and now and then."""

from __future__ import annotations

from typing import Any, Final

import redis

from relay.state import keys, redis_link

_MOST_PENDING: Final = 5_000
"""The server serves nobody else during a recount.  With more 202s than this, the recount waits until there are
fewer."""

_HELD: Final = """
local held = {}
for _, row in ipairs(redis.call('HVALS', KEYS[1])) do
    local is_read, demand = pcall(cjson.decode, row)
    if is_read and demand.namespace and not demand.ahead then
        held[demand.namespace] = (held[demand.namespace] or 0) + 1
    end
end
redis.call('DEL', KEYS[2])
for namespace, n in pairs(held) do redis.call('HSET', KEYS[2], namespace, n) end
"""
_ACCEPTED: Final = """
if redis.call('XLEN', KEYS[1]) > tonumber(ARGV[1]) then return end
local n, n_bytes, from = {}, {}, '-'
while from do
    local page = redis.call('XRANGE', KEYS[1], from, '+', 'COUNT', 100)
    for _, entry in ipairs(page) do
        local of = {}
        for i = 1, #entry[2], 2 do of[entry[2][i]] = entry[2][i + 1] end
        if of.u and of.n then  -- else a version without quotas accepted it
            n[of.u], n_bytes[of.u] = (n[of.u] or 0) + 1, (n_bytes[of.u] or 0) + tonumber(of.n)
        end
    end
    from = #page == 100 and '(' .. page[#page][1]
end
for i = 2, #KEYS do
    redis.call('HDEL', KEYS[i], 'accepted', 'accepted_bytes')  -- so that a full server takes it, too
    redis.call('HSET', KEYS[i], 'accepted', n[KEYS[i]] or 0, 'accepted_bytes', n_bytes[KEYS[i]] or 0)
end
"""


def recount(client: redis.Redis) -> None:
    """Count anew the requests that wait and the 202s that have not ended.  Raises PlatformError."""
    with redis_link.translated("count what namespaces have"):
        client.eval(_HELD, 2, keys.DEMAND, keys.HELD)
        used: Any = list(client.scan_iter(match=keys.used("*"), count=1_000))
        client.eval(_ACCEPTED, 1 + len(used), keys.PENDING, *used, str(_MOST_PENDING))
