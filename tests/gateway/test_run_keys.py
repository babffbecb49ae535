"""The key that a run gets when its action asks for one."""

from __future__ import annotations

import json
import time

import pytest
import requests

from gateway.serving.routing.run_keys import RunKeys
from gateway.serving.routing.sending import run_body
from relay.state.api_keys import Role, Subject
from tests.gateway.calls import GUEST, action_of, call_of
from tests.gateway.conftest import HERE, KEY, OPERATOR_KEY, GatewayProcess, add_key, pairs, wait_for_record
from thaw.action import Limits

CALL = call_of(subject=Subject(GUEST, "ada", Role.OPERATOR))


def test_a_key_is_its_callers_until_its_time_is_over_and_never_an_operators() -> None:
    keys = RunKeys("token")
    key = keys.make(CALL, 1000)
    assert keys.subject(key, 1000) == Subject(GUEST, "ada", Role.TENANT)
    assert keys.subject(key, 1001) is None
    assert RunKeys("another installation's").subject(key, 1000) is None


@pytest.mark.parametrize("text", ["", ".", "a:b", "a:thaw.b.c", ":thaw..", "ä:thaw.ö.ü"])
def test_what_we_did_not_make_is_no_key(text: str) -> None:
    assert RunKeys("token").subject(text, 0) is None


def test_no_part_of_a_key_can_be_changed() -> None:
    keys = RunKeys("token")
    key = keys.make(CALL, 1000)
    for i in range(len(key)):
        changed = key[:i] + ("b" if key[i] != "b" else "c") + key[i + 1 :]
        assert keys.subject(changed, 0) is None, i


def test_a_function_that_asks_for_a_key_gets_one_that_works_and_no_other_does(gateway: GatewayProcess) -> None:
    gateway.put_python("plain")
    gateway.put_python("asks", annotations=pairs(**{"provide-api-key": True}))
    gateway.serve("plain", "asks")
    for name in ("plain", "asks"):
        assert gateway.call("POST", f"{HERE}/actions/{name}?blocking=true").status_code == 200
    plain, asks = gateway.invoker.runs
    assert "api_key" not in plain
    user, _, secret = asks["api_key"].partition(":")
    for auth in ({"auth": (user, secret)}, {"headers": bearer(asks["api_key"])}):
        reply = requests.get(f"{gateway.url}/api/v1/namespaces", timeout=30, **auth)  # type: ignore[arg-type]
        assert (reply.status_code, reply.json()) == (200, ["guest"])
    assert gateway.call("GET", "/api/v1/thaw/keys", key=asks["api_key"]).status_code == 403


def test_a_revoked_key_takes_those_of_the_202s_along_that_it_called(gateway: GatewayProcess, valkey_url: str) -> None:
    gateway.serve_python("asks", annotations=pairs(**{"provide-api-key": True}))
    add_key(valkey_url, "left:behind", "guest")

    def call(key: str) -> str:
        reply = requests.post(f"{gateway.url}{HERE}/actions/asks", headers=bearer(key), timeout=30)
        assert reply.status_code == 202
        wait_for_record(valkey_url, reply.json()["activationId"])
        return str(gateway.invoker.runs[-1]["api_key"])

    first = call(KEY)
    second = call(first)
    names = f"{gateway.url}/api/v1/namespaces"
    assert [requests.get(names, headers=bearer(key), timeout=30).status_code for key in (first, second)] == [200, 200]
    ended = gateway.call("DELETE", f"/api/v1/thaw/keys/{KEY.partition(':')[0]}", key=OPERATOR_KEY)
    assert ended.status_code == 200, ended.text
    assert [requests.get(names, headers=bearer(key), timeout=30).status_code for key in (first, second)] == [401, 401]


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def test_a_function_whose_runs_share_their_variables_gets_no_key(gateway: GatewayProcess) -> None:
    wanted = {"annotations": pairs(**{"provide-api-key": True}), "limits": {"concurrency": 2}}
    body = {"exec": {"kind": "python:3.11", "code": "def main(a): return a"}, **wanted}
    refused = gateway.call("PUT", f"{HERE}/actions/shared", json=body)
    assert (refused.status_code, "provide-api-key needs limits.concurrency 1" in refused.text) == (400, True)
    gateway.put_python("asks", annotations=wanted["annotations"])
    again = gateway.call("PUT", f"{HERE}/actions/asks?overwrite=true", json={"limits": wanted["limits"]})
    assert again.status_code == 400


def test_a_run_of_an_earlier_versions_action_that_shares_its_variables_gets_no_key() -> None:
    notes = {"provide-api-key": True}
    for concurrency, gets in ((1, True), (2, False)):
        action = action_of(annotations=notes, limits=Limits(concurrency=concurrency))
        body = run_body(call_of(action=action), time.monotonic() + 1, (), run_keys=RunKeys("token"))
        assert ("api_key" in json.loads(body)) is gets
