"""The rights of strangers, tenants and operators at every route of a real gateway, and keys from birth to end."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
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
from tests.gateway.conftest import KEY, OPERATOR_KEY, OTHER_KEY, GatewayProcess, add_key, gateway, start_gateway
from tests.relay.samples import PLAN, record
from tests.security.own_process import routes
from tests.security.slow import Start
from thaw.host import Device, HostReport
from thaw.ids import ActivationId, HostId, Namespace

__all__ = ["gateway", "start_gateway"]

ACTION, ACTIVATION, KEYS = "nothing", "0" * 32, "/api/v1/thaw/keys"

ANYBODY, KEY_HOLDER, OWN, OPERATOR = "anybody", "any key", "any key, in its own namespace", "an operator's key"
NS, THAW, DRAIN = "/api/v1/namespaces/<ns>", "/api/v1/thaw", "/api/v1/thaw/hosts/<host_id>/drain"
ROUTES = [
    (ANYBODY, "GET", "/", "/api/v1", "/api/v1/api-docs", "/openapi.json", "/health", "/live"),
    (ANYBODY, "GET", "/metrics"),  # only on loopback without THAW_METRICS_TOKEN; see the tests below
    (ANYBODY, "GET POST PUT DELETE PATCH", "/api/v1/web/<ns>/<package>/<path:rest>"),  # web actions, and nothing else
    (KEY_HOLDER, "GET", "/api/v1/namespaces", "/v1/models", "/v1/models/<path:name>"),
    (KEY_HOLDER, "GET", f"{NS}/packages"),  # another namespace's list has the shared ones: test_packages
    (KEY_HOLDER, "POST", "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings"),
    (KEY_HOLDER, "POST", "/tokenize", "/detokenize"),
    (OWN, "GET", f"{NS}/limits", f"{NS}/standings", f"{NS}/work", f"{NS}/endings", f"{NS}/logs/<path:name>"),
    (OWN, "POST", f"{NS}/preflight", f"{NS}/warm/<path:name>", f"{NS}/packages/refresh"),
    (OWN, "GET PUT", f"{NS}/scaling/<path:name>"),
    (OWN, "GET", f"{NS}/actions", f"{NS}/activations", f"{NS}/triggers", f"{NS}/rules"),
    (OWN, "GET", *(f"{NS}/activations/<activation_id>{of}" for of in ("", "/result", "/logs", "/trace"))),
    (OWN, "GET PUT DELETE", f"{NS}/packages/<package>"),
    (OWN, "GET PUT DELETE POST", f"{NS}/actions/<path:name>", f"{NS}/triggers/<trigger>", f"{NS}/rules/<rule>"),
    (OPERATOR, "GET", f"{THAW}/hosts", f"{THAW}/work", f"{THAW}/models", f"{THAW}/namespaces"),
    (OPERATOR, "GET POST", f"{THAW}/keys"),
    (OPERATOR, "DELETE", f"{THAW}/keys/<key_id>"),
    (OPERATOR, "GET PUT", f"{THAW}/namespaces/<ns>/quotas"),
    (OPERATOR, "GET PUT DELETE", DRAIN, f"{THAW}/namespaces/<ns>/models"),
]
WHO_MAY = {f"{m} {path}": who for who, methods, *paths in ROUTES for path in paths for m in methods.split()}
VALUES = {
    **{"<path:name>": ACTION, "<activation_id>": ACTIVATION, "<path:rest>": "x", "<package>": "default"},
    **{"<trigger>": "nothing", "<rule>": "nothing", "<host_id>": "h0", "<key_id>": "nobody"},
}


def with_key(gateway: GatewayProcess, key: str | None, method: str, path: str, **more: Any) -> requests.Response:
    if key is not None:
        more["headers"] = {"Authorization": f"Bearer {key}"}
    return requests.request(method, gateway.url + path, timeout=30, **more)


def ask(gateway: GatewayProcess, route: str, key: str | None, namespace: str = "_") -> int:
    method, _, path = route.partition(" ")
    for placeholder, value in {**VALUES, "<ns>": namespace}.items():
        path = path.replace(placeholder, value)
    return with_key(gateway, key, method, path).status_code


def test_the_table_of_who_may_what_has_every_route() -> None:
    assert {f"{method} {rule}" for rule, method in routes()} == set(WHO_MAY), (
        "a new route needs a line that says who may use it"
    )


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayProcess]:
    """One gateway for the whole table, with a state server that no other test empties."""
    server = ValkeyServer(tmp_path_factory.mktemp("state"))
    server.start()
    add_key(server.url, KEY, "guest")
    add_key(server.url, OTHER_KEY, "other")
    add_key(server.url, OPERATOR_KEY, "admin", Role.OPERATOR)
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
    return with_key(gateway, OPERATOR_KEY, method, path, **more)


def accepts(gateway: GatewayProcess, key: str) -> bool:
    return with_key(gateway, key, "GET", "/api/v1/namespaces").status_code == 200


def make_key(gateway: GatewayProcess, **body: Any) -> dict[str, Any]:
    reply = as_operator(gateway, "POST", KEYS, json=body)
    assert reply.status_code == 200, reply.text
    assert reply.headers["Cache-Control"] == "no-store"
    return dict(reply.json())


def revoke(gateway: GatewayProcess, key_id: str) -> int:
    return as_operator(gateway, "DELETE", f"{KEYS}/{key_id}").status_code


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
    listed = as_operator(gateway, "GET", f"{KEYS}?namespace=team-a").json()["keys"]
    assert listed == [{k: made[k] for k in ("id", "namespace", "role", "created_ms")}]
    secret = made["key"].partition(":")[2].encode()
    with redis.Redis.from_url(valkey_url) as client:
        assert secret not in b"".join(v for row in client.hgetall(keys.API_KEYS).items() for v in row)
    assert not any(made["key"].partition(":")[2] in line for line in gateway.lines)
    assert revoke(gateway, made["id"]) == 200
    assert not accepts(gateway, made["key"]), "the gateway that revoked it refuses it at once"
    assert as_operator(gateway, "GET", f"{KEYS}?namespace=team-a").json()["keys"] == []
    assert revoke(gateway, made["id"]) == 200, "the same request ends it at a gateway that remembers it"
    assert revoke(gateway, "nobody") == 404


@pytest.mark.parametrize(("method", "path"), [("POST", KEYS), ("DELETE", f"{KEYS}/{KEY.partition(':')[0]}")])
def test_a_revoked_operators_key_ends_at_once_at_every_gateway(start_gateway: Start, method: str, path: str) -> None:
    """If another gateway still accepted it, its holder could make another key, or revoke keys of others."""
    revoking, other = start_gateway(), start_gateway()
    stolen = make_key(revoking, namespace="admin", role="operator")
    assert accepts(other, stolen["key"])
    assert with_key(other, stolen["key"], "GET", KEYS).status_code == 200
    assert revoke(revoking, stolen["id"]) == 200
    body = {"namespace": "admin", "role": "operator"}
    assert with_key(other, stolen["key"], method, path, json=body).status_code == 401
    assert accepts(other, KEY)
    assert not accepts(other, stolen["key"]), "what the state server said once is remembered"


def test_revoking_again_at_another_gateway_ends_a_key_there(start_gateway: Start) -> None:
    revoking, other = start_gateway(), start_gateway()
    made = make_key(revoking, namespace="team-a")
    assert accepts(other, made["key"])
    assert [revoke(one, made["id"]) for one in (revoking, other)] == [200, 200]
    assert not accepts(other, made["key"])


@pytest.mark.parametrize(
    "body", [{}, *({"namespace": name} for name in ("_", "a/b", "", 5)), {"namespace": "a", "role": "x"}], ids=str
)
def test_a_key_of_no_namespace_or_role_is_refused(shared: GatewayProcess, body: dict[str, Any]) -> None:
    assert as_operator(shared, "POST", KEYS, json=body).status_code == 400


def test_the_last_key_of_an_operator_cannot_be_revoked(gateway: GatewayProcess) -> None:
    own = OPERATOR_KEY.partition(":")[0]
    refused = as_operator(gateway, "DELETE", f"{KEYS}/{own}")
    assert refused.status_code == 409
    assert "make another first" in refused.json()["hint"]
    other = make_key(gateway, namespace="admin", role="operator")
    assert revoke(gateway, own) == 200
    assert as_operator(gateway, "GET", KEYS).status_code == 401
    assert with_key(gateway, other["key"], "DELETE", f"{KEYS}/{other['id']}").status_code == 409


FIRST = "53bc46b1-71f6-4ed5-8c54-816aa4f8c502:" + "f" * 40


def test_the_first_key_is_an_operators_and_older_rows_are_tenants(start_gateway: Start, valkey_url: str) -> None:
    old = {"namespace": "guest", "subject": "guest"}  # the row that a version without roles wrote
    with redis.Redis.from_url(valkey_url) as client:
        for key in (FIRST, "old:key"):
            client.hset(keys.API_KEYS, hashlib.sha256(key.encode()).hexdigest(), json.dumps(old))
    gateway = start_gateway(THAW_FIRST_KEY=FIRST)
    assert accepts(gateway, "old:key")
    assert ask(gateway, f"GET {KEYS}", "old:key") == 403
    assert ask(gateway, f"GET {KEYS}", FIRST) == 200
    (listed,) = [k for k in as_operator(gateway, "GET", KEYS).json()["keys"] if k["id"].startswith("sha")]
    assert revoke(gateway, listed["id"]) == 200
    assert not accepts(gateway, "old:key")


def test_a_first_key_that_was_revoked_stays_revoked_when_a_gateway_starts(start_gateway: Start) -> None:
    first = start_gateway(THAW_FIRST_KEY=FIRST)
    assert accepts(first, FIRST)
    assert revoke(first, FIRST.partition(":")[0]) == 200
    assert not accepts(start_gateway(THAW_FIRST_KEY=FIRST), FIRST)


def test_a_revoked_row_of_a_version_without_roles_does_not_come_back_as_an_operators_key(
    start_gateway: Start, valkey_url: str
) -> None:
    digest = hashlib.sha256(FIRST.encode()).hexdigest()
    with redis.Redis.from_url(valkey_url) as client:
        client.hset(keys.API_KEYS, digest, json.dumps({"namespace": "guest", "subject": "guest"}))
        gateway = start_gateway()
        assert accepts(gateway, FIRST)
        assert revoke(gateway, f"sha256-{digest[:16]}") == 200
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
    assert revoke(gateway, own) == 409, "all operators' keys have this id"
    last = make_key(gateway, namespace="admin", role="operator")
    assert revoke(gateway, own) == 200
    assert not any(accepts(gateway, key) for key in (*twins, OPERATOR_KEY))
    assert accepts(gateway, last["key"])


def test_an_operator_sees_what_each_namespace_has(gateway: GatewayProcess) -> None:
    gateway.put_python()
    found = as_operator(gateway, "GET", "/api/v1/thaw/namespaces").json()["namespaces"]
    rows = {n["namespace"]: (n["keys"], n["actions"]) for n in found}
    assert rows == {"admin": (1, 0), "guest": (1, 1), "other": (1, 0)}


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
    return with_key(gateway, None, "GET", "/metrics", headers=headers).status_code


def test_metrics_need_a_token_where_the_gateway_listens_beyond_loopback(start_gateway: Start, valkey_url: str) -> None:
    with redis.Redis.from_url(valkey_url) as client:
        installation = Registry(client).host_token("the-installation's")
    gateway = start_gateway(THAW_GATEWAY_BIND="0.0.0.0:{port}")
    for refused in ("", f"Bearer {KEY}", f"Bearer {OPERATOR_KEY}", "Bearer ", "Basic eA==", "Bearer wrong"):
        assert metrics_status(gateway, refused) == 401, refused
    assert metrics_status(gateway, f"Bearer {installation}") == 200


def test_a_stranger_is_told_how_to_send_a_key(shared: GatewayProcess) -> None:
    for authorization, hint in (("Bearer no:key", "thaw property set --auth"), ("Digest x", "send Basic base64")):
        headers = {"Authorization": authorization}
        reply = with_key(shared, None, "GET", "/api/v1/namespaces", headers=headers)
        assert (reply.status_code, reply.json()["hint"].startswith(hint)) == (401, True), reply.text


def test_the_metrics_token_opens_metrics_and_nothing_else(start_gateway: Start) -> None:
    gateway = start_gateway(THAW_METRICS_TOKEN="scraper")
    assert metrics_status(gateway) == 401, "behind a proxy loopback means nothing, so a token is always asked for"
    assert metrics_status(gateway, "Bearer scraper") == 200
    assert ask(gateway, "GET /api/v1/namespaces", "scraper") == 401
