"""The uses of each model: functions of every namespace that name it, and instances that run or start."""

from __future__ import annotations

from dataclasses import replace

from tests.gateway.conftest import OPERATOR_KEY, OTHER_KEY, GatewayProcess
from tests.relay.samples import PLAN
from thaw.plan import PlanModel

PATH = "/api/v1/thaw/models"


def test_an_operator_reads_who_uses_which_version(gateway: GatewayProcess) -> None:
    gateway.put_llm()
    gateway.put_python()
    gateway.put_llm("pinned", model={"uri": "s3://models/tiny@3f0c9a17be2d4451"})
    gateway.invoker.ready("guest/chat", model_version="aa" * 32)
    plan = replace(PLAN, model=PlanModel("s3://models/tiny@bbbbbbbbbbbbbbbb", "bb" * 32, "", 10))
    gateway.invoker.registry.put_plan(plan)
    found = gateway.call("GET", PATH, key=OPERATOR_KEY).json()
    assert sorted((one["action"], one["uri"]) for one in found["actions"]) == [
        ("guest/chat", "s3://models/tiny"),
        ("guest/pinned", "s3://models/tiny@3f0c9a17be2d4451"),
    ]
    assert [one["modelVersion"] for one in found["running"]] == ["aa" * 32, "bb" * 32]
    assert gateway.call("GET", PATH, key=OTHER_KEY).status_code == 403
