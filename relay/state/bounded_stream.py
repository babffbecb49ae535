"""Streams that have a limit in entries and in bytes, and that a full state server still takes.

::

    thaw:events          f=… n=700   f=… n=1500   f=… n=1900      n: the bytes of all frames up to this one, ever
    thaw:events:bytes    1900

So two entries tell the bytes between them, and a reader for which an entry does not begin where the one before it ended
has missed something (:func:`is_next`).

A server at its limit of memory refuses commands that may take more, but no removals, and it refuses nothing in a script
that has removed something: it could not stop half-way.  So here the oldest entries go before the new one comes, in one
script, and a stream that filled the server empties itself.  Other rows with a limit of their own are replaced in the
same way (:data:`REPLACE`).  What has none must not be: its first write has to be the one that may be refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

_OVERHEAD: Final = 64
"""The bytes of an entry beside its frame: its id, its fields, and its part of the stream's own tree."""

APPEND: Final = f"""
-- of all entries, when n bytes of frames have come up to the next one
local function bytes_of(stream, n, n_entries)
    local first = redis.call('XRANGE', stream, '-', '+', 'COUNT', 1)[1][2]
    if first[3] == 'n' then return n - first[4] + n_entries * {_OVERHEAD} end
    return redis.call('MEMORY', 'USAGE', stream)  -- a version without limits of bytes wrote it
end
local function append(stream, frame, most_entries, most_bytes)
    redis.call('XTRIM', stream, 'MAXLEN', '~', most_entries)
    local counter = stream .. ':bytes'
    local n, left = (tonumber(redis.call('GET', counter)) or 0) + #frame, redis.call('XLEN', stream)
    while left > 0 and bytes_of(stream, n, left) > tonumber(most_bytes) do
        left = math.floor(left / 2)
        redis.call('XTRIM', stream, 'MAXLEN', left)
    end
    redis.call('SET', counter, string.format('%.0f', n))
    return redis.call('XADD', stream, '*', 'f', frame, 'n', string.format('%.0f', n))
end
"""
"""Lua: append a frame; the older half goes for as long as there are too many bytes.  The first entry may have more than
the limit by itself."""
REPLACE: Final = """
local function replace_field(key, field, value)
    redis.call('HDEL', key, field)
    redis.call('HSET', key, field, value)
end
local function replace_string(key, value, lasts_ms)
    redis.call('UNLINK', key)
    redis.call('SET', key, value, 'PX', lasts_ms)
end
"""
"""Lua: write a row of the platform's own that a full server takes, too."""
_REPLACE_ROWS: Final = REPLACE + "for i = 1, #ARGV, 2 do replace_field(KEYS[1], ARGV[i], ARGV[i + 1]) end"
_GROUP: Final = """
if redis.call('EXISTS', KEYS[1]) == 1 then
    for _, group in ipairs(redis.call('XINFO', 'GROUPS', KEYS[1])) do
        if group[2] == ARGV[1] then return end
    end
end
redis.call('XTRIM', KEYS[1], 'MINID', '0')
redis.call('XGROUP', 'CREATE', KEYS[1], ARGV[1], '0', 'MKSTREAM')
"""
_ONE: Final = APPEND + "return append(KEYS[1], ARGV[1], ARGV[2], ARGV[3])"


def append(client: Any, stream: str, frame: bytes, most_entries: int, most_bytes: int) -> Any:
    """``client`` may be a pipeline."""
    return client.eval(_ONE, 2, stream, counter(stream), frame, str(most_entries), str(most_bytes))


def replace_rows(client: Any, key: str, rows: Mapping[str, bytes]) -> None:
    """Write rows of the platform's own into a hash."""
    client.eval(_REPLACE_ROWS, 1, key, *(part for row in rows.items() for part in row))


def create_group(client: Any, stream: str, group: str) -> None:
    """Have the consumer group from the stream's begin on, if there is none yet."""
    client.eval(_GROUP, 1, stream, group)


def counter(stream: str) -> str:
    """The key of the number of bytes."""
    return f"{stream}:bytes"


def upto(fields: dict[bytes, bytes]) -> int | None:
    """The bytes of all frames up to this one; None: a version without limits of bytes wrote it."""
    n = fields.get(b"n")
    return None if n is None else int(n)


def is_next(fields: dict[bytes, bytes], before: int | None) -> bool:
    """Whether no entry is missing between this one and the one with ``before``; true where nobody can say."""
    now = upto(fields)
    return before is None or now is None or now - len(fields[b"f"]) == before
