"""Packages and bindings over a real socket: the rights to see them, and the parameters that an action inherits."""

from __future__ import annotations

from typing import Any

import pytest
import redis
import requests

from relay.state.entities import Change, Entities
from tests.gateway.conftest import CODE, HERE, OTHER_KEY, GatewayProcess, Start, notes, pairs, values
from thaw.entities import Package
from thaw.errors import Conflict
from thaw.ids import Namespace


def as_other(gateway: GatewayProcess, method: str, path: str, **more: Any) -> requests.Response:
    return gateway.call(method, path, key=OTHER_KEY, **more)


def test_a_package_is_created_read_updated_listed_and_deleted(gateway: GatewayProcess) -> None:
    made = gateway.put("packages/tools", parameters=pairs(a=1), annotations=pairs(note="x"))
    fields = {"namespace": "guest", "name": "tools", "version": "0.0.1", "publish": False, "binding": {}}
    assert made.items() >= fields.items()
    assert gateway.put("packages/tools", 409)["error"] == "resource already exists"
    gateway.put("actions/tools/act", exec=CODE)
    gateway.put("actions/tools/feed", exec=CODE, annotations=pairs(feed=True))
    updated = gateway.put("packages/tools?overwrite=true", publish=True, annotations=pairs(more=2))
    assert (updated["version"], updated["publish"], values(updated)) == ("0.0.2", True, {"a": 1})
    assert notes(updated) == {"note": "x", "more": 2}
    whole = gateway.read("packages/tools")
    assert [a["name"] for a in whole["actions"]] == ["act"]
    assert [a["name"] for a in whole["feeds"]] == ["feed"]
    (listed,) = gateway.read("packages")
    assert (listed["name"], listed["binding"]) == ("tools", False)
    assert gateway.read("packages?count=true") == {"packages": 1}
    full = gateway.delete("packages/tools")
    assert (full.status_code, full.json()["error"].startswith("Package not empty (contains 2 entities)")) == (409, True)
    assert gateway.delete("packages/tools?force=true").status_code == 200
    assert gateway.call("GET", f"{HERE}/packages/tools").status_code == 404
    assert gateway.read("actions") == []


def test_an_action_lives_in_its_package(gateway: GatewayProcess) -> None:
    gateway.put("actions/tools/act", 404, exec=CODE)
    gateway.put("packages/tools")
    made = gateway.put("actions/tools/act", exec=CODE)
    assert (made["namespace"], made["name"]) == ("guest/tools", "act")
    gateway.put("actions/act", exec=CODE)
    assert {a["namespace"] for a in gateway.read("actions")} == {"guest", "guest/tools"}
    (listed,) = gateway.read("actions/tools/")
    assert listed["namespace"] == "guest/tools"
    assert gateway.call("GET", f"{HERE}/actions/tools/a/b").status_code == 404
    assert gateway.delete("actions/tools/act").status_code == 200
    assert gateway.call("GET", f"{HERE}/actions/tools/act").status_code == 404
    assert gateway.call("GET", f"{HERE}/actions/act").status_code == 200


def test_parameters_come_from_package_binding_action_and_call_the_later_ones_first(gateway: GatewayProcess) -> None:
    gateway.put("packages/tools", parameters=pairs(a="package", b="package", c="package", d="package"))
    gateway.put("actions/tools/act", exec=CODE, parameters=pairs(c="action", d="action"))
    binding = {"namespace": "_", "name": "tools"}
    made = gateway.put("packages/mine", binding=binding, parameters=pairs(b="binding", c="binding", d="binding"))
    assert made["binding"] == {"namespace": "guest", "name": "tools"}
    gateway.serve("tools/act")
    bound = gateway.call("POST", f"{HERE}/actions/mine/act?blocking=true", json={"d": "call"}).json()
    assert bound["response"]["result"] == {"a": "package", "b": "binding", "c": "action", "d": "call"}
    told = notes(bound)
    assert (told["path"], told["binding"]) == ("guest/tools/act", "guest/mine")
    plain = gateway.call("POST", f"{HERE}/actions/tools/act?blocking=true&result=true", json={"d": "call"}).json()
    assert plain == {"a": "package", "b": "package", "c": "action", "d": "call"}
    assert values(gateway.read("actions/mine/act"))["b"] == "binding"
    assert values(gateway.read("packages/mine")) == dict.fromkeys("bcd", "binding") | {"a": "package"}
    assert [a["name"] for a in gateway.read("packages/mine")["actions"]] == ["act"]
    for name in ("tools/act", "mine/act"):
        (newest, *_) = gateway.read(f"activations?name={name}&limit=200")
        assert newest["name"] == "act"


def test_an_update_of_a_package_reaches_every_gateway(start_gateway: Start) -> None:
    first, second = start_gateway(), start_gateway()
    first.put("packages/tools", parameters=pairs(a=1))
    first.put("actions/tools/act", exec=CODE)
    first.serve("tools/act")
    second.wait_for_routes()

    def result(gateway: GatewayProcess) -> Any:
        return gateway.invoke("tools/act", "blocking=true&result=true").json()

    assert result(first) == result(second) == {"a": 1}
    first.put("packages/tools?overwrite=true", parameters=pairs(a=2))
    first.invoker.ready("guest/tools/act", instance="i1")  # an event behind the package's
    second.wait_for_routes(2)
    assert result(second) == {"a": 2}


