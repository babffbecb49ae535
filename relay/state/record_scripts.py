"""The Lua scripts for writes.  Each writes and counts in one step."""

from __future__ import annotations

from typing import Final

from relay.state.retention import GIVE_WAY
from relay.state.usage_counting import CODE_BYTES, COUNTING, N_ACTIONS

_RELEASE: Final = """
local function release(code, released, seconds, most)
    redis.call('LREM', released, 0, code)
    redis.call('LPUSH', released, code)
    redis.call('EXPIRE', released, seconds)
    redis.call('EXPIRE', code, seconds)
    while redis.call('LLEN', released) > tonumber(most) do
        redis.call('UNLINK', redis.call('RPOP', released))
    end
end
"""
_POOLS: Final = """
-- whether another action than ``name`` has the pool; an older gateway may have deleted one and left its row
local function is_shared(actions, pools, pool, name)
    local rows = redis.call('HGETALL', pools)
    for i = 1, #rows, 2 do
        if rows[i + 1] == pool and rows[i] ~= name and redis.call('HEXISTS', actions, rows[i]) == 1 then return true end
    end
    return false
end
"""
PUT_ACTION: Final = (
    COUNTING
    + CODE_BYTES
    + N_ACTIONS
    + _RELEASE
    + _POOLS
    + """
local last = redis.call('GET', KEYS[2])
if last and last ~= ARGV[4] then
    return {redis.call('HGET', KEYS[1], ARGV[1]) == ARGV[2] and 1 or 0}  -- a repeat, after an answer that was lost
end
local pool, pool_before = ARGV[13], redis.call('HGET', KEYS[8], ARGV[1])
local begins = pool ~= '' and redis.call('HEXISTS', KEYS[1], pool) == 0
local ends = pool_before and pool_before ~= pool and not is_shared(KEYS[1], KEYS[8], pool_before, ARGV[1])
if ARGV[10] == '1' and redis.call('HEXISTS', KEYS[1], ARGV[1]) == 0 then
    return {0}  -- deleted after it was read
end
if ARGV[15] ~= '' and redis.sha1hex(redis.call('HGET', KEYS[1], ARGV[1])) ~= ARGV[15] then
    return {0}  -- changed in place after it was read
end
if KEYS[3] ~= '' and redis.call('EXISTS', KEYS[3]) == 0 then
    return {2}
end
if ARGV[5] ~= '' then
    if redis.call('HEXISTS', KEYS[1], ARGV[1]) == 0 then
        local n = n_actions(KEYS[1]) + 1
        if n > tonumber(ARGV[5]) then return {-1, n} end
    end
    local of_old = redis.call('HSTRLEN', KEYS[1], ARGV[1]) + (tonumber(redis.call('HGET', KEYS[6], ARGV[1])) or 0)
    local more = #ARGV[2] + ARGV[12] - of_old + (begins and #ARGV[14] or 0)
    if ends then more = more - redis.call('HSTRLEN', KEYS[1], pool_before) end
    local n_bytes = more + code_bytes(KEYS[1], KEYS[6])
    local all = n_bytes + all_bytes(KEYS[7])
    local is_over = n_bytes > tonumber(ARGV[6]) or all > tonumber(ARGV[7]) or more > tonumber(ARGV[8])
    if more > 0 and is_over then return {-2, n_bytes} end
    redis.call('HSET', KEYS[7], 'code', n_bytes)
end
redis.call('HSET', KEYS[1], ARGV[1], ARGV[2])
redis.call('SET', KEYS[2], ARGV[3])
if ends then redis.call('HDEL', KEYS[1], pool_before) end
if begins then redis.call('HSET', KEYS[1], pool, ARGV[14]) end
if pool ~= '' then redis.call('HSET', KEYS[8], ARGV[1], pool) else redis.call('HDEL', KEYS[8], ARGV[1]) end
if KEYS[4] ~= '' then release(KEYS[4], KEYS[5], ARGV[9], ARGV[11]) end
if KEYS[3] ~= '' then
    redis.call('PERSIST', KEYS[3])
    redis.call('LREM', KEYS[5], 0, KEYS[3])
    redis.call('HSET', KEYS[6], ARGV[1], ARGV[12])
else
    redis.call('HDEL', KEYS[6], ARGV[1])
end
return {1}
"""
)
"""Write an action, and its pool (thaw/pools.py); the pool that it had before goes when no other action has it.  Its
code stays from then on, and the code that it had before expires."""
_DELETED: Final = """
local function is_after(a, b)  -- of two versions
    local next_a, next_b = string.gmatch(a, '%d+'), string.gmatch(b, '%d+')
    local x, y = next_a(), next_b()
    while x and y and tonumber(x) == tonumber(y) do x, y = next_a(), next_b() end
    return x ~= nil and (y == nil or tonumber(x) > tonumber(y))
end
-- versions: what the keys of last versions begin with
local function remember(deleted, before, versions, actions, name, version, seconds, most)
    redis.call('LREM', deleted, 0, name)
    redis.call('LPUSH', deleted, name)
    redis.call('SET', versions .. name, version, 'EX', seconds)
    while redis.call('LLEN', deleted) > tonumber(most) do
        local oldest = redis.call('RPOP', deleted)
        local last = redis.call('GET', versions .. oldest)
        if last and redis.call('HEXISTS', actions, oldest) == 0 then
            if is_after(last, redis.call('GET', before) or '') then redis.call('SET', before, last) end
            redis.call('UNLINK', versions .. oldest)
        end
    end
    redis.call('EXPIRE', deleted, seconds)
    redis.call('EXPIRE', before, seconds)
end
"""
DELETE_ACTION: Final = (
    _RELEASE
    + _POOLS
    + _DELETED
    + """
local last = redis.call('GET', KEYS[2])
if last and last ~= ARGV[2] then return 0 end
local pool = redis.call('HGET', KEYS[6], ARGV[1])
if pool and not is_shared(KEYS[1], KEYS[6], pool, ARGV[1]) then redis.call('HDEL', KEYS[1], pool) end
redis.call('HDEL', KEYS[6], ARGV[1])
redis.call('HDEL', KEYS[1], ARGV[1])
redis.call('HDEL', KEYS[5], ARGV[1])
redis.call('ZREM', KEYS[7], ARGV[1])
remember(KEYS[8], KEYS[9], KEYS[10], KEYS[1], ARGV[1], ARGV[2], ARGV[3], ARGV[6])
if KEYS[3] ~= '' then release(KEYS[3], KEYS[4], ARGV[4], ARGV[5]) end
return 1
"""
)
"""Delete the action, and its pool when no other action has it, unless another version was written after this one was
read: its code would stay for ever.  The last versions of the latest few stay for a week, as instances of them may still
run.  What is made under another name that was deleted before gets a version above all of those."""
_ENDED: Final = """
local function less(used, field, n)
    if redis.call('HINCRBY', used, field, -n) < 0 then redis.call('HSET', used, field, 0) end
end
local function ended(pending, used, group, id)
    local entry = redis.call('XRANGE', pending, id, id)[1]
    redis.call('XACK', pending, group, id)
    if redis.call('XDEL', pending, id) == 0 then return end
    for i = 1, #entry[2], 2 do
        if entry[2][i] == 'n' then  -- else a version without quotas accepted it
            less(used, 'accepted', 1)
            less(used, 'accepted_bytes', tonumber(entry[2][i + 1]))
        end
    end
end
"""
_NOTE_S: Final = 600
"""How long after its record the note of a stream stays, for clients that go on with it; without it the answer is
computed again."""
END: Final = (
    f"local NOTE_S = {_NOTE_S}\n"
    + COUNTING
    + GIVE_WAY
    + _ENDED
    + """
local record, trace, pending, of_start = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local at = {written = KEYS[5], index = KEYS[6], used = KEYS[7], names = KEYS[8], records = KEYS[9], traces = KEYS[10],
    runs = KEYS[11], streams = KEYS[12]}
local data, id, start_ms, group, entry = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5]
local seconds, most, n_before = tonumber(ARGV[6]), tonumber(ARGV[7]), tonumber(ARGV[8])
local written, FIRST_NAME, FIRST_ROW = 1, 13, 12
if ARGV[9] ~= '' and redis.call('EXISTS', record) == 0 then
    local quota, n_most = tonumber(ARGV[9]), AT_ONCE + #data / OVERHEAD
    local _, freed = give_way(at, #data, n_before, n_most, seconds, most, quota)
    if freed >= #data then quota = math.huge end  -- the namespace has no more than before
    if not has_room(at.used, #data, quota, ARGV[10], ARGV[11]) then
        return {-1, all_bytes(at.used), accepted_bytes(at.used)}
    end
end
if redis.call('SET', record, data, 'NX', 'EX', seconds) then
    local n_bytes = #data + OVERHEAD + NAME * math.max(0, #KEYS - FIRST_NAME)
    for i = FIRST_NAME, #KEYS do n_bytes = n_bytes + #KEYS[i] - #at.names end
    if redis.call('EXPIRE', at.runs .. id, seconds) == 1 then n_bytes = n_bytes + RUN end  -- it goes with the record
    redis.call('EXPIRE', at.streams .. id, NOTE_S, 'LT')
    for i = FIRST_ROW, #ARGV do
        redis.call('RPUSH', trace, ARGV[i])
        n_bytes = n_bytes + #ARGV[i]
    end
    if #ARGV >= FIRST_ROW then redis.call('EXPIRE', trace, seconds) end
    if of_start ~= '' then keep(of_start, seconds) end
    local member = id .. '\\n' .. n_bytes
    redis.call('ZADD', at.index, start_ms, id)
    for i = FIRST_NAME, #KEYS do
        redis.call('ZADD', KEYS[i], start_ms, id)
        keep(KEYS[i], seconds)
        drop_expired(KEYS[i], seconds, at.records)
        member = member .. '\\n' .. string.sub(KEYS[i], #at.names + 1)
    end
    keep(at.index, seconds)
    drop_expired(at.index, seconds, at.records)
    note_written(at, member, n_bytes)
    keep(at.written, seconds)
    add(at.used, n_bytes, redis.call('EXPIRETIME', record))
else
    written = 0
end
if entry ~= '' then ended(pending, at.used, group, entry) end
return {written, all_bytes(at.used), accepted_bytes(at.used)}
"""
)
"""Write a record, its places in the indexes (KEYS[13] and so on: those by name) and its trace, unless the activation
has a record; its 202 has ended in either case.  With limits (ARGV[9] to ARGV[11]) nothing is written, and the answer
is -1, if there is no room, also after older records gave way.  All this is one script, which stops at the first write
that the server refuses, so the 202 stays then."""
PAGE: Final = """
local index, low, high, skip = KEYS[1], ARGV[1], ARGV[2], tonumber(ARGV[3])
local newer = high == '+inf' and 0 or redis.call('ZCOUNT', index, '(' .. high, '+inf')
local n = math.min(redis.call('ZCOUNT', index, low, high), skip + tonumber(ARGV[4]))
if n <= skip then return {} end
return redis.call('ZREVRANGE', index, newer + skip, newer + n - 1)
"""
"""ARGV[4] members of an index after the first ARGV[3], newest first, with scores from ARGV[1] to ARGV[2].
ZREVRANGEBYSCORE would walk over all that are skipped; to count them costs as little as to find one."""
READ_SOME: Final = """
local found, n_bytes = {}, 0
for i, key in ipairs(KEYS) do
    n_bytes = n_bytes + redis.call('STRLEN', key)
    if i > 1 and n_bytes > tonumber(ARGV[1]) then break end
    found[i] = redis.call('GET', key) or ''
end
return found
"""
"""The first of the strings, one at least, as long as they have no more than ARGV[1] bytes together; empty: there is
none."""
ACCEPT: Final = (
    COUNTING
    + """
local n_rows, n_bytes = 0, 0
for i = 6, #ARGV, 2 do
    n_rows, n_bytes = n_rows + 1, n_bytes + #ARGV[i] + OVERHEAD
end
if ARGV[2] ~= '' then
    local n = (tonumber(redis.call('HGET', KEYS[2], 'accepted')) or 0) + n_rows
    local waiting = accepted_bytes(KEYS[2]) + n_bytes
    if n > tonumber(ARGV[2]) then return {'count', n} end
    if waiting > tonumber(ARGV[3]) then return {'quota', waiting} end
    if not has_room(KEYS[2], n_bytes, math.huge, ARGV[4], ARGV[5]) then return {'memory', all_bytes(KEYS[2])} end
end
local said = {''}
for i = 6, #ARGV, 2 do
    local n = #ARGV[i] + OVERHEAD
    local row = {'p', ARGV[i], 'id', ARGV[i + 1], 'o', ARGV[1], 'n', n, 'u', KEYS[2]}
    said[#said + 1] = redis.call('XADD', KEYS[1], '*', unpack(row))
end
redis.call('HINCRBY', KEYS[2], 'accepted', n_rows)
redis.call('HINCRBY', KEYS[2], 'accepted_bytes', n_bytes)
return said
"""
)
"""Accept 202s of one namespace (ARGV[6], ARGV[7] and so on: each with its id), all of them or none."""
MARK: Final = """
local owner = redis.call('GET', KEYS[1])
if owner then return owner end
redis.call('UNLINK', KEYS[1])  -- so that a full server lets a 202 end, whose bytes count already
redis.call('SET', KEYS[1], ARGV[1], 'EX', ARGV[2])
return ARGV[1]
"""
ADD_TRACE: Final = """
local trace, groups, id, seconds, most_bytes = KEYS[1], KEYS[2], ARGV[1], ARGV[2], tonumber(ARGV[4])
for _, old in ipairs(redis.call('LRANGE', groups, ARGV[3] - 1, -1)) do redis.call('UNLINK', KEYS[3] .. old) end
redis.call('LTRIM', groups, 0, ARGV[3] - 2)
if redis.call('EXISTS', trace) == 0 then redis.call('LPUSH', groups, id) end
for i = 5, #ARGV do
    local has = redis.call('MEMORY', 'USAGE', trace, 'SAMPLES', 0) or 0
    if has + #ARGV[i] <= most_bytes then redis.call('RPUSH', trace, ARGV[i]) end
end
if redis.call('TTL', trace) < tonumber(seconds) then redis.call('EXPIRE', trace, seconds) end
"""
"""Add to the trace of a start, and let those of the namespace's oldest starts go.  A record of the start may keep its
trace for longer."""
TAKE_BACK: Final = _ENDED + "for i = 2, #ARGV do ended(KEYS[1], KEYS[2], ARGV[1], ARGV[i]) end"


def texts(*numbers: object) -> tuple[str, ...]:
    """Arguments of a script."""
    return tuple(map(str, numbers))
