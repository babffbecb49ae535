"""Scaling without a new version, and an instance that is started before anybody calls."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import redis

from gateway.scheduler.events import facts_of
from gateway.serving.actions.action_cache import Actions
from gateway.serving.actions.quotas import QuotaBook
from gateway.serving.scaling.kept_instances import KeptInstances
from gateway.serving.scaling.limits import least_of, rescaled
from relay.state.quotas import NamespaceQuotas
from relay.state.records import Records
from relay.state.rewriting import rewrite_action
from tests.gateway.calls import CHAT, GUEST, HELLO, action_of
from tests.gateway.conftest import LLM_CONFIG, GatewayProcess, pairs
from tests.relay.samples import PLAN
from thaw.action import KIND_LLM, Action, Exec
from thaw.clock import wall_ms
from thaw.config import parse_llm_config
from thaw.errors import Conflict, Forbidden, InitFailed
from thaw.ids import GroupId
from thaw.quotas import Quotas
from thaw.standing import RESOURCE_MARK

HERE = "/api/v1/namespaces/_"


def scale(gateway: GatewayProcess, name: str, expect: int = 200, **changes: Any) -> dict[str, Any]:
    return gateway.put(f"scaling/{name}", expect, **changes)


def warm(gateway: GatewayProcess, name: str = "hello", wait_s: float = 0) -> Any:
    return gateway.call("POST", f"{HERE}/warm/{name}?wait_s={wait_s}", timeout=60)


def test_a_function_is_scaled_without_a_new_version_and_the_scheduler_reads_it(
    gateway: GatewayProcess, valkey_url: str
) -> None:
    gateway.put_python()
    default = {"action": "guest/hello", "version": "0.0.1", "min_instances": 0, "max_instances": 8}
    assert gateway.read("scaling/hello") == {**default, "keep_alive_s": 600.0}
    scaled = {**default, "min_instances": 2, "keep_alive_s": 5.0}
    assert scale(gateway, "hello", min_instances=2, keep_alive_s=5) == scaled
    with redis.Redis.from_url(valkey_url) as client:
        facts = facts_of(Records(client).action(GUEST, HELLO))
    assert (facts.min_instances, facts.max_instances, facts.keep_alive_s) == (2, 8, 5.0)
    assert gateway.put("actions/hello?overwrite=true", limits={"memory": 128})["version"] == "0.0.2"
    assert gateway.read("scaling/hello")["min_instances"] == 2, "an update keeps it"


def test_a_model_s_scaling_is_that_of_its_config(gateway: GatewayProcess) -> None:
    gateway.put_llm(scaling={"max_batch": 4})
    scale(gateway, "chat", min_instances=1, max_instances=3)
    found = gateway.read("actions/chat")
    assert found["version"] == "0.0.1"
    scaling = found["config"]["scaling"]
    assert (scaling["min_instances"], scaling["max_instances"], scaling["max_batch"]) == (1, 3, 4)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({}, "The scaling of an action is one or more of"),
        ({"buffer": 1}, "The scaling of an action is one or more of"),
        ({"min_instances": -1}, "$.min_instances"),
        ({"max_instances": "2"}, "$.max_instances"),
        ({"keep_alive_s": 1e9}, "$.keep_alive_s"),
        ({"min_instances": 9}, "min_instances (9) is more than max_instances (8)."),
    ],
)
def test_a_scaling_that_cannot_be_is_refused_with_its_name(
    shared_gateway: GatewayProcess, changes: dict[str, Any], problem: str
) -> None:
    assert problem in shared_gateway.put("scaling/hello", 400, **changes)["error"]


def test_a_sequence_and_a_name_of_nothing_have_no_scaling(gateway: GatewayProcess, valkey_url: str) -> None:
    gateway.put_python()
    gateway.put_python("part")
    body = {"exec": {"kind": "sequence", "components": ["/_/part"]}}
    gateway.put("actions/both", **body)
    scale(gateway, "both", 400, min_instances=1)
    scale(gateway, "none", 404, min_instances=1)
    assert warm(gateway, "both").status_code == 400
    assert scale(gateway, "hello", min_instances=2)["min_instances"] == 2
    gateway.put("actions/hello?overwrite=true", **body)
    with redis.Redis.from_url(valkey_url) as client:
        became = Records(client).action(GUEST, HELLO)
        assert (became.is_sequence, became.min_instances) == (True, 0)
        assert facts_of(replace(became, min_instances=2)).min_instances == 0, "as an older version left it"
    assert warm(gateway, "none").status_code == 404


def test_what_another_writes_meanwhile_is_not_lost(gateway: GatewayProcess, valkey_url: str) -> None:
    gateway.put_python()
    with redis.Redis.from_url(valkey_url) as client:
        others = iter([{"memory": 128}])

        def change(action: Any) -> Any:
            for limits in others:
                gateway.put("actions/hello?overwrite=true", limits=limits)
            return replace(action, min_instances=1)

        done = rewrite_action(client, GUEST, HELLO, change)
        assert (done.version, done.limits.memory, done.min_instances) == ("0.0.2", 128, 1)

        def always(action: Any) -> Any:
            gateway.put("actions/hello?overwrite=true", limits={"memory": 256})
            return replace(action, min_instances=2)

        with pytest.raises(Conflict):
            rewrite_action(client, GUEST, HELLO, always)


def test_warming_begins_a_start_says_when_it_will_be_over_and_leaves_no_demand(gateway: GatewayProcess) -> None:
    gateway.put_python()
    asked = gateway.soon(warm, gateway)
    (demand,) = gateway.invoker.wait_for_demand()
    assert demand.action == HELLO
    plan = replace(PLAN, group_id=GroupId("a" * 32), action=HELLO, created_wall_ns=wall_ms() * 1_000_000)
    gateway.invoker.registry.put_plan(replace(plan, predicted_ttft_s=100.0))
    gateway.invoker.starting("guest/hello")
    answer = asked.result(20).json()
    expected_s = answer.pop("expected_s")
    assert answer == {"action": "guest/hello", "state": "starting", "hosts": ["h0"], "busy": False}
    assert 0 < expected_s <= 100
    assert gateway.invoker.wait_for_demand(0) == []
    assert warm(gateway).json()["state"] == "starting", "a second one joins the start"
    assert gateway.invoker.runs == []


def test_warming_may_wait_until_the_instance_is_ready_and_a_free_slot_is_warm(gateway: GatewayProcess) -> None:
    gateway.put_python()
    ready = {"action": "guest/hello", "state": "ready", "expected_s": 0.0, "hosts": ["h0"], "busy": False}
    asked = gateway.soon(warm, gateway, "hello", 30)
    gateway.invoker.wait_for_demand()
    gateway.invoker.starting("guest/hello")
    gateway.invoker.ready("guest/hello", slots=1)
    assert asked.result(20).json() == ready
    assert warm(gateway).json() == ready
    assert gateway.call("POST", f"{HERE}/actions/hello?blocking=true", json={}).status_code == 200, "its slot is free"
    assert len(gateway.invoker.runs) == 1


def test_warming_tells_the_error_of_a_start_that_fails(gateway: GatewayProcess) -> None:
    gateway.put_python()
    asked = gateway.soon(warm, gateway, "hello", 30)
    (demand,) = gateway.invoker.wait_for_demand()
    gateway.invoker.start_failed(InitFailed("no main"), demand)
    reply = asked.result(20)
    assert (reply.status_code, reply.json()["error"]) == (502, "no main")


def test_notes_of_whoever_scales_are_written_with_the_numbers_and_no_others(gateway: GatewayProcess) -> None:
    gateway.put_llm()
    note = {"key": "example.com/by", "value": {"generation": 2}}
    assert scale(gateway, "chat", min_instances=1, annotations=[note])["min_instances"] == 1
    found = gateway.read("actions/chat")
    assert found["version"] == "0.0.1"
    assert note in found["annotations"]
    refused = scale(gateway, "chat", 400, min_instances=2, annotations=pairs(**{"web-export": True}))
    assert "web-export" in refused["error"]
    assert gateway.read("scaling/chat")["min_instances"] == 1


def test_notes_do_not_grow_without_end(gateway: GatewayProcess) -> None:
    gateway.put_python()

    def note(key: str) -> int:
        body = {"min_instances": 0, "annotations": [{"key": f"example.com/{key}", "value": "x" * 6000}]}
        return gateway.call("PUT", f"{HERE}/scaling/hello", json=body).status_code

    assert [note("a"), note("b"), note("c"), note("a")] == [200, 200, 413, 200]
    assert scale(gateway, "hello", min_instances=1)["min_instances"] == 1


def test_an_update_that_read_before_a_scaling_does_not_undo_it(gateway: GatewayProcess, valkey_url: str) -> None:
    gateway.put_llm()
    with redis.Redis.from_url(valkey_url) as client:
        records = Records(client)
        old, row = records.action_row(GUEST, CHAT)
        scale(gateway, "chat", min_instances=1)
        new = replace(old, version="0.0.2", annotations={"x": 1})
        with pytest.raises(Conflict):
            records.put_action(new, last="0.0.1", old=old, row=row)
        old, row = records.action_row(GUEST, CHAT)
        records.put_action(replace(old, version="0.0.2"), last="0.0.1", old=old, row=row)
    assert gateway.read("scaling/chat")["min_instances"] == 1


def kept_by(client: redis.Redis, quota: int) -> tuple[Records, Actions, KeptInstances]:
    records = Records(client)
    actions = Actions(client, records)
    quotas = QuotaBook(Quotas(*(10**9,) * 6, kept=quota), NamespaceQuotas(client))
    return records, actions, KeptInstances(client, records, actions, quotas)


@pytest.mark.parametrize("is_new", [False, True])
def test_who_is_refused_when_it_is_written_has_written_no_note_either(
    gateway: GatewayProcess, valkey_url: str, is_new: bool
) -> None:
    gateway.put_llm()
    gateway.put_llm("other", scaling={"min_instances": 1})
    with redis.Redis.from_url(valkey_url) as client:
        records, _, kept = kept_by(client, 1)
        old = records.action(GUEST, CHAT)

        def change(action: Action) -> Action:
            return replace(rescaled(action, {"min_instances": 1}), annotations={**action.annotations, "a/b": 2})

        before = rewrite_action(client, GUEST, CHAT, lambda a: replace(a, annotations={**a.annotations, "a/b": 1}))
        written = rewrite_action(client, GUEST, CHAT, change)
        with pytest.raises(Forbidden):
            kept.check_written(written, None if is_new else before, 1)
        if is_new:
            assert gateway.call("GET", f"{HERE}/actions/chat").status_code == 404
            return
        now = records.action(GUEST, CHAT)
        assert (now.annotations["a/b"], least_of(now), now.version) == (1, 0, old.version)


def test_a_config_that_stays_without_its_instances_is_not_the_one_of_the_mark_before(valkey_url: str) -> None:
    """A whole update was refused when it was written, so the writer of the mark writes the whole config again."""
    with redis.Redis.from_url(valkey_url) as client:
        records, actions, kept = kept_by(client, 0)

        def model(version: str, least: int, generation: int, spec: str) -> Action:
            config = parse_llm_config({**LLM_CONFIG, "scaling": {"min_instances": least}})
            mark = {"name": "chat", "generation": generation, "spec": spec}
            annotations = {RESOURCE_MARK: mark, "a/b": generation}
            code = Exec(KIND_LLM, json.dumps(LLM_CONFIG))
            return action_of(CHAT, exec=code, version=version, annotations=annotations, config=config)

        old, new = model("0.0.1", 0, 1, "A"), model("0.0.2", 1, 2, "B")
        actions.put(old, last=None)
        actions.put(new, last="0.0.1", old=old)
        with pytest.raises(Forbidden):
            kept.check_written(new, old, 1)
        now = records.action(GUEST, CHAT)
    assert (now.version, least_of(now)) == ("0.0.2", 0)
    assert now.annotations == {RESOURCE_MARK: {"name": "chat", "generation": 1}, "a/b": 1}


def test_a_write_for_a_version_is_refused_for_another_one(gateway: GatewayProcess) -> None:
    for name, method, kind, body in (
        ("a", "PUT", "actions", {"config": LLM_CONFIG}),
        ("b", "PUT", "scaling", {"min_instances": 1}),
        ("c", "DELETE", "actions", None),
    ):

        def write(version: str, path: str = f"{HERE}/{kind}/{name}", method: str = method, body: Any = body) -> Any:
            return gateway.call(method, path, params={"overwrite": "true", "version": version}, json=body)

        gateway.put_llm(name)
        gateway.delete(f"actions/{name}")
        assert write("0.0.1").status_code == 404
        gateway.put_llm(name)  # a name's versions go on
        refused = write("0.0.1")
        assert refused.status_code == 409, refused.text
        assert refused.json()["error"] == "The action has version 0.0.2, not 0.0.1."
        assert gateway.read(f"actions/{name}")["version"] == "0.0.2"
        assert write("0.0.2").status_code == 200
