"""Names of things.  They are NewTypes, so that an instance id cannot be passed where a host id belongs."""

from __future__ import annotations

import hashlib
import re
import secrets
from typing import NewType

Namespace = NewType("Namespace", str)
ActionName = NewType("ActionName", str)
"""Fully qualified without a leading slash: ``guest/chat`` or ``guest/pkg/chat``."""
ActivationId = NewType("ActivationId", str)
"""32 lower-case hex digits, like OpenWhisk's activation ids."""
GroupId = NewType("GroupId", str)
"""A pipeline group: the stages that together answer as one model.  32 hex digits = the frame's 16 bytes."""
PlanId = NewType("PlanId", str)
InstanceId = NewType("InstanceId", str)
HostId = NewType("HostId", str)
CommandId = NewType("CommandId", str)
GatewayId = NewType("GatewayId", str)

_ENTITY_NAME = re.compile(r"\A([\w]|[\w][\w@ .&-]{0,254}[\w@.&-])\Z")
_ACTIVATION_ID = re.compile(r"\A[0-9a-f]{32}\Z")


def random_hex_id() -> str:
    """32 lower-case hex digits from the system's generator, which is safe after a fork: it keeps no process state."""
    return secrets.token_hex(16)


def own_group(group_id: GroupId, stage: int) -> GroupId:
    """The group that a stage is by itself once it has left its pipeline.

    Stage 0 keeps the pipeline's.  The name follows from known ids, so a scheduler and an invoker that were restarted in
    between agree on it.
    """
    if stage == 0:
        return group_id
    return GroupId(hashlib.sha256(f"{group_id}/{stage}".encode()).hexdigest()[:32])


def is_entity_name(name: str) -> bool:
    return _ENTITY_NAME.match(name) is not None


def is_activation_id(text: str) -> bool:
    return _ACTIVATION_ID.match(text) is not None
