"""``thaw key``, and the commands of a tenant without an operator's rights."""

from __future__ import annotations

from dataclasses import replace

from tests.cli.conftest import Run
from tests.cli.fake_gateway import FakeGateway
from thaw import wire
from thaw.tracing.trace import Phase, event

KEYS = "/api/v1/thaw/keys"
MADE = {"id": "23bc", "namespace": "team-a", "role": "tenant", "created_ms": 1_700_000_000_000}


def test_a_made_key_is_the_only_thing_on_stdout(at: Run, gateway: FakeGateway) -> None:
    gateway.answers[f"POST {KEYS}"] = (200, {**MADE, "key": "23bc:secret"})
    done = at("key", "create", "--namespace", "team-a")
    assert done.stdout == "23bc:secret\n"
    assert "cannot be printed again (thaw key revoke 23bc ends it)" in done.stderr
    at("key", "create", "--namespace", "team-a", "--operator")
    assert [asked.body for asked in gateway.asked] == [
        {"namespace": "team-a", "role": "tenant"},
        {"namespace": "team-a", "role": "operator"},
    ]


def test_keys_are_listed_by_namespace_and_revoked_by_id(at: Run, gateway: FakeGateway) -> None:
    gateway.answers[f"GET {KEYS}"] = (200, {"keys": [MADE]})
    gateway.answers[f"DELETE {KEYS}/23bc"] = (200, MADE)
    listed = at("key", "list", "--namespace", "team-a").stdout
    assert all(word in listed for word in ("23bc", "team-a", "tenant"))
    assert gateway.asked[-1].query == {"namespace": "team-a"}
    assert "the key 23bc of team-a is revoked" in at("key", "revoke", "23bc").stdout


def test_a_tenant_reads_what_an_operator_may_do_and_what_comes_next(at: Run, gateway: FakeGateway) -> None:
    refused = {"error": "Only an operator's key may do this.", "code": "c1", "hint": "ask an operator"}
    gateway.answers["GET /api/v1/thaw/hosts"] = (403, refused)
    done = at("host", "list")
    assert done.stderr == "error: Only an operator's key may do this.\nhint: ask an operator\n"
    assert done.returncode == 147


def test_explain_asks_for_nothing_that_needs_an_operator(at: Run, gateway: FakeGateway) -> None:
    names = (Phase.RECEIVED, Phase.FETCH_BEGIN, Phase.FETCH_END, Phase.FIRST_TOKEN, Phase.FINISHED)
    moments = [event(name, activation_id="a" * 32, host="h0", n_bytes=10**8) for name in names]
    begun = moments[0].mono_ns
    events = [wire.to_plain(replace(e, mono_ns=begun + i * 1_000_000_000)) for i, e in enumerate(moments)]
    trace = {"activation": {}, "group_id": "", "events": events, "plan": None, "links": {"h0": 125_000_000.0}}
    gateway.answers[f"GET /api/v1/namespaces/_/activations/{'a' * 32}/trace"] = (200, trace)
    done = at("activation", "explain", "a" * 32)
    assert done.returncode == 0, done.stderr
    assert "of the link's 1000 Mbit/s" in done.stdout, "the rate of the link comes with the trace"
    assert [asked.path for asked in gateway.asked if "/thaw/" in asked.path] == []


def test_prefixes_are_allowed_and_taken_back_for_one_namespace(at: Run, gateway: FakeGateway) -> None:
    path = "/api/v1/thaw/namespaces/team-a/models"
    answer = (200, {"namespace": "team-a", "for_all": ["s3://models"], "own": ["s3://team-a/"]})
    gateway.answers |= {f"{method} {path}": answer for method in ("GET", "PUT", "DELETE")}
    listed = at("namespace", "models", "team-a").stdout
    assert ["s3://models", "all", "namespaces", "(THAW_MODELS)"] in [line.split() for line in listed.splitlines()]
    assert ["s3://team-a/", "team-a"] in [line.split() for line in listed.splitlines()]
    at("namespace", "allow-models", "team-a", "s3://team-a/", "s3://more")
    at("namespace", "disallow-models", "team-a", "s3://more")
    assert [(asked.method, asked.body) for asked in gateway.asked[1:]] == [
        ("PUT", {"prefixes": ["s3://team-a/", "s3://more"]}),
        ("DELETE", {"prefixes": ["s3://more"]}),
    ]


def test_a_namespaces_quotas_are_shown_and_set(at: Run, gateway: FakeGateway) -> None:
    path = "/api/v1/thaw/namespaces/team-a/quotas"
    default = {"actions": 10, "code_bytes": 20, "record_bytes": 30, "held": 40, "accepted": 50, "starts": 60}
    default |= {"weight": 1, "records": 70, "record_age_s": 80, "kept": 90}
    used = {"actions": 3, "code_bytes": 4, "record_bytes": 5, "held": 6, "accepted": 7, "records": 8}
    answer = (200, {"namespace": "team-a", "default": default, "own": {"held": 9}, "used": used})
    gateway.answers |= {f"{method} {path}": answer for method in ("GET", "PUT")}
    lines = [line.split() for line in at("namespace", "quota", "team-a").stdout.splitlines()]
    assert ["actions", "10", "3", "THAW_QUOTA_ACTIONS"] in lines
    assert ["held", "9", "6", "team-a"] in lines
    assert ["records", "70", "8", "THAW_QUOTA_RECORDS"] in lines
    assert at("namespace", "quota", "team-a", "--held", "9", "--weight", "0.5", "--starts", "default").returncode == 0
    assert gateway.asked[-1].body == {"held": 9, "weight": 0.5, "starts": None}
    wrong = at("namespace", "quota", "team-a", "--held", "many")
    assert (wrong.returncode != 0, "--held must be a number or 'default'" in wrong.stderr) == (True, True)
