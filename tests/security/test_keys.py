"""The rights of strangers, tenants and operators at every route of a real gateway, and keys from birth to end."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import redis
import requests

from relay.state import keys
from relay.state.api_keys import ApiKey, ApiKeys, Role, digest_of
from relay.state.records import Records
from relay.state.registry import Registry
from tests.conftest import ValkeyServer
from tests.gateway.conftest import (
    KEY,
    OPERATOR_KEY,
    OTHER_KEY,
    GatewayProcess,
    gateway,
    start_gateway,
)
from tests.relay.samples import PLAN, record
from tests.security.own_process import routes
from thaw.host import Device, HostReport
from thaw.ids import ActivationId, HostId, Namespace

__all__ = ["gateway", "start_gateway"]

ACTION, ACTIVATION = "nothing", "0" * 32

ANYBODY, KEY_HOLDER, OWN, OPERATOR = "anybody", "any key", "any key, in its own namespace", "an operator's key"
WHO_MAY = {
    "GET /": ANYBODY,
    "GET /api/v1": ANYBODY,
    "GET /api/v1/api-docs": ANYBODY,
    "GET /openapi.json": ANYBODY,
    "GET /health": ANYBODY,
    "GET /live": ANYBODY,
    "GET /metrics": ANYBODY,  # only on loopback without THAW_METRICS_TOKEN; see the tests below
    "GET /api/v1/namespaces": KEY_HOLDER,
    "GET /api/v1/namespaces/<ns>/limits": OWN,
    "GET /api/v1/namespaces/<ns>/standings": OWN,
    "GET /api/v1/namespaces/<ns>/actions": OWN,
    "GET /api/v1/namespaces/<ns>/actions/<path:name>": OWN,
    "PUT /api/v1/namespaces/<ns>/actions/<path:name>": OWN,
    "DELETE /api/v1/namespaces/<ns>/actions/<path:name>": OWN,
    "POST /api/v1/namespaces/<ns>/actions/<path:name>": OWN,
    "POST /api/v1/namespaces/<ns>/preflight": OWN,
    "GET /api/v1/namespaces/<ns>/logs/<path:name>": OWN,
    "GET /api/v1/namespaces/<ns>/scaling/<path:name>": OWN,
    "PUT /api/v1/namespaces/<ns>/scaling/<path:name>": OWN,
    "POST /api/v1/namespaces/<ns>/warm/<path:name>": OWN,
    "GET /api/v1/namespaces/<ns>/work": OWN,
    "GET /api/v1/namespaces/<ns>/endings": OWN,
    "GET /api/v1/namespaces/<ns>/activations": OWN,
    "GET /api/v1/namespaces/<ns>/activations/<activation_id>": OWN,
    "GET /api/v1/namespaces/<ns>/activations/<activation_id>/result": OWN,
    "GET /api/v1/namespaces/<ns>/activations/<activation_id>/logs": OWN,
    "GET /api/v1/namespaces/<ns>/activations/<activation_id>/trace": OWN,
    **{
        f"{method} /api/v1/namespaces/<ns>/{kind}s{rest}": OWN
        for kind in ("package", "trigger", "rule")
        for method, rest in (("GET", ""), *((m, f"/<{kind}>") for m in ("GET", "PUT", "DELETE", "POST")))
        if (kind, method) != ("package", "POST")
    },
    "GET /api/v1/namespaces/<ns>/packages": KEY_HOLDER,  # another namespace's list has the shared ones: test_packages
    "POST /api/v1/namespaces/<ns>/packages/refresh": OWN,
    **{
        f"{method} /api/v1/web/<ns>/<package>/<path:rest>": ANYBODY  # web actions; the route reveals nothing else
        for method in ("GET", "POST", "PUT", "DELETE", "PATCH")
    },
    "GET /v1/models": KEY_HOLDER,
    "GET /v1/models/<path:name>": KEY_HOLDER,
    "POST /v1/chat/completions": KEY_HOLDER,
    "POST /v1/responses": KEY_HOLDER,
    "POST /v1/embeddings": KEY_HOLDER,
    "POST /tokenize": KEY_HOLDER,
    "POST /detokenize": KEY_HOLDER,
    "POST /v1/completions": KEY_HOLDER,
    "GET /api/v1/thaw/hosts": OPERATOR,
    "GET /api/v1/thaw/hosts/<host_id>/drain": OPERATOR,
    "PUT /api/v1/thaw/hosts/<host_id>/drain": OPERATOR,
    "DELETE /api/v1/thaw/hosts/<host_id>/drain": OPERATOR,
    "GET /api/v1/thaw/work": OPERATOR,
    "GET /api/v1/thaw/keys": OPERATOR,
    "POST /api/v1/thaw/keys": OPERATOR,
    "DELETE /api/v1/thaw/keys/<key_id>": OPERATOR,
    "GET /api/v1/thaw/models": OPERATOR,
    "GET /api/v1/thaw/namespaces": OPERATOR,
    "GET /api/v1/thaw/namespaces/<ns>/quotas": OPERATOR,
    "PUT /api/v1/thaw/namespaces/<ns>/quotas": OPERATOR,
    "GET /api/v1/thaw/namespaces/<ns>/models": OPERATOR,
    "PUT /api/v1/thaw/namespaces/<ns>/models": OPERATOR,
    "DELETE /api/v1/thaw/namespaces/<ns>/models": OPERATOR,
}
VALUES = {
    "<path:name>": ACTION,
    "<activation_id>": ACTIVATION,
    "<path:rest>": "x",
    "<package>": "default",
    "<trigger>": "nothing",
    "<rule>": "nothing",
    "<host_id>": "h0",
    "<key_id>": "nobody",
}


def ask(gateway: GatewayProcess, route: str, key: str | None, namespace: str = "_") -> int:
    method, _, path = route.partition(" ")
    for placeholder, value in {**VALUES, "<ns>": namespace}.items():
        path = path.replace(placeholder, value)
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    return requests.request(method, gateway.url + path, headers=headers, timeout=30).status_code


def test_the_table_of_who_may_what_has_every_route() -> None:
    assert {f"{method} {rule}" for rule, method in routes()} == set(WHO_MAY), (
        "a new route needs a line that says who may use it"
    )


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayProcess]:
    """One gateway for the whole table, with a state server that no other test empties."""
    server = ValkeyServer(tmp_path_factory.mktemp("state"))
    server.start()
    with redis.Redis.from_url(server.url) as client:
        for key, namespace, role in (
            (KEY, "guest", Role.TENANT),
            (OTHER_KEY, "other", Role.TENANT),
            (OPERATOR_KEY, "admin", Role.OPERATOR),
        ):
            ApiKeys(client).put(digest_of(key), ApiKey(Namespace(namespace), "x", role, key.partition(":")[0], 1))
    process = GatewayProcess(server.url)
    yield process
    process.end()
    server.kill()


@pytest.mark.parametrize("route", WHO_MAY)
def test_every_route_lets_in_whom_the_table_names_and_nobody_else(shared: GatewayProcess, route: str) -> None:
    who = WHO_MAY[route]
    for stranger in (None, "no-such:key", "", f"{KEY}x"):
        assert (ask(shared, route, stranger) == 401) is (who != ANYBODY), stranger
    assert (ask(shared, route, KEY) == 403) is (who == OPERATOR)
    assert ask(shared, route, KEY) != 401
    assert ask(shared, route, OPERATOR_KEY) not in (401, 403)
    if who == OWN:
        assert ask(shared, route, KEY, "other") == 403
        assert ask(shared, route, OPERATOR_KEY, "guest") == 403, "an operator reads no tenant's data"


def as_operator(gateway: GatewayProcess, method: str, path: str, **more: Any) -> requests.Response:
    headers = {"Authorization": f"Bearer {OPERATOR_KEY}"}
    return requests.request(method, gateway.url + path, headers=headers, timeout=30, **more)


def accepts(gateway: GatewayProcess, key: str) -> bool:
    headers = {"Authorization": f"Bearer {key}"}
    return requests.get(gateway.url + "/api/v1/namespaces", headers=headers, timeout=30).status_code == 200


def make_key(gateway: GatewayProcess, **body: Any) -> dict[str, Any]:
    reply = as_operator(gateway, "POST", "/api/v1/thaw/keys", json=body)
    assert reply.status_code == 200, reply.text
    assert reply.headers["Cache-Control"] == "no-store"
    return dict(reply.json())


def test_a_tenant_drains_no_host_and_learns_nothing_of_others(gateway: GatewayProcess, valkey_url: str) -> None:
    device = Device("cpu", "cpu", 1, 1)
    with redis.Redis.from_url(valkey_url) as client:
        registry = Registry(client)
        registry.report_host(HostReport(HostId("h0"), "b", "10.0.0.9:7000", (device,), 1, 1.0, "none", "process", 0, 0))
        drained = gateway.call("PUT", "/api/v1/thaw/hosts/h0/drain")
        assert (drained.status_code, drained.json()["error"]) == (403, "Only an operator's key may do this.")
        assert "thaw key create" in drained.json()["hint"]
        assert [r.draining for r in registry.hosts()] == [False]
        listed = gateway.call("GET", "/api/v1/thaw/hosts")
        assert (listed.status_code, "10.0.0.9" in listed.text) == (403, False)
        assert as_operator(gateway, "PUT", "/api/v1/thaw/hosts/h0/drain").status_code == 200
        assert [r.draining for r in registry.hosts()] == [True]


def test_a_key_is_made_listed_used_and_revoked_and_its_secret_is_stored_nowhere(
    gateway: GatewayProcess, valkey_url: str
) -> None:
    made = make_key(gateway, namespace="team-a")
    assert made["key"].startswith(f"{made['id']}:")
    assert accepts(gateway, made["key"])
    listed = as_operator(gateway, "GET", "/api/v1/thaw/keys?namespace=team-a").json()["keys"]
    assert listed == [{k: made[k] for k in ("id", "namespace", "role", "created_ms")}]
    secret = made["key"].partition(":")[2].encode()
    with redis.Redis.from_url(valkey_url) as client:
        assert secret not in b"".join(v for row in client.hgetall(keys.API_KEYS).items() for v in row)
    assert not any(made["key"].partition(":")[2] in line for line in gateway.lines)
    assert as_operator(gateway, "DELETE", f"/api/v1/thaw/keys/{made['id']}").status_code == 200
    assert not accepts(gateway, made["key"]), "the gateway that revoked it refuses it at once"
    assert as_operator(gateway, "GET", "/api/v1/thaw/keys?namespace=team-a").json()["keys"] == []
    again = as_operator(gateway, "DELETE", f"/api/v1/thaw/keys/{made['id']}")
    assert again.status_code == 200, "the same request ends it at a gateway that remembers it"
    assert as_operator(gateway, "DELETE", "/api/v1/thaw/keys/nobody").status_code == 404


def with_key(gateway: GatewayProcess, key: str, method: str, path: str, **more: Any) -> int:
    headers = {"Authorization": f"Bearer {key}"}
    return requests.request(method, gateway.url + path, headers=headers, timeout=30, **more).status_code


@pytest.mark.parametrize(
    ("method", "path"), [("POST", "/api/v1/thaw/keys"), ("DELETE", f"/api/v1/thaw/keys/{KEY.partition(':')[0]}")]
)
def test_a_revoked_operators_key_ends_at_once_at_every_gateway(
    start_gateway: Callable[..., GatewayProcess], method: str, path: str
) -> None:
    """If another gateway still accepted it, its holder could make another key, or revoke keys of others."""
    revoking, other = start_gateway(), start_gateway()
    stolen = make_key(revoking, namespace="admin", role="operator")
    assert accepts(other, stolen["key"])
    assert with_key(other, stolen["key"], "GET", "/api/v1/thaw/keys") == 200
    assert as_operator(revoking, "DELETE", f"/api/v1/thaw/keys/{stolen['id']}").status_code == 200
    assert with_key(other, stolen["key"], method, path, json={"namespace": "admin", "role": "operator"}) == 401
    assert accepts(other, KEY)
    assert not accepts(other, stolen["key"]), "what the state server said once is remembered"


def test_revoking_again_at_another_gateway_ends_a_key_there(start_gateway: Callable[..., GatewayProcess]) -> None:
    revoking, other = start_gateway(), start_gateway()
    made = make_key(revoking, namespace="team-a")
    assert accepts(other, made["key"])
    for one in (revoking, other):
        assert as_operator(one, "DELETE", f"/api/v1/thaw/keys/{made['id']}").status_code == 200
    assert not accepts(other, made["key"])


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"namespace": "_"},
        {"namespace": "a/b"},
        {"namespace": ""},
        {"namespace": 5},
        {"namespace": "a", "role": "x"},
    ],
    ids=str,
)
def test_a_key_of_no_namespace_or_role_is_refused(shared: GatewayProcess, body: dict[str, Any]) -> None:
    reply = as_operator(shared, "POST", "/api/v1/thaw/keys", json=body)
    assert reply.status_code == 400, reply.text


def test_the_last_key_of_an_operator_cannot_be_revoked(gateway: GatewayProcess) -> None:
    own = OPERATOR_KEY.partition(":")[0]
    refused = as_operator(gateway, "DELETE", f"/api/v1/thaw/keys/{own}")
    assert refused.status_code == 409
    assert "make another first" in refused.json()["hint"]
    other = make_key(gateway, namespace="admin", role="operator")
    assert as_operator(gateway, "DELETE", f"/api/v1/thaw/keys/{own}").status_code == 200
    assert as_operator(gateway, "GET", "/api/v1/thaw/keys").status_code == 401
    last = requests.delete(
        f"{gateway.url}/api/v1/thaw/keys/{other['id']}", headers={"Authorization": f"Bearer {other['key']}"}, timeout=30
    )
    assert last.status_code == 409


FIRST = "53bc46b1-71f6-4ed5-8c54-816aa4f8c502:" + "f" * 40


def test_the_first_key_is_an_operators_and_older_rows_are_tenants(
    start_gateway: Callable[..., GatewayProcess], valkey_url: str
) -> None:
    old = {"namespace": "guest", "subject": "guest"}  # the row that a version without roles wrote
    with redis.Redis.from_url(valkey_url) as client:
        for key in (FIRST, "old:key"):
            client.hset(keys.API_KEYS, hashlib.sha256(key.encode()).hexdigest(), json.dumps(old))
    gateway = start_gateway(THAW_FIRST_KEY=FIRST)
    assert accepts(gateway, "old:key")
    assert ask(gateway, "GET /api/v1/thaw/keys", "old:key") == 403
    assert ask(gateway, "GET /api/v1/thaw/keys", FIRST) == 200
    (listed,) = [
        k for k in as_operator(gateway, "GET", "/api/v1/thaw/keys").json()["keys"] if k["id"].startswith("sha")
    ]
    assert as_operator(gateway, "DELETE", f"/api/v1/thaw/keys/{listed['id']}").status_code == 200
    assert not accepts(gateway, "old:key")


def test_a_first_key_that_was_revoked_stays_revoked_when_a_gateway_starts(
    start_gateway: Callable[..., GatewayProcess],
) -> None:
    first = start_gateway(THAW_FIRST_KEY=FIRST)
    assert accepts(first, FIRST)
    assert as_operator(first, "DELETE", f"/api/v1/thaw/keys/{FIRST.partition(':')[0]}").status_code == 200
    assert not accepts(start_gateway(THAW_FIRST_KEY=FIRST), FIRST)


def test_a_revoked_row_of_a_version_without_roles_does_not_come_back_as_an_operators_key(
    start_gateway: Callable[..., GatewayProcess], valkey_url: str
) -> None:
    digest = hashlib.sha256(FIRST.encode()).hexdigest()
    with redis.Redis.from_url(valkey_url) as client:
        client.hset(keys.API_KEYS, digest, json.dumps({"namespace": "guest", "subject": "guest"}))
        gateway = start_gateway()
        assert accepts(gateway, FIRST)
        assert as_operator(gateway, "DELETE", f"/api/v1/thaw/keys/sha256-{digest[:16]}").status_code == 200
        assert not accepts(start_gateway(THAW_FIRST_KEY=FIRST), FIRST)
        half_revoked = {"namespace": "guest", "subject": "guest", "revoked_ms": 1}
        client.hset(keys.API_KEYS, digest, json.dumps(half_revoked))
        assert not accepts(start_gateway(THAW_FIRST_KEY=FIRST), FIRST)


def test_all_keys_of_an_id_are_revoked_at_once(gateway: GatewayProcess, valkey_url: str) -> None:
    """Nobody can make two keys of one id through the API; THAW_FIRST_KEY and a restored backup can."""
    own = OPERATOR_KEY.partition(":")[0]
    twins = [f"{own}:{name * 40}" for name in ("a", "b")]
    with redis.Redis.from_url(valkey_url) as client:
        for twin, role in zip(twins, Role, strict=True):
            ApiKeys(client).put(digest_of(twin), ApiKey(Namespace("admin"), "x", role, own, 1))
    refused = as_operator(gateway, "DELETE", f"/api/v1/thaw/keys/{own}")
    assert refused.status_code == 409, "all operators' keys have this id"
    last = make_key(gateway, namespace="admin", role="operator")
    assert as_operator(gateway, "DELETE", f"/api/v1/thaw/keys/{own}").status_code == 200
    assert not any(accepts(gateway, key) for key in (*twins, OPERATOR_KEY))
    assert accepts(gateway, last["key"])


def test_an_operator_sees_what_each_namespace_has(gateway: GatewayProcess) -> None:
    gateway.put_python()
    found = as_operator(gateway, "GET", "/api/v1/thaw/namespaces").json()["namespaces"]
    assert {n["namespace"]: (n["keys"], n["actions"]) for n in found} == {
        "admin": (1, 0),
        "guest": (1, 1),
        "other": (1, 0),
    }


def test_a_trace_tells_a_tenant_the_links_of_its_own_starts_hosts_and_of_no_other(
    gateway: GatewayProcess, valkey_url: str
) -> None:
    own = PLAN.stages[0].host
    device = Device("cpu", "cpu", 1, 1)
    with redis.Redis.from_url(valkey_url) as client:
        registry = Registry(client)
        for host, rate in ((own, 125e6), ("another", 25e6)):
            registry.report_host(HostReport(HostId(host), "b", "a:1", (device,), 1, rate, "none", "process", 0, 0))
        registry.put_plan(PLAN)
        ended = replace(record(ActivationId("b" * 32)), namespace=Namespace("guest"), group_id=PLAN.group_id)
        Records(client).end(ended)
    trace = gateway.call("GET", f"/api/v1/namespaces/_/activations/{'b' * 32}/trace").json()
    assert trace["links"] == {own: 125e6}


def metrics_status(gateway: GatewayProcess, authorization: str = "") -> int:
    headers = {"Authorization": authorization} if authorization else {}
    return requests.get(gateway.url + "/metrics", headers=headers, timeout=30).status_code


def test_metrics_need_a_token_where_the_gateway_listens_beyond_loopback(
    start_gateway: Callable[..., GatewayProcess], valkey_url: str
) -> None:
    with redis.Redis.from_url(valkey_url) as client:
        installation = Registry(client).host_token("the-installation's")
    gateway = start_gateway(THAW_GATEWAY_BIND="0.0.0.0:{port}")
    for refused in ("", f"Bearer {KEY}", f"Bearer {OPERATOR_KEY}", "Bearer ", "Basic eA==", "Bearer wrong"):
        assert metrics_status(gateway, refused) == 401, refused
    assert metrics_status(gateway, f"Bearer {installation}") == 200


def test_a_stranger_is_told_how_to_send_a_key(shared: GatewayProcess) -> None:
    for authorization, hint in (("Bearer no:key", "thaw property set --auth"), ("Digest x", "send Basic base64")):
        headers = {"Authorization": authorization}
        reply = requests.get(shared.url + "/api/v1/namespaces", headers=headers, timeout=30)
        assert (reply.status_code, reply.json()["hint"].startswith(hint)) == (401, True), reply.text


def test_the_metrics_token_opens_metrics_and_nothing_else(start_gateway: Callable[..., GatewayProcess]) -> None:
    gateway = start_gateway(THAW_METRICS_TOKEN="scraper")
    assert metrics_status(gateway) == 401, "behind a proxy loopback means nothing, so a token is always asked for"
    assert metrics_status(gateway, "Bearer scraper") == 200
    assert ask(gateway, "GET /api/v1/namespaces", "scraper") == 401
