"""``thaw package``, ``trigger``, ``rule``, and the options of ``thaw action`` that wsk's users type."""

from __future__ import annotations

import json

import pytest

from tests.cli.conftest import KEY, Run
from tests.cli.fake_gateway import HERE, FakeGateway

MADE = {"name": "x", "namespace": "guest", "version": "0.0.1"}


@pytest.mark.parametrize(
    ("words", "asked", "body", "said"),
    [
        ("package create x -p a 1 --shared yes", "PUT packages/x", {"parameters": [{"key": "a", "value": 1}], "publish": True}, "created package x 0.0.1"),
        ("package update x -a note y", "PUT packages/x", {"annotations": [{"key": "note", "value": "y"}]}, "updated package x 0.0.1"),
        ("package bind /whisk.system/utils x -p a 1", "PUT packages/x", {"parameters": [{"key": "a", "value": 1}], "binding": {"namespace": "whisk.system", "name": "utils"}}, "created binding x 0.0.1"),
        ("package delete x --force", "DELETE packages/x", None, "deleted package x"),
        ("trigger create x -p a 1", "PUT triggers/x", {"parameters": [{"key": "a", "value": 1}]}, "created trigger x 0.0.1"),
        ("trigger fire x -p a 1", "POST triggers/x", {"a": 1}, f"triggered x with id {'b' * 32}"),
        ("rule create x t tools/act", "PUT rules/x", {"trigger": "/_/t", "action": "/_/tools/act"}, "created rule x 0.0.1"),
        ("rule update x /guest/t /guest/act", "PUT rules/x", {"trigger": "/guest/t", "action": "/guest/act"}, "updated rule x 0.0.1"),
        ("rule enable x", "POST rules/x", {"status": "active"}, "enabled rule x"),
        ("rule disable x", "POST rules/x", {"status": "inactive"}, "disabled rule x"),
        ("rule delete x --disable", "DELETE rules/x", None, "deleted rule x"),
        ("action create x a,/guest/b,tools/c --sequence", "PUT actions/x", {"exec": {"kind": "sequence", "components": ["/_/a", "/guest/b", "/_/tools/c"]}}, "created action x 0.0.1"),
        ("action update x --web true", "PUT actions/x", {"annotations": [{"key": "web-export", "value": True}, {"key": "raw-http", "value": False}, {"key": "final", "value": True}]}, "updated action x 0.0.1"),
        ("action update x --web raw --web-secure secret", "PUT actions/x", {"annotations": [{"key": "web-export", "value": True}, {"key": "raw-http", "value": True}, {"key": "final", "value": True}, {"key": "require-whisk-auth", "value": "secret"}]}, "updated action x 0.0.1"),
        ("action update x --del-annotation a --del-annotation b", "PUT actions/x", {"delAnnotations": ["a", "b"]}, "updated action x 0.0.1"),
        ("action update x -l 5 -c 4", "PUT actions/x", {"limits": {"logs": 5, "concurrency": 4}}, "updated action x 0.0.1"),
    ],
)  # fmt: skip
def test_a_verb_sends_what_wsk_sends(
    at: Run, gateway: FakeGateway, words: str, asked: str, body: object, said: str
) -> None:
    method, path = asked.split()
    status, answer = (202, {"activationId": "b" * 32}) if words.startswith("trigger fire") else (200, MADE)
    gateway.answers[f"{method} {HERE}/{path}"] = (status, answer)
    done = at(*words.split())
    assert (done.returncode, done.stdout) == (0, f"ok: {said}\n"), done.stderr
    assert gateway.asked[-1].body == body
    overwrite = {"create": "false", "update": "true", "bind": "false"}.get(words.split()[1])
    assert gateway.asked[-1].query.get("overwrite") == overwrite


def test_data_goes_to_stdout_alone(at: Run, gateway: FakeGateway) -> None:
    for kind in ("action", "package", "trigger", "rule"):
        gateway.answers[f"GET {HERE}/{kind}s/x"] = (200, MADE)
        done = at(kind, "get", "x")
        assert json.loads(done.stdout) == MADE
        assert done.stderr == f"ok: got {kind} x\n"


