"""Lua that counts the data of a namespace.  Other scripts begin with it (storage.py says what is counted where)."""

from __future__ import annotations

from typing import Final

from thaw.action import POOL_MARK
from thaw.quotas import RECORD_AGE_S

RECORD_TTL_S: Final = RECORD_AGE_S
OVERHEAD: Final = 512
"""The bytes of a record or a 202 on the state server beside its content: keys, and its places in the indexes."""
_NAME: Final = 160
"""The bytes of each further place in an index, beside the name."""
_RUN: Final = 160
"""The bytes of the mark of the one run of a 202 (Records.mark_started)."""

COUNTING: Final = f"""
local OVERHEAD, NAME, RUN, WEEK_H = {OVERHEAD}, {_NAME}, {_RUN}, {RECORD_TTL_S // 3600}
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
    if counted <= 0 then return end  -- a version without quotas wrote it
    n = math.min(n, counted)
    redis.call('HINCRBY', used, 'records', -n)
    if n == counted then redis.call('HDEL', used, field) else redis.call('HINCRBY', used, field, -n) end
end
local function accepted_bytes(used) return tonumber(redis.call('HGET', used, 'accepted_bytes')) or 0 end
local function all_bytes(used) return (tonumber(redis.call('HGET', used, 'records')) or 0) + accepted_bytes(used) end
local function of_quota(used) return (tonumber(redis.call('HGET', used, 'kept')) or 0) + accepted_bytes(used) end
-- quota: of records and 202s; share: with the code; free: for all
local function has_room(used, n, quota, share, free)
    local all = all_bytes(used)
    local with_code = all + (tonumber(redis.call('HGET', used, 'code')) or 0)
    return n <= tonumber(free) and of_quota(used) + n <= tonumber(quota) and with_code + n <= tonumber(share)
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

N_ACTIONS: Final = f"""
local function n_actions(actions)
    local n = 0
    for _, name in ipairs(redis.call('HKEYS', actions)) do
        if not string.find(name, '/%{POOL_MARK}[^/]*$') then n = n + 1 end
    end
    return n
end
"""
"""Lua: how many actions a namespace has deployed.  A pool (thaw/pools.py) does not count."""
