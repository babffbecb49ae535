"""A group's credential: made with the group, valid for its part of the relay server only, revoked with the group.

::

    scheduler: issue() ──▶ state server: thaw:group-credential:<group>    (platform processes only)
                      └──▶ relay server: ACL user, ~thaw:relay:<group>:*, seven commands
    invoker:   read()  ──▶ LlmInit.link.credential ──▶ the stage

The relay server keeps its users in memory: a restarted relay refuses the group, and it has lost the group's frames too.
"""

from __future__ import annotations

import hashlib
import secrets
from typing import Any, Final

import redis

from relay.protocol.messages import GroupCredential
from relay.state import redis_link
from thaw import wire
from thaw.errors import WorkerLost
from thaw.ids import GroupId

COMMANDS: Final = ("xadd", "xread", "xtrim", "pexpire", "set", "get", "client|reply")
"""The commands that relay/transports/redis.py sends.  None lists keys, runs scripts, or sees another client."""


def ref(group_id: GroupId) -> str:
    """The key of the state server that holds the credential."""
    return f"thaw:group-credential:{group_id}"


def key_prefix(group_id: GroupId) -> str:
    """The beginning of every key of the group on the relay server."""
    return f"thaw:relay:{group_id}:"


def issue(state: redis.Redis, relay: redis.Redis, group_id: GroupId) -> str:
    """Let a group into its part of the relay server; return the reference that goes into its plan.

    Idempotent: an existing secret stays, and a relay server that was restarted learns it again.
    """
    made = GroupCredential(_username(group_id), secrets.token_urlsafe(32))
    with redis_link.translated("write a group's credential"):
        state.set(ref(group_id), wire.dumps(made), nx=True)
    credential = read(state, ref(group_id))
    digest = hashlib.sha256(credential.secret.encode()).hexdigest()  # so that MONITOR and the slow log never show it
    rules = ("reset", "on", f"#{digest}", f"~{key_prefix(group_id)}*", *(f"+{c}" for c in COMMANDS))
    with redis_link.translated("let a group into the relay server", "the relay server"):
        relay.execute_command("ACL", "SETUSER", credential.username, *rules)  # type: ignore[no-untyped-call]
    return ref(group_id)


def read(state: redis.Redis, reference: str) -> GroupCredential:
    """The credential a plan refers to.  Raises WorkerLost when its group has ended."""
    with redis_link.translated("read a group's credential"):
        data: Any = state.get(reference)
    if data is None:
        raise WorkerLost(f"{reference} is gone: the group has ended", hint="the scheduler makes a new plan")
    return wire.loads(GroupCredential, data)


def revoke(state: redis.Redis, relay: redis.Redis, group_id: GroupId) -> None:
    """End a group: the relay server closes its connections, and all its keys are deleted.  Idempotent."""
    with redis_link.translated("shut a group out of the relay server", "the relay server"):
        relay.execute_command("ACL", "DELUSER", _username(group_id))  # type: ignore[no-untyped-call]
    drop_group(relay, group_id)
    with redis_link.translated("delete a group's credential"):
        state.delete(ref(group_id))


def drop_group(relay: redis.Redis, group_id: GroupId) -> None:
    """Delete every key of a group that has ended."""
    with redis_link.translated("drop a group's streams", "the relay server"):
        for key in relay.scan_iter(match=key_prefix(group_id) + "*", count=500):
            relay.unlink(key)


def _username(group_id: GroupId) -> str:
    return f"thaw-group-{group_id}"
