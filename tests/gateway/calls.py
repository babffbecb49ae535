"""The actions, calls and instances that tests of the gateway's parts need, without a gateway process."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from gateway.serving.call import Call
from gateway.serving.hangup import Hangup
from relay.state.api_keys import Subject
from relay.state.records import Pending
from tests.relay.samples import INSTANCE
from thaw.action import KIND_PYTHON, Action, Exec, Limits
from thaw.ids import ActionName, ActivationId, GroupId, HostId, InstanceId, Namespace
from thaw.instance import InstanceRecord

GUEST = Namespace("guest")
HELLO, CHAT = ActionName("guest/hello"), ActionName("guest/chat")


def action_of(name: str = HELLO, kind: str = KIND_PYTHON, **fields: Any) -> Action:
    namespace = Namespace(name.partition("/")[0])
    return replace(Action(ActionName(name), namespace, "0.0.1", Exec(kind, "x"), Limits()), **fields)


def call_of(activation_id: str = "a" * 32, action: Action | None = None, body: Any = None, **fields: Any) -> Call:
    action = action or action_of()
    made = Call(ActivationId(activation_id), action, Subject(action.namespace, "x"), body or {}, Hangup())
    return replace(made, **fields)


def accepted(activation_id: str, action: str = HELLO, payload: Any = None) -> Pending:
    """A 202 of the action's namespace."""
    name = ActionName(action)
    namespace = Namespace(action.partition("/")[0])
    return Pending(ActivationId(activation_id), namespace, "x", name, "0.0.1", payload or {}, 0, 0)


def instance_of(instance: str = "i", group: str = "", version: str = "0.0.1", **fields: Any) -> InstanceRecord:
    """An instance of hello with one slot, which is ready and a group of its own unless it is said otherwise."""
    ids = {"instance_id": InstanceId(instance), "group_id": GroupId(group or instance), "host_id": HostId("h0")}
    made = {"action": HELLO, "action_version": version, "slots": 1, **ids}
    return replace(INSTANCE, **{**made, **fields})  # type: ignore[arg-type]
