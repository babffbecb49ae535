"""A plan, an instance and a record for tests that need an example."""

from __future__ import annotations

from thaw.activation import Activation, ActivationStatus
from thaw.ids import ActionName, ActivationId, GroupId, HostId, InstanceId, Namespace, PlanId
from thaw.instance import InstanceRecord, InstanceState, StartMode
from thaw.model import FileRange
from thaw.plan import PLAN_VERSION, Plan, PlanModel, PlanStage, StageRole

GROUP = GroupId("ab" * 16)
STAGE = PlanStage(
    0, HostId("host-0"), "cpu", StageRole.FULL, (0, 30), (FileRange("config.json", 0, 100),), reserve_bytes=1 << 31
)
PLAN = Plan(
    PLAN_VERSION,
    PlanId("p"),
    GROUP,
    3,
    ActionName("guest/chat"),
    "0.0.1",
    (STAGE,),
    PlanModel("s3://models/m", "00" * 32, "", 100),
)
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
