"""Every key of the state server, in one place."""

from __future__ import annotations

from typing import Final

API_KEYS: Final = "thaw:keys"  # hash: sha256 hex of "uuid:key" → Subject
ALLOWED_MODELS: Final = "thaw:allowed-models"  # hash: namespace → prefixes of model URIs
QUOTAS: Final = "thaw:quotas"  # hash: namespace → OwnQuotas
HOST_TOKEN: Final = "thaw:token"  # bearer token between platform processes  # noqa: S105
EVENTS: Final = "thaw:events"  # stream: every event
DEMAND: Final = "thaw:demand"  # hash: activation id → DemandAdded
UNCHECKED: Final = "thaw:unchecked"  # sorted set, by when they are due: actions that no engine has looked at
PENDING: Final = "thaw:pending"  # stream: 202s not yet ended
PENDING_GROUP: Final = "gateways"
HOSTS: Final = "thaw:hosts"  # hash: host id → HostReport
HELD: Final = "thaw:held"  # hash: namespace → its requests in DEMAND
DRAINED: Final = "thaw:drained"  # set: hosts that an operator drains
INSTANCES: Final = "thaw:instances"  # hash: instance id → InstanceRecord
PLANS: Final = "thaw:plans"  # hash: group id → Plan
MODELS: Final = "thaw:models"  # hash: uri → ModelFacts
BEST: Final = "thaw:best"  # hash: phase|device kind|mode|stages|prompt|action or host → the least it took
HISTORY: Final = "thaw:history"  # hash: action|device kind|mode → the times of its starts (the scheduler's)
SCHEDULER_LEASE: Final = "thaw:scheduler:lease"
SCHEDULER_EPOCH: Final = "thaw:scheduler:epoch"


def host_lease(host_id: str) -> str:
    return f"thaw:host-lease:{host_id}"


def gateway_lease(gateway_id: str) -> str:
    return f"thaw:gateway-lease:{gateway_id}"


def commands(host_id: str) -> str:
    return f"thaw:commands:{host_id}"


def actions(namespace: str) -> str:
    return f"thaw:actions:{namespace}"


def entities(kind: str, namespace: str) -> str:
    """A hash: name → Package, Trigger or Rule.  ``kind``: packages, triggers, rules."""
    return f"thaw:{kind}:{namespace}"


def entities_used(namespace: str) -> str:
    """A hash: ``bytes`` of all of them, and their number by kind."""
    return f"thaw:entities:{namespace}"


def code(code_id: str) -> str:
    """A hash: the number of a piece → its bytes."""
    return f"thaw:code:{code_id}"


def released_code(namespace: str) -> str:
    """A list, latest first: the keys of code that actions of the namespace named and name no longer."""
    return f"thaw:released-code:{namespace}"


def code_sizes(namespace: str) -> str:
    """A hash: the name of an action with code in pieces → the bytes of that code."""
    return f"thaw:code-sizes:{namespace}"


def starts(namespace: str) -> str:
    """A hash: how the last starts of the namespace's actions went (relay/state/starts.py)."""
    return f"thaw:starts:{namespace}"


def pools(namespace: str) -> str:
    """A hash: the name of an action with an adapter → the name of its pool."""
    return f"thaw:pools:{namespace}"


def last_version(action: str) -> str:
    return f"thaw:last-version:{action}"


def deleted(namespace: str) -> str:
    """A list, latest first: the names of deleted actions whose last versions are kept."""
    return f"thaw:deleted:{namespace}"


def deleted_before(namespace: str) -> str:
    """A string: the highest of the versions of deleted actions that are no longer in the list."""
    return f"thaw:deleted-before:{namespace}"


def activation(activation_id: str) -> str:
    return f"thaw:activation:{activation_id}"


def activations(namespace: str) -> str:
    """A sorted set, by the start: the ids of the namespace's records."""
    return f"thaw:activations:{namespace}"


def activations_of(namespace: str, name: str) -> str:
    """A sorted set, by the start: the ids of the records that a list by this name shows."""
    return f"thaw:activations-of:{namespace}/{name}"


def written(namespace: str) -> str:
    """A sorted set, in the order of writing: each record's id, with its bytes and names (retention.py)."""
    return f"thaw:written:{namespace}"


def of_records(namespace: str) -> tuple[str, str, str, str, str]:
    """The prefixes of five kinds of keys: the namespace's indexes by name, records, traces, marks of runs, and notes of
    streams.  A script adds a record's id or name to them."""
    return activations_of(namespace, ""), activation(""), trace(""), started(""), stream("")


def endings(namespace: str) -> str:
    """A stream: the namespace's records in the order in which they were written (relay/state/endings.py)."""
    return f"thaw:endings:{namespace}"


_ENDED = "thaw:ended:"


def ended(namespace: str) -> str:
    """A channel: records of the namespace were written."""
    return _ENDED + namespace


def namespace_of_ended(channel: str) -> str:
    return channel.removeprefix(_ENDED)


def listener(listener_id: str) -> str:
    """A channel on which a process wakes its own listener."""
    return f"thaw:listener:{listener_id}"


def used(namespace: str) -> str:
    """A hash: the bytes of the namespace's records and 202s (relay/state/storage.py)."""
    return f"thaw:used:{namespace}"


def started(activation_id: str) -> str:
    return f"thaw:started:{activation_id}"


def stream(activation_id: str) -> str:
    """A string: the gateway that has a stream whose client hung up."""
    return f"thaw:stream:{activation_id}"


def stream_answer(answer_id: str) -> str:
    """A list: the answer of a gateway that was asked for a stream."""
    return f"thaw:stream-answer:{answer_id}"


def started_groups(namespace: str) -> str:
    """A list, latest first: the groups whose starts have traces."""
    return f"thaw:started-groups:{namespace}"


def trace(trace_id: str) -> str:
    return f"thaw:trace:{trace_id}"
