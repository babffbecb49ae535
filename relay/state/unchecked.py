"""The deployed models that no engine has looked at yet, in the order in which gateways look at them again.

::

    add ──▶ due ── claim ──▶ one gateway looks at it, and nobody else for a while ──┬─ done: it is out
             ▲                                                                      └─ again: it is due later
             └──────────────── the gateway has died: the while is over ────────────────┘

The action's own record says that it is unchecked; this is only the list of them, so an entry too many costs a look.  An
action that is added meanwhile stays in the list, whatever the look at it before says.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import redis

from relay.state import keys, redis_link
from thaw.ids import ActionName

_NOW: Final = "local t = redis.call('TIME')\nlocal now = t[1] * 1000000 + t[2]\n"
_ADD: Final = (
    _NOW
    + """
redis.call('ZREM', KEYS[1], ARGV[1])  -- so that a full server takes it, too
return redis.call('ZADD', KEYS[1], string.format('%d', now + 1000 * ARGV[2]), ARGV[1])
"""
)
_CLAIM: Final = (
    _NOW
    + """
local first = redis.call('ZRANGE', KEYS[1], 0, 0, 'WITHSCORES')
if #first == 0 then return {} end
local left = tonumber(first[2]) - now
if left > 0 then return {'', math.ceil(left / 1000)} end
local mark = string.format('%d', now + 1000 * ARGV[1])
redis.call('ZADD', KEYS[1], mark, first[1])
return {first[1], mark}
"""
)
_END: Final = (
    _NOW
    + """
local score = redis.call('ZSCORE', KEYS[1], ARGV[1])
if not score or tonumber(score) ~= tonumber(ARGV[2]) then return 0 end
if ARGV[3] == '' then return redis.call('ZREM', KEYS[1], ARGV[1]) end
return redis.call('ZADD', KEYS[1], string.format('%d', now + 1000 * ARGV[3]), ARGV[1])
"""
)


@dataclass(frozen=True, slots=True)
class Claim:
    """``mark`` is the claim's own: the entry has another one when it was added again, or claimed by somebody else."""

    name: ActionName
    mark: str


class Unchecked:
    """All methods raise PlatformError.  Times are those of the state server's clock, so gateways agree."""

    def __init__(self, client: redis.Redis) -> None:
        self._redis = client

    def add(self, name: ActionName, in_s: float = 0.0) -> None:
        """The action is due in so many seconds, whether it was in the list or not."""
        with redis_link.translated("note an unchecked action"):
            self._redis.eval(_ADD, 1, keys.UNCHECKED, name, str(round(1000 * in_s)))

    def claim(self, for_s: float) -> Claim | float | None:
        """Claim the first action that is due.  A number: the seconds until one is; None: there is none."""
        with redis_link.translated("read which actions are unchecked"):
            found: Any = self._redis.eval(_CLAIM, 1, keys.UNCHECKED, str(round(1000 * for_s)))
        if not found:
            return None
        name, mark = redis_link.text(found[0]), found[1]
        return Claim(ActionName(name), redis_link.text(mark)) if name else int(mark) / 1000

    def done(self, claim: Claim) -> None:
        self._end(claim, "")

    def again(self, claim: Claim, in_s: float) -> None:
        self._end(claim, str(round(1000 * in_s)))

    def _end(self, claim: Claim, in_ms: str) -> None:
        with redis_link.translated("note a look at an unchecked action"):
            self._redis.eval(_END, 1, keys.UNCHECKED, claim.name, claim.mark, in_ms)
