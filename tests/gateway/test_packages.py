"""Packages and bindings over a real socket: the rights to see them, and the parameters that an action inherits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import redis
import requests

from relay.state.entities import Change, Entities
from tests.gateway.conftest import OTHER_KEY, GatewayProcess
from tests.gateway.fake_invoker import FakeInvoker
from thaw.entities import Package
from thaw.errors import Conflict
from thaw.ids import Namespace

HERE = "/api/v1/namespaces/_"
CODE = {"kind": "python:3.11", "code": "def main(args):\n    return args\n"}


def pairs(**values: object) -> list[dict[str, object]]:
    return [{"key": k, "value": v} for k, v in values.items()]


def values(entity: dict[str, Any], field: str = "parameters") -> dict[str, Any]:
    return {p["key"]: p["value"] for p in entity[field]}


def put(gateway: GatewayProcess, path: str, expect: int = 200, **body: Any) -> dict[str, Any]:
    reply = gateway.call("PUT", f"{HERE}/{path}", json=body)
    assert reply.status_code == expect, reply.text
    return dict(reply.json())


def as_other(gateway: GatewayProcess, method: str, path: str, **more: Any) -> requests.Response:
    headers = {"Authorization": f"Bearer {OTHER_KEY}"}
    return requests.request(method, gateway.url + path, headers=headers, timeout=30, **more)


def test_a_package_is_created_read_updated_listed_and_deleted(gateway: GatewayProcess) -> None:
    made = put(gateway, "packages/tools", parameters=pairs(a=1), annotations=pairs(note="x"))
    assert {k: made[k] for k in ("namespace", "name", "version", "publish", "binding")} == {
        "namespace": "guest",
        "name": "tools",
        "version": "0.0.1",
        "publish": False,
        "binding": {},
    }
    assert put(gateway, "packages/tools", 409)["error"] == "resource already exists"
    put(gateway, "actions/tools/act", exec=CODE)
    put(gateway, "actions/tools/feed", exec=CODE, annotations=pairs(feed=True))
    updated = put(gateway, "packages/tools?overwrite=true", publish=True, annotations=pairs(more=2))
    assert (updated["version"], updated["publish"], values(updated)) == ("0.0.2", True, {"a": 1})
    assert values(updated, "annotations") == {"note": "x", "more": 2}
    whole = gateway.call("GET", f"{HERE}/packages/tools").json()
    assert [a["name"] for a in whole["actions"]] == ["act"]
    assert [a["name"] for a in whole["feeds"]] == ["feed"]
    (listed,) = gateway.call("GET", f"{HERE}/packages").json()
    assert (listed["name"], listed["binding"]) == ("tools", False)
    assert gateway.call("GET", f"{HERE}/packages?count=true").json() == {"packages": 1}
    full = gateway.call("DELETE", f"{HERE}/packages/tools")
    assert (full.status_code, full.json()["error"].startswith("Package not empty (contains 2 entities)")) == (409, True)
    assert gateway.call("DELETE", f"{HERE}/packages/tools?force=true").status_code == 200
    assert gateway.call("GET", f"{HERE}/packages/tools").status_code == 404
    assert gateway.call("GET", f"{HERE}/actions").json() == []


def test_an_action_lives_in_its_package(gateway: GatewayProcess) -> None:
    put(gateway, "actions/tools/act", 404, exec=CODE)
    put(gateway, "packages/tools")
    made = put(gateway, "actions/tools/act", exec=CODE)
    assert (made["namespace"], made["name"]) == ("guest/tools", "act")
    put(gateway, "actions/act", exec=CODE)
    assert {a["namespace"] for a in gateway.call("GET", f"{HERE}/actions").json()} == {"guest", "guest/tools"}
    (listed,) = gateway.call("GET", f"{HERE}/actions/tools/").json()
    assert listed["namespace"] == "guest/tools"
    assert gateway.call("GET", f"{HERE}/actions/tools/a/b").status_code == 404
    assert gateway.call("DELETE", f"{HERE}/actions/tools/act").status_code == 200
    assert gateway.call("GET", f"{HERE}/actions/tools/act").status_code == 404
    assert gateway.call("GET", f"{HERE}/actions/act").status_code == 200


def test_parameters_come_from_package_binding_action_and_call_the_later_ones_first(
    gateway: GatewayProcess, invoker: FakeInvoker
) -> None:
    put(gateway, "packages/tools", parameters=pairs(a="package", b="package", c="package", d="package"))
    put(gateway, "actions/tools/act", exec=CODE, parameters=pairs(c="action", d="action"))
    binding = {"namespace": "_", "name": "tools"}
    made = put(gateway, "packages/mine", binding=binding, parameters=pairs(b="binding", c="binding", d="binding"))
    assert made["binding"] == {"namespace": "guest", "name": "tools"}
    invoker.ready("guest/tools/act")
    gateway.wait_for_routes()
    bound = gateway.call("POST", f"{HERE}/actions/mine/act?blocking=true", json={"d": "call"}).json()
    assert bound["response"]["result"] == {"a": "package", "b": "binding", "c": "action", "d": "call"}
    notes = values(bound, "annotations")
    assert (notes["path"], notes["binding"]) == ("guest/tools/act", "guest/mine")
    plain = gateway.call("POST", f"{HERE}/actions/tools/act?blocking=true&result=true", json={"d": "call"}).json()
    assert plain == {"a": "package", "b": "package", "c": "action", "d": "call"}
    assert values(gateway.call("GET", f"{HERE}/actions/mine/act").json())["b"] == "binding"
    assert values(gateway.call("GET", f"{HERE}/packages/mine").json()) == dict.fromkeys("bcd", "binding") | {
        "a": "package"
    }
    assert [a["name"] for a in gateway.call("GET", f"{HERE}/packages/mine").json()["actions"]] == ["act"]
    for name in ("tools/act", "mine/act"):
        (newest, *_) = gateway.call("GET", f"{HERE}/activations?name={name}&limit=200").json()
        assert newest["name"] == "act"


def test_an_update_of_a_package_reaches_every_gateway(start_gateway: Any, invoker: FakeInvoker) -> None:
    first, second = start_gateway(), start_gateway()
    put(first, "packages/tools", parameters=pairs(a=1))
    put(first, "actions/tools/act", exec=CODE)
    invoker.ready("guest/tools/act")
    call = f"{HERE}/actions/tools/act?blocking=true&result=true"
    for gateway in (first, second):
        gateway.wait_for_routes()
        assert gateway.call("POST", call).json() == {"a": 1}
    put(first, "packages/tools?overwrite=true", parameters=pairs(a=2))
    invoker.ready("guest/tools/act", instance="i1")  # an event behind the package's
    second.wait_for_routes(2)
    assert second.call("POST", call).json() == {"a": 2}


def test_a_binding_is_refused_where_it_cannot_be(gateway: GatewayProcess) -> None:
    put(gateway, "packages/tools")
    put(gateway, "packages/mine", binding={"name": "tools"})
    for body, error in (
        ({"name": "nothing"}, "Binding references a package that does not exist."),
        ({"name": "mine"}, "Cannot bind to another package binding."),
    ):
        assert put(gateway, "packages/other", 400, binding=body)["error"] == error
    assert (
        "cannot be converted" in put(gateway, "packages/tools?overwrite=true", 409, binding={"name": "tools"})["error"]
    )
    assert put(gateway, "actions/mine/act", 400, exec=CODE)["error"] == "Operation not permitted on package."
    assert put(gateway, "packages/default", 400)["error"] == "Package name 'default' is reserved."
    put(gateway, "packages/mine?overwrite=true", 400, publish=True)
    put(gateway, "packages/other", 400, publish="yes")
    put(gateway, "packages/other", 403, binding={"namespace": "other", "name": "x"})


def test_a_shared_package_is_read_and_called_by_others_and_no_other_package_is(
    gateway: GatewayProcess, invoker: FakeInvoker
) -> None:
    for name in ("shared", "private"):
        put(gateway, f"packages/{name}", publish=name == "shared", parameters=pairs(a=1))
        put(gateway, f"actions/{name}/act", exec=CODE)
    guest = "/api/v1/namespaces/guest"
    assert [p["name"] for p in as_other(gateway, "GET", f"{guest}/packages").json()] == ["shared"]
    assert as_other(gateway, "GET", f"{guest}/packages/shared").json()["actions"][0]["name"] == "act"
    assert as_other(gateway, "GET", f"{guest}/actions/shared/").json()[0]["name"] == "act"
    invoker.ready("guest/shared/act")
    gateway.wait_for_routes()
    done = as_other(gateway, "POST", f"{guest}/actions/shared/act?blocking=true", json={"b": 2}).json()
    assert (done["namespace"], done["response"]["result"]) == ("other", {"a": 1, "b": 2})
    assert invoker.runs[0]["namespace"] == "other"
    bound = as_other(
        gateway, "PUT", f"{HERE}/packages/mine", json={"binding": {"namespace": "guest", "name": "shared"}}
    )
    assert bound.status_code == 200, bound.text
    assert as_other(gateway, "POST", f"{HERE}/actions/mine/act?blocking=true&result=true").json() == {"a": 1}
    for method, path in (
        ("GET", "packages/private"),
        ("GET", "actions/private/act"),
        ("GET", "actions/private/"),
        ("POST", "actions/private/act"),
        ("GET", "actions/nothing/act"),
        ("PUT", "actions/shared/act?overwrite=true"),
        ("DELETE", "actions/shared/act"),
        ("PUT", "packages/shared?overwrite=true"),
        ("DELETE", "packages/shared"),
    ):
        refused = as_other(gateway, method, f"{guest}/{path}", json={})
        assert refused.status_code == 403, (method, path, refused.text)
    put(gateway, "packages/shared?overwrite=true", publish=False)
    assert as_other(gateway, "POST", f"{HERE}/actions/mine/act?blocking=true").status_code == 403


def test_a_web_action_in_a_package_inherits_its_parameters(gateway: GatewayProcess, invoker: FakeInvoker) -> None:
    put(gateway, "packages/tools", parameters=pairs(a=1))
    put(gateway, "actions/tools/act", exec=CODE, annotations=pairs(**{"web-export": True, "final": True}))
    invoker.ready("guest/tools/act")
    gateway.wait_for_routes()
    url = f"{gateway.url}/api/v1/web/guest/tools/act.json"
    assert requests.get(url, timeout=30).json()["a"] == 1
    assert requests.get(f"{url}?a=2", timeout=30).status_code == 400


def test_of_two_updates_of_one_package_at_once_none_is_lost(gateway: GatewayProcess, valkey_url: str) -> None:
    """Both are made from the same row; the state server takes one."""
    put(gateway, "packages/tools")
    with redis.Redis.from_url(valkey_url) as client:
        entities = Entities(client)
        was = entities.get(Package, Namespace("guest"), "tools")
        put(gateway, "packages/tools?overwrite=true", publish=True)
        with pytest.raises(Conflict):
            entities.swap(Change(was, None))
    assert gateway.call("GET", f"{HERE}/packages/tools").json()["publish"] is True


def test_a_namespace_has_room_for_so_many_packages_triggers_and_rules_and_no_more(
    start_gateway: Callable[..., GatewayProcess],
) -> None:
    gateway = start_gateway(THAW_ENTITIES_BYTES="20000")
    put(gateway, "packages/tools", parameters=pairs(a="x" * 10_000))
    put(gateway, "triggers/t", parameters=pairs(a="x" * 8_000))
    full = put(gateway, "triggers/u", 413, parameters=pairs(a="x" * 8_000))
    assert full["error"].startswith("The namespace's packages, triggers and rules are larger than allowed: ")
    put(gateway, "packages/tools?overwrite=true", parameters=[])
    put(gateway, "triggers/u", parameters=pairs(a="x" * 8_000))


def test_another_namespaces_package_makes_nothing_of_a_binding_public(
    gateway: GatewayProcess, invoker: FakeInvoker
) -> None:
    """The package's owner may export an action at any time, but must not publish the parameters of another's
    binding."""
    exported = pairs(**{"web-export": True})
    for path, body in (("packages/theirs", {"publish": True}), ("actions/theirs/x", {"exec": CODE})):
        assert as_other(gateway, "PUT", f"{HERE}/{path}", json={**body, "annotations": exported}).status_code == 200
    put(gateway, "packages/mine", binding={"namespace": "other", "name": "theirs"}, parameters=pairs(key="secret"))
    put(gateway, "packages/own")
    put(gateway, "actions/own/x", exec=CODE, annotations=exported)
    put(gateway, "packages/bound", binding={"namespace": "_", "name": "own"}, parameters=pairs(a=1))
    invoker.ready("other/theirs/x")
    invoker.ready("guest/own/x", instance="i1")
    gateway.wait_for_routes(2)
    answers = {
        path: requests.get(f"{gateway.url}/api/v1/web/{path}/x.json", timeout=30)
        for path in ("other/theirs", "guest/mine", "guest/bound")
    }
    assert {path: reply.status_code for path, reply in answers.items()} == {
        "other/theirs": 200,
        "guest/mine": 404,
        "guest/bound": 200,
    }
    assert answers["guest/bound"].json()["a"] == 1