def test_a_binding_is_refused_where_it_cannot_be(gateway: GatewayProcess) -> None:
    gateway.put("packages/tools")
    gateway.put("packages/mine", binding={"name": "tools"})
    for body, error in (
        ({"name": "nothing"}, "Binding references a package that does not exist."),
        ({"name": "mine"}, "Cannot bind to another package binding."),
    ):
        assert gateway.put("packages/other", 400, binding=body)["error"] == error
    becomes_one = gateway.put("packages/tools?overwrite=true", 409, binding={"name": "tools"})
    assert "cannot be converted" in becomes_one["error"]
    assert gateway.put("actions/mine/act", 400, exec=CODE)["error"] == "Operation not permitted on package."
    assert gateway.put("packages/default", 400)["error"] == "Package name 'default' is reserved."
    gateway.put("packages/mine?overwrite=true", 400, publish=True)
    gateway.put("packages/other", 400, publish="yes")
    gateway.put("packages/other", 403, binding={"namespace": "other", "name": "x"})


def test_a_shared_package_is_read_and_called_by_others_and_no_other_package_is(gateway: GatewayProcess) -> None:
    for name in ("shared", "private"):
        gateway.put(f"packages/{name}", publish=name == "shared", parameters=pairs(a=1))
        gateway.put(f"actions/{name}/act", exec=CODE)
    guest = "/api/v1/namespaces/guest"
    assert [p["name"] for p in as_other(gateway, "GET", f"{guest}/packages").json()] == ["shared"]
    assert as_other(gateway, "GET", f"{guest}/packages/shared").json()["actions"][0]["name"] == "act"
    assert as_other(gateway, "GET", f"{guest}/actions/shared/").json()[0]["name"] == "act"
    gateway.serve("shared/act")
    done = as_other(gateway, "POST", f"{guest}/actions/shared/act?blocking=true", json={"b": 2}).json()
    assert (done["namespace"], done["response"]["result"]) == ("other", {"a": 1, "b": 2})
    assert gateway.invoker.runs[0]["namespace"] == "other"
    body = {"binding": {"namespace": "guest", "name": "shared"}}
    bound = as_other(gateway, "PUT", f"{HERE}/packages/mine", json=body)
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
    gateway.put("packages/shared?overwrite=true", publish=False)
    assert as_other(gateway, "POST", f"{HERE}/actions/mine/act?blocking=true").status_code == 403


def test_a_web_action_in_a_package_inherits_its_parameters(gateway: GatewayProcess) -> None:
    gateway.put("packages/tools", parameters=pairs(a=1))
    gateway.put("actions/tools/act", exec=CODE, annotations=pairs(**{"web-export": True, "final": True}))
    gateway.serve("tools/act")
    url = f"{gateway.url}/api/v1/web/guest/tools/act.json"
    assert requests.get(url, timeout=30).json()["a"] == 1
    assert requests.get(f"{url}?a=2", timeout=30).status_code == 400


def test_of_two_updates_of_one_package_at_once_none_is_lost(gateway: GatewayProcess, valkey_url: str) -> None:
    """Both are made from the same row; the state server takes one."""
    gateway.put("packages/tools")
    with redis.Redis.from_url(valkey_url) as client:
        entities = Entities(client)
        was = entities.get(Package, Namespace("guest"), "tools")
        gateway.put("packages/tools?overwrite=true", publish=True)
        with pytest.raises(Conflict):
            entities.swap(Change(was, None))
    assert gateway.read("packages/tools")["publish"] is True


def test_a_namespace_has_room_for_so_many_packages_triggers_and_rules_and_no_more(start_gateway: Start) -> None:
    gateway = start_gateway(THAW_ENTITIES_BYTES="20000")
    gateway.put("packages/tools", parameters=pairs(a="x" * 10_000))
    gateway.put("triggers/t", parameters=pairs(a="x" * 8_000))
    full = gateway.put("triggers/u", 413, parameters=pairs(a="x" * 8_000))
    assert full["error"].startswith("The namespace's packages, triggers and rules are larger than allowed: ")
    gateway.put("packages/tools?overwrite=true", parameters=[])
    gateway.put("triggers/u", parameters=pairs(a="x" * 8_000))


def test_another_namespaces_package_makes_nothing_of_a_binding_public(gateway: GatewayProcess) -> None:
    """The package's owner may export an action at any time, but must not publish the parameters of another's
    binding."""
    exported = pairs(**{"web-export": True})
    for path, body in (("packages/theirs", {"publish": True}), ("actions/theirs/x", {"exec": CODE})):
        assert as_other(gateway, "PUT", f"{HERE}/{path}", json={**body, "annotations": exported}).status_code == 200
    gateway.put("packages/mine", binding={"namespace": "other", "name": "theirs"}, parameters=pairs(key="secret"))
    gateway.put("packages/own")
    gateway.put("actions/own/x", exec=CODE, annotations=exported)
    gateway.put("packages/bound", binding={"namespace": "_", "name": "own"}, parameters=pairs(a=1))
    gateway.invoker.ready("other/theirs/x")
    gateway.invoker.ready("guest/own/x", instance="i1")
    gateway.wait_for_routes(2)
    answers = {
        path: requests.get(f"{gateway.url}/api/v1/web/{path}/x.json", timeout=30)
        for path in ("other/theirs", "guest/mine", "guest/bound")
    }
    assert [reply.status_code for reply in answers.values()] == [200, 404, 200]
    assert answers["guest/bound"].json()["a"] == 1
