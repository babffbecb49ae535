"""A deploy asks a host whether the model would start, waits a bounded time for it, and is never refused for want of an
answer."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import pytest
import requests

from gateway.serving.deploying.preflight import Verdict, by_kind, merged
from relay.protocol.data_port_messages import PreflightFound
from tests.gateway.conftest import LLM_CONFIG, GatewayProcess, Start, notes
from tests.gateway.fake_invoker import FakeInvoker
from tests.scheduler.world import report
from thaw.action import KIND_LLM, UNCHECKED
from thaw.errors import ErrorInfo, ModelNotFound, ModelUnsupported, StoreUnavailable, ThawError, Unavailable

VERSION = "3f0c9a17be2d4451"
PIN = f"s3://models/tiny@{VERSION}"
FOUND = {"uri": PIN, "model_version": VERSION, "engine": "toy 1.0", "max_model_len": 512, "notes": ["a note"]}


def error(e: ThawError, status: int = 502) -> tuple[int, dict[str, Any]]:
    return status, {"error": e.message, "info": {"code": e.code, "message": e.message, "hint": e.hint}}


@pytest.fixture
def asked(gateway: GatewayProcess) -> FakeInvoker:
    """A host that a deploy asks."""
    host = replace(report("h0"), address=gateway.invoker.address, stem_kinds=(KIND_LLM,))
    gateway.invoker.registry.report_host(host, lease_s=600)  # it reports once
    gateway.invoker.preflight = lambda: (200, FOUND)
    return gateway.invoker


def put(gateway: GatewayProcess, query: str = "", **body: Any) -> requests.Response:
    plain = body or {"config": LLM_CONFIG}
    return gateway.call("PUT", f"/api/v1/namespaces/_/actions/chat{query}", json=plain)


def test_a_model_that_would_start_is_deployed_with_what_the_engine_said(
    gateway: GatewayProcess, asked: FakeInvoker
) -> None:
    reply = put(gateway)
    told = {"checked": True, "model": PIN, "modelVersion": VERSION, "engine": "toy 1.0", "maxModelLen": 512}
    assert (reply.status_code, reply.json()["preflight"]) == (200, {**told, "notes": ["a note"]})
    assert asked.preflights[0]["config"]["model"]["uri"] == "s3://models/tiny"
    longest_s = gateway.read("limits")["preflightSeconds"]
    assert 0 < asked.preflights[0]["deadline_ms"] <= 1000 * longest_s == 20_000
    assert not any(p["waits"] for p in asked.preflights)


def test_a_model_that_was_removed_while_it_was_deployed_is_told(gateway: GatewayProcess, asked: FakeInvoker) -> None:
    gone = error(ModelNotFound("there is no such model", hint="push it"))
    answers = [(200, FOUND), gone]
    asked.preflight = lambda: answers.pop(0)
    reply = put(gateway)
    assert reply.status_code == 200, "it is written by then"
    assert reply.json()["preflight"]["refusal"]["message"] == "there is no such model"
    assert {p["namespace"] for p in asked.preflights} == {"guest"}


def test_a_model_that_would_not_start_is_refused_unless_the_deploy_is_forced(
    gateway: GatewayProcess, asked: FakeInvoker
) -> None:
    asked.preflight = lambda: error(ModelUnsupported("no architecture Foo", hint="take another"))
    refused = put(gateway)
    assert (refused.status_code, refused.json()["error"]) == (400, "This model would not start: no architecture Foo")
    anyway = "to deploy it anyway: thaw action create --force, or PUT with force=true"
    assert refused.json()["hint"] == f"take another; {anyway}"
    assert gateway.call("GET", "/api/v1/namespaces/_/actions/chat").status_code == 404
    forced = put(gateway, "?force=true")
    told = {"code": "ModelUnsupported", "message": "no architecture Foo", "hint": "take another"}
    assert forced.json()["preflight"]["refusal"] == told


def test_a_host_that_cannot_say_so_blocks_no_deploy(gateway: GatewayProcess, asked: FakeInvoker) -> None:
    for answer, reason in (
        (error(StoreUnavailable("the store is away"), 500), "the store is away"),
        (error(Unavailable("no stem cell"), 503), "no stem cell"),
        ((200, {**FOUND, "engine": "", "notes": [], "unchecked": "no cell now"}), "no cell now"),
        ((200, {"nonsense": 1}), None),
    ):
        asked.preflight = lambda answer=answer: answer
        found = put(gateway, "?overwrite=true").json()["preflight"]
        assert found["checked"] is False
        assert reason is None or found["reason"] == reason


def test_a_host_that_does_not_answer_delays_a_deploy_by_the_time_that_the_operator_allows(
    start_gateway: Start, invoker: FakeInvoker
) -> None:
    gateway, never = start_gateway(THAW_PREFLIGHT_S="0.2"), threading.Event()
    invoker.registry.report_host(replace(report("h0"), address=invoker.address))

    def hang() -> tuple[int, Any]:
        never.wait(30)
        return 200, FOUND

    invoker.preflight = hang
    try:
        assert put(gateway).json()["preflight"] == {
            "checked": False,
            "reason": "the check took too long",
            "later": True,
        }
    finally:
        never.set()


def test_without_a_host_or_where_the_operator_wants_none_a_deploy_is_not_checked(
    gateway: GatewayProcess, start_gateway: Start
) -> None:
    assert put(gateway).json()["preflight"] == {
        "checked": False,
        "reason": "the platform has no host",
        "later": True,
    }
    gateway.kill()
    gateway.invoker.registry.report_host(replace(report("h0"), address=gateway.invoker.address))
    off = start_gateway(THAW_PREFLIGHT_S="0")
    made = put(off, "?overwrite=true").json()
    found, reason = made["preflight"], notes(made)[UNCHECKED]
    assert (found["checked"], found["reason"], "THAW_PREFLIGHT_S" in reason) == (False, reason, True)
    assert gateway.invoker.preflights == [], "now and later"


def test_a_deploy_waits_for_a_busy_host_when_no_other_host_can_say_more(
    gateway: GatewayProcess, asked: FakeInvoker, elsewhere: FakeInvoker
) -> None:
    gpu = tuple(replace(d, kind="H200") for d in report("h1").devices)
    asked.registry.report_host(replace(report("h1"), address=elsewhere.address, devices=gpu))
    busy = {**FOUND, "engine": "", "notes": [], "unchecked": "no cell now", "busy": True}
    elsewhere.preflight = lambda: error(ModelUnsupported("not on this device"))
    asked.preflight = lambda: (200, FOUND if asked.preflights[-1]["waits"] else busy)
    assert put(gateway).json()["preflight"]["engine"] == "toy 1.0"
    assert [p["waits"] for p in asked.preflights[:2]] == [False, True]
    asked.preflights.clear()
    asked.preflight, elsewhere.preflight = lambda: (200, busy), lambda: (200, FOUND)
    assert put(gateway, "?overwrite=true").json()["preflight"]["engine"] == "toy 1.0"
    assert not any(p["waits"] for p in asked.preflights), "one kind of device that runs the model is enough"
    elsewhere.preflight = lambda: (200, busy)
    assert put(gateway, "?overwrite=true").json()["preflight"]["reason"] == "no cell now"
    waited = [p["deadline_ms"] for p in (*asked.preflights, *elsewhere.preflights) if p["waits"]]
    assert len(waited) >= 2
    assert waited[0] <= 10_000, "they share the time that is left"


def test_a_change_that_leaves_the_model_alone_asks_nobody(gateway: GatewayProcess, asked: FakeInvoker) -> None:
    put(gateway)
    changed = put(gateway, "?overwrite=true", annotations=[{"key": "a", "value": 1}])
    assert (changed.status_code, "preflight" in changed.json(), len(asked.preflights)) == (200, False, 2)


def test_a_model_is_checked_without_a_deploy_and_its_memory_only_if_it_is_named(
    gateway: GatewayProcess, asked: FakeInvoker
) -> None:
    path = "/api/v1/namespaces/_/preflight"
    assert gateway.call("POST", path, json={"config": LLM_CONFIG}).json()["checked"] is True
    gateway.call("POST", path, json={"config": {**LLM_CONFIG, "resources": {"gpu_memory_mb": 512}}})
    assert [body["memory"] for body in asked.preflights] == [False, True]
    asked.preflight = lambda: error(ModelUnsupported("no"))
    assert gateway.call("POST", path, json={"config": LLM_CONFIG}).json()["refusal"]["message"] == "no"
    other = {"kind": "llm:vllm", "model": {"uri": "s3://others/m"}}
    assert gateway.call("POST", path, json={"config": other}).status_code == 403
    assert gateway.call("POST", path, json={"config": {}}).status_code == 400
    assert gateway.call("GET", "/api/v1/namespaces/_/actions/chat").status_code == 404


# ── several kinds of hosts ────────────────────────────────────────────────────────────────────────────────────────

RUNS = Verdict(PreflightFound(PIN, "v", "toy", 1))
REFUSED = Verdict(refusal=ErrorInfo(ModelUnsupported.__name__, "no"))
MISSING = Verdict(refusal=ErrorInfo(ModelNotFound.__name__, "none"))
UNKNOWN = Verdict(unchecked="busy")


@pytest.mark.parametrize(
    ("verdicts", "expected"),
    [
        ([REFUSED, RUNS], RUNS),
        ([UNKNOWN, RUNS], RUNS),
        ([REFUSED, UNKNOWN], UNKNOWN),
        ([UNKNOWN, MISSING], MISSING),
        ([REFUSED], REFUSED),
        ([], Verdict(unchecked="the platform has no host")),
    ],
)
def test_one_kind_of_device_that_runs_the_model_is_enough(verdicts: list[Verdict], expected: Verdict) -> None:
    assert merged(verdicts) == expected


def test_hosts_with_a_stem_cell_are_asked_first_and_drained_ones_never() -> None:
    gpu = tuple(replace(d, kind="H200") for d in report("g").devices)
    reports = [
        report("a"),
        replace(report("b"), stem_kinds=(KIND_LLM,)),
        replace(report("c"), draining=True),
        replace(report("g"), devices=gpu),
    ]
    assert [[r.host_id for r in kind] for kind in by_kind(reports)] == [["b", "a"], ["g"]]
