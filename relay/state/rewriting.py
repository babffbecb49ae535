"""Changes a deployed action in place, without a new version: its instances go on to run the same code or model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import redis

from relay.protocol.messages import ActionChanged
from relay.state import bus, keys, redis_link
from relay.state.bus import TELL
from thaw import wire
from thaw.action import Action
from thaw.errors import Conflict, NotFound
from thaw.ids import ActionName, Namespace

_TRIES: Final = 5
_SWAP: Final = (
    TELL
    + """
if redis.call('HGET', KEYS[1], ARGV[1]) ~= ARGV[2] then return 0 end
redis.call('HSET', KEYS[1], ARGV[1], ARGV[3])
tell(KEYS[2], ARGV[4])
return 1
"""
)


def rewrite_action(
    client: redis.Redis, namespace: Namespace, name: ActionName, change: Callable[[Action], Action]
) -> Action:
    """``change`` is applied to the action as it is kept, and must keep its version, code and model.  Raises NotFound,
    Conflict when others write it all the time, and what ``change`` raises."""
    for _ in range(_TRIES):
        with redis_link.translated("read an action"):
            row: Any = client.hget(keys.actions(namespace), name)
        if row is None:
            raise NotFound("The requested resource does not exist.", hint="list actions: thaw action list")
        action = change(wire.loads(Action, row))
        event = bus.pack(ActionChanged(name))
        data = wire.dumps(action)
        with redis_link.translated("change an action"):
            swapped: Any = client.eval(_SWAP, 2, keys.actions(namespace), keys.EVENTS, name, row, data, event)
        if swapped:
            return action
    raise Conflict("Concurrent modification to resource detected", hint="try again")
