"""Plan v1 against its vectors (docs/formats/plan.md)."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from invoker.containers.plans import check_plan
from relay.protocol.messages import Start
from tests.invoker.platform import Host
from thaw import wire
from thaw.errors import ProtocolError
from thaw.ids import InstanceId
from thaw.plan import Plan

VECTORS = json.loads((Path(__file__).parents[1] / "vectors" / "plan.json").read_text())


@pytest.mark.parametrize("vector", VECTORS["good"], ids=lambda v: v["name"])
def test_a_good_plan_is_taken_and_written_as_it_was_read(vector: dict[str, Any]) -> None:
    plan = wire.from_plain(Plan, vector["plan"])
    check_plan(plan)
    assert wire.loads(Plan, wire.dumps(plan)) == plan


@pytest.mark.parametrize("vector", VECTORS["bad"], ids=lambda v: v["name"])
def test_a_bad_plan_is_refused_with_its_reason(vector: dict[str, Any]) -> None:
    with pytest.raises(ProtocolError, match=re.escape(vector["error"])):
        check_plan(wire.from_plain(Plan, vector["plan"]))


def test_a_host_refuses_a_start_whose_plan_it_cannot_read(host: Host) -> None:
    plan = wire.from_plain(Plan, {**wire.to_plain(host.plan()), "version": 2})
    refused = host.events.refused(host.send(Start(plan, 0, InstanceId("i"))))
    assert refused.group_id == plan.group_id
    assert refused.error.message == "plan version 2; this host reads 1"
    assert host.registry.instances() == []


def test_a_stage_for_another_host_is_refused(host: Host) -> None:
    plain = wire.to_plain(host.plan())
    plain["stages"][0]["host"] = "elsewhere"
    refused = host.events.refused(host.send(Start(wire.from_plain(Plan, plain), 0, InstanceId("i"))))
    assert refused.error.message == "stage 0 of the plan is for elsewhere, this is host-t"
