"""A plan, an instance and records for tests that need an example."""

from __future__ import annotations

import struct
from dataclasses import replace
from typing import Any

import redis

from relay.protocol import frames
from relay.state.pending import create_group
from relay.state.records import Ended, Pending, Records
from relay.state.storage import Storage
from thaw.action import Action, Exec, Limits
from thaw.activation import Activation, ActivationStatus
from thaw.ids import ActionName, ActivationId, GroupId, HostId, InstanceId, Namespace, PlanId
from thaw.instance import InstanceRecord, InstanceState, StartMode
from thaw.model import FileRange
from thaw.plan import PLAN_VERSION, Plan, PlanModel, PlanStage, StageRole
from thaw.quotas import OwnQuotas, Quotas
from thaw.tracing.trace import Phase, TraceEvent

GUEST = Namespace("guest")
MANY = Quotas(10**6, 10**12, 10**12, 10**6, 10**6, 10**6)
"""Quotas that no test reaches."""
GROUP = GroupId("ab" * 16)
FILES = (FileRange("config.json", 0, 100),)
STAGE = PlanStage(0, HostId("host-0"), "cpu", StageRole.FULL, (0, 30), FILES, reserve_bytes=1 << 31)
MODEL = PlanModel("s3://models/m", "00" * 32, "", 100)
PLAN = Plan(PLAN_VERSION, PlanId("p"), GROUP, 3, ActionName("guest/chat"), "0.0.1", (STAGE,), MODEL)
INSTANCE = InstanceRecord(
    InstanceId("i"),
    HostId("host-0"),
    ActionName("guest/chat"),
    "0.0.1",
    GROUP,
    InstanceState.READY,
    "127.0.0.1:1",
    8,
    1 << 31,
    "cpu",
    StartMode.COLD,
)


def record(activation_id: str, start_ms: int = 1000, namespace: str = "guest") -> Activation:
    return Activation(
        ActivationId(activation_id),
        Namespace(namespace),
        ActionName("guest/chat"),
        "0.0.1",
        "guest",
        "llm:vllm",
        start_ms,
        start_ms + 5,
        ActivationStatus.SUCCESS,
        {"ok": True},
    )


def of(i: int, action: str = "guest/f", binding: str = "", start_ms: int | None = None) -> Activation:
    """The record of a call that began ``i`` ms after the second 1."""
    began = record(f"{i:032x}", start_ms=1_000 + i if start_ms is None else start_ms)
    return replace(began, action=ActionName(action), binding=binding)


def write(records: Records, *some: Activation) -> None:
    records.end_all([Ended(one, (TraceEvent(Phase.RECEIVED),)) for one in some])


def starts(found: list[Activation]) -> list[int]:
    """The number ``i`` of each record."""
    return [one.start_ms - 1_000 for one in found]


def pending(name: str, namespace: Namespace = GUEST, payload: object = None) -> Pending:
    return Pending(ActivationId(name), namespace, "x", ActionName(f"{namespace}/f"), "0.0.1", payload, 0, 0)


def function(name: str, n_bytes: int = 10) -> Action:
    return Action(ActionName(f"guest/{name}"), GUEST, "0.0.1", Exec("python:3.11", "#" * n_bytes), Limits())


def with_quotas(client: redis.Redis, **own: Any) -> tuple[Records, Storage]:
    """The records of a platform on which every namespace has these quotas of its own."""
    create_group(client)
    storage = Storage(client, lambda _: OwnQuotas(**own).over(MANY))
    return Records(client, storage=storage), storage


def forged(frame: bytes, offset: int, value: int) -> bytes:
    """A frame with another number in its header, whose checksum is right."""
    raw = bytearray(frame)
    struct.pack_into("<I", raw, offset, value)
    struct.pack_into("<I", raw, 56, frames.crc32c(bytes(raw[:56]) + bytes(raw[60:64])))
    return bytes(raw)