def test_one_field_of_an_action_is_printed_alone(at: Run, gateway: FakeGateway) -> None:
    gateway.answers[f"GET {HERE}/actions/x"] = (200, MADE)
    done = at("action", "get", "x", "version")
    assert (done.stdout, done.stderr) == ('"0.0.1"\n', "ok: got action x, displaying field version\n")
    assert at("action", "get", "x", "nothing").returncode == 144


@pytest.mark.parametrize(
    ("namespace", "notes", "path"),
    [
        ("guest", [{"key": "web-export", "value": True}], "/api/v1/web/guest/default/x"),
        ("guest/tools", [{"key": "web-export", "value": True}], "/api/v1/web/guest/tools/x"),
        ("guest/tools", [], "/api/v1/namespaces/guest/actions/tools/x"),
    ],
)
def test_an_action_s_url_is_where_it_answers(
    at: Run, gateway: FakeGateway, namespace: str, notes: list[object], path: str
) -> None:
    found = {"name": "x", "namespace": namespace, "annotations": notes}
    gateway.answers[f"GET {HERE}/actions/x"] = (200, found)
    assert at("action", "get", "x", "--url").stdout == f"{gateway.url}{path}\n"


def test_a_copy_has_the_code_of_the_other_action_and_the_options_of_this_line(at: Run, gateway: FakeGateway) -> None:
    notes = [{"key": "a", "value": 1}]
    code = {"kind": "python:3.11", "code": "x", "binary": False}
    found = {**MADE, "exec": code, "parameters": [], "limits": {"timeout": 1000, "memory": 128}}
    mark = {"key": "thaw.dev/modelfunction", "value": {"name": "x"}}  # no resource of a cluster makes the copy
    gateway.answers[f"GET {HERE}/actions/tools/x"] = (200, {**found, "annotations": [*notes, mark]})
    gateway.answers[f"PUT {HERE}/actions/y"] = (200, MADE)
    assert at("action", "create", "y", "tools/x", "--copy", "-m", "256").returncode == 0
    sent = gateway.asked[-1].body
    assert (sent["exec"], sent["annotations"]) == (code, notes)
    assert sent["limits"] == {"timeout": 1000, "memory": 256}


def test_a_feed_is_told_of_its_trigger_when_it_begins_and_ends(at: Run, gateway: FakeGateway) -> None:
    made = {"name": "t", "namespace": "guest", "annotations": [{"key": "feed", "value": "tools/alarm"}]}
    for method in ("PUT", "GET", "DELETE"):
        gateway.answers[f"{method} {HERE}/triggers/t"] = (200, made)
    gateway.answers[f"POST {HERE}/actions/tools/alarm"] = (200, {"cron": "* * *"})
    assert at("trigger", "create", "t", "--feed", "tools/alarm", "-p", "cron", "* * *").returncode == 0
    put, told = gateway.asked
    assert put.body == {"annotations": [{"key": "feed", "value": "tools/alarm"}]}, "the parameters are the feed's"
    named = {"triggerName": "/guest/t", "authKey": KEY}
    assert told.body == {"lifecycleEvent": "CREATE", "cron": "* * *", **named}
    assert told.query == {"blocking": "true", "result": "true"}
    assert json.loads(at("trigger", "get", "t").stdout) == {"cron": "* * *"}
    assert gateway.asked[-1].body == {"lifecycleEvent": "READ", **named}
    at("trigger", "update", "t", "-p", "cron", "x")
    assert gateway.asked[-1].body == {"lifecycleEvent": "UPDATE", "cron": "x", **named}
    assert at("trigger", "delete", "t").stdout == "ok: deleted trigger t\n"
    assert [a.body["lifecycleEvent"] for a in gateway.asked if a.body and "lifecycleEvent" in a.body][-1] == "DELETE"


def test_a_trigger_that_its_feed_refuses_is_deleted_again(at: Run, gateway: FakeGateway) -> None:
    for method in ("PUT", "DELETE"):
        gateway.answers[f"{method} {HERE}/triggers/t"] = (200, {"name": "t", "namespace": "guest"})
    gateway.answers[f"POST {HERE}/actions/alarm"] = (502, {"error": "no cron"})
    done = at("trigger", "create", "t", "--feed", "alarm")
    assert done.returncode == 246
    assert "the feed alarm refused CREATE: no cron" in done.stderr
    assert gateway.asked[-1].method == "DELETE"
