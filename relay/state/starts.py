"""How the last starts of each action went: why a start failed, and how long a first answer took.

A hash per namespace.  Each row is written in the step that publishes the event which tells of it, so all gateways say
the same, and one that was restarted has forgotten nothing.  The rows of an action are deleted with it, and none is
written for an action that is gone.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any, Final

import redis

from relay.protocol.messages import ColdStarted, StartFailed
from relay.state import bus, keys, redis_link
from relay.state.bounded_stream import REPLACE
from relay.state.bus import TELL
from thaw import wire
from thaw.errors import ErrorInfo
from thaw.ids import ActionName, Namespace
from thaw.instance import InstanceRecord
from thaw.standing import NO_CAPACITY, ColdStart

_FAILED: Final = "failed "
_ANSWERED: Final = "answered "

_NOTE_FAILURE: Final = (
    REPLACE
    + """
if ARGV[4] ~= '' then
    local was = redis.call('HGET', KEYS[3], ARGV[4])
    if not was then return 0 end  -- its end is said twice, after an answer that was lost
    if cjson.decode(was).state ~= 'starting' then return 0 end  -- it has served: that was no start
end
if redis.call('HEXISTS', KEYS[2], ARGV[1]) == 0 then return 0 end
replace_field(KEYS[1], ARGV[2], ARGV[3])
return 1
"""
)
_NOTE_READY: Final = """
local failed = redis.call('HGET', KEYS[1], ARGV[1])
if not failed then return 0 end
local was = redis.call('HGET', KEYS[2], ARGV[2])
if was and cjson.decode(was).state ~= 'starting' then return 0 end  -- it serves already
local version = cjson.decode(failed).version or ''
if version ~= '' and version ~= ARGV[3] then return 0 end
return redis.call('HDEL', KEYS[1], ARGV[1])
"""
_NOTE_ANSWER: Final = (
    REPLACE
    + TELL
    + """
local had = redis.call('HGET', KEYS[1], ARGV[2])
if had and cjson.decode(had).at_wall_ms > tonumber(ARGV[4]) then return 0 end  -- of a later start
if redis.call('HEXISTS', KEYS[2], ARGV[1]) == 0 then return 0 end
replace_field(KEYS[1], ARGV[2], ARGV[3])
tell(KEYS[3], ARGV[5])
return 1
"""
)


@dataclass(frozen=True, slots=True)
class Failure:
    """``version``: the version of the action that was to start; empty when it was not known."""

    error: ErrorInfo
    version: str = ""


@dataclass(frozen=True, slots=True)
class LastStarts:
    failure: Failure | None = None
    answered: ColdStart | None = None


def note_failed_instance(pipe: Any, record: InstanceRecord) -> None:
    """``record`` belongs to an instance that is gone with an error.  Call this before its row is deleted."""
    if record.action and record.error is not None:
        _note_failure(pipe, record.action, Failure(record.error, record.action_version), record.instance_id)


def note_ready(pipe: Any, record: InstanceRecord) -> None:
    """``record`` belongs to an instance that is ready.  Call this before its row is written: a successful start clears
    the failure of an earlier start of its version, and later reports of the instance clear none."""
    if record.action:
        pipe.eval(
            _NOTE_READY,
            2,
            keys.starts(_namespace(record.action)),
            keys.INSTANCES,
            _FAILED + record.action,
            record.instance_id,
            record.action_version,
        )


def start_failed(client: redis.Redis, failed: StartFailed) -> None:
    """Publish it, and keep why.  Raises Unavailable."""
    error = failed.error
    if error.code == "Unavailable" and not failed.group_id:  # nothing was started: no host takes it
        error = replace(error, code=NO_CAPACITY)
    with redis_link.translated("say that a start failed"):
        pipe = client.pipeline(transaction=True)
        _note_failure(pipe, failed.action, Failure(error), "")
        bus.append(pipe, failed)
        pipe.execute()


def cold_started(client: redis.Redis, action: ActionName, start: ColdStart) -> None:
    """``action``: the action of the instance.  The latest start is kept, even if an earlier one is reported after it.
    Raises Unavailable."""
    namespace = _namespace(action)
    with redis_link.translated("say what a start took"):
        client.eval(
            _NOTE_ANSWER,
            3,
            keys.starts(namespace),
            keys.actions(namespace),
            keys.EVENTS,
            action,
            _ANSWERED + action,
            wire.dumps(start),
            str(start.at_wall_ms),
            bus.pack(ColdStarted(action)),
        )


def forget(pipe: Any, action: ActionName, *, deleted: bool) -> None:
    """The action was changed, so an earlier failure says nothing of it; or it was deleted."""
    fields = (_FAILED, _ANSWERED) if deleted else (_FAILED,)
    pipe.hdel(keys.starts(_namespace(action)), *(field + action for field in fields))


def last_starts(
    client: redis.Redis, namespace: Namespace, actions: Collection[ActionName]
) -> dict[ActionName, LastStarts]:
    """Raises Unavailable."""
    if not actions:
        return {}
    names = list(actions)
    with redis_link.translated("read how starts went"):
        rows: Any = client.hmget(keys.starts(namespace), [part + n for part in (_FAILED, _ANSWERED) for n in names])
    failed, answered = rows[: len(names)], rows[len(names) :]
    return {
        name: LastStarts(
            None if why is None else wire.loads(Failure, why), None if what is None else wire.loads(ColdStart, what)
        )
        for name, why, what in zip(names, failed, answered, strict=True)
    }


def _note_failure(pipe: Any, action: ActionName, failure: Failure, instance: str) -> None:
    namespace = _namespace(action)
    pipe.eval(
        _NOTE_FAILURE,
        3,
        keys.starts(namespace),
        keys.actions(namespace),
        keys.INSTANCES,
        action,
        _FAILED + action,
        wire.dumps(replace(failure, error=bus.short_error(failure.error))),
        instance,
    )


def _namespace(action: ActionName) -> Namespace:
    return Namespace(action.partition("/")[0])
