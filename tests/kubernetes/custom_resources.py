"""ModelFunctions at an API server in the test's process, as a cluster keeps resources of a definition.

The definition's schema checks and completes each resource: unknown fields and wrong values are refused, and defaults
are filled in.  A change of ``spec`` raises the generation; ``status`` and ``scale`` are subresources of their own.
"""

from __future__ import annotations

import copy
import uuid
from collections.abc import Mapping
from typing import Any

import jsonschema

from tests.gateway.conftest import LLM_CONFIG
from tests.kubernetes.api_server import JSON, MERGE, ApiServer, Refusal, Request
from thaw.kubernetes.crd import GROUP, PLURAL, VERSION, definition

NAMESPACE = "thaw"


class CustomResources(ApiServer):
    collection = f"/apis/{GROUP}/{VERSION}/namespaces/{NAMESPACE}/{PLURAL}"

    def __init__(self) -> None:
        (version,) = definition()["spec"]["versions"]
        self.schema = version["schema"]["openAPIV3Schema"]["properties"]
        self.scale_paths = version["subresources"]["scale"]
        self.uid = str(uuid.uuid4())  # the UID of the namespace
        super().__init__()

    # what users and other controllers do -----------------------------------------------------------------------------

    def apply(self, name: str, spec: Mapping[str, Any]) -> dict[str, Any]:
        """Make the resource, or give it this spec, like ``kubectl apply``.  Raises Refusal."""
        wanted = checked(dict(spec), self.schema["spec"], "spec")
        with self._changed:
            if name not in self._pods:
                meta = {"name": name, "namespace": NAMESPACE, "uid": str(uuid.uuid4()), "generation": 1}
                self._pods[name] = {"apiVersion": f"{GROUP}/{VERSION}", "metadata": meta, "spec": wanted}
                return self._put("ADDED", name)
            return self._respec(name, wanted)

    def show(self, name: str) -> dict[str, Any]:
        return self.pods()[name]

    def condition(self, name: str, kind: str) -> dict[str, Any]:
        found = self.pods().get(name, {}).get("status", {}).get("conditions", [])
        return next((c for c in found if c["type"] == kind), {})

    def wait_condition(self, name: str, kind: str, status: str, reason: str) -> dict[str, Any]:
        def is_so() -> bool:
            found = self.condition(name, kind)
            return (found.get("status"), found.get("reason")) == (status, reason)

        self.wait_until(is_so, 30)
        return self.condition(name, kind)

    def wait_status(self, name: str, **fields: Any) -> None:
        self.wait_until(lambda: fields.items() <= self._pods[name].get("status", {}).items(), 30)

    def deploy(self, *names: str) -> None:
        """Make resources of ``LLM_CONFIG``, and wait until an operator has deployed each."""
        for name in names:
            self.apply(name, LLM_CONFIG)
        for name in names:
            self.wait_condition(name, "Ready", "True", "ScaledToZero")
            assert {c["status"] for c in self.show(name)["status"]["conditions"]} == {"True"}

    # what clients ask for --------------------------------------------------------------------------------------------

    def _elsewhere(self, request: Request, query: dict[str, str]) -> dict[str, Any]:
        if (request.method, request.path) == ("GET", f"/api/v1/namespaces/{NAMESPACE}"):
            return {"metadata": {"name": NAMESPACE, "uid": self.uid}}
        raise Refusal(404, "NotFound", "the server could not find the requested resource")

    def _answer(self, request: Request, name: str, sub: str, query: dict[str, str], content: str) -> dict[str, Any]:
        match request.method, sub:
            case "GET", "scale":
                return self._scale(name)
            case "PATCH", "status":
                return self._patch_status(name, request.body, content)
            case "PATCH", "scale":
                return self._patch_scale(name, request.body, content)
            case "GET", "":
                return super()._answer(request, name, sub, query, content)
        raise Refusal(405, "MethodNotAllowed", "the server does not allow this method on the requested resource")

    def _patch_status(self, name: str, body: Any, content: str) -> dict[str, Any]:
        if content != MERGE or set(body) != {"status"}:
            self.problems.append(f"a patch of the status is {content}: {body}")
        found = self._get(name)
        wanted = merged(found.get("status", {}), body["status"])
        if wanted == found.get("status"):
            return found  # nothing changes, so there is no event
        for condition in wanted.get("conditions", ()):
            if "" in condition.values():
                raise Refusal(422, "Invalid", 'status.conditions.message: must be of type string: "null"')
        self._pods[name]["status"] = checked(wanted, self.schema["status"], "status")
        return self._put("MODIFIED", name)

    def _scale(self, name: str) -> dict[str, Any]:
        found = self._get(name)
        return {
            "kind": "Scale",
            "apiVersion": "autoscaling/v1",
            "metadata": {"name": name},
            "spec": {"replicas": at(found, self.scale_paths["specReplicasPath"])},
            "status": {
                "replicas": at(found, self.scale_paths["statusReplicasPath"]) or 0,
                "selector": at(found, self.scale_paths["labelSelectorPath"]) or "",
            },
        }

    def _patch_scale(self, name: str, body: Any, content: str) -> dict[str, Any]:
        assert content in (MERGE, JSON)
        spec = self._get(name)["spec"]
        parts = self.scale_paths["specReplicasPath"].split(".")[2:]
        node = spec
        for part in parts[:-1]:
            node = node.setdefault(part, {})
        node[parts[-1]] = body["spec"]["replicas"]
        self._respec(name, checked(spec, self.schema["spec"], "spec"))
        return self._scale(name)

    def _respec(self, name: str, wanted: dict[str, Any]) -> dict[str, Any]:
        found = self._pods[name]
        if found["spec"] == wanted:
            return copy.deepcopy(found)
        found["spec"] = wanted
        found["metadata"]["generation"] += 1
        return self._put("MODIFIED", name)


def at(value: Any, path: str) -> Any:
    for part in path.strip(".").split("."):
        value = None if value is None else value.get(part)
    return value


def merged(into: Any, body: Any) -> Any:
    """RFC 7386."""
    if not isinstance(body, dict):
        return body
    found = dict(into) if isinstance(into, dict) else {}
    for name, value in body.items():
        if value is None:
            found.pop(name, None)
        else:
            found[name] = merged(found.get(name), value)
    return found


def checked(value: Any, schema: Mapping[str, Any], where: str) -> Any:
    """``value`` with the schema's defaults.  Raises Refusal as a cluster that validates strictly does."""
    value = completed(value, schema, where)
    error = next(iter(jsonschema.Draft202012Validator(schema).iter_errors(value)), None)
    if error is not None:
        raise Refusal(422, "Invalid", f"{where}.{'.'.join(map(str, error.absolute_path))}: {error.message}")
    return value


def completed(value: Any, schema: Mapping[str, Any], where: str) -> Any:
    if isinstance(value, list) and "items" in schema:
        return [completed(each, schema["items"], where) for each in value]
    if not isinstance(value, dict) or "properties" not in schema:
        return value
    unknown = value.keys() - schema["properties"].keys()
    if unknown:
        raise Refusal(400, "BadRequest", f'strict decoding error: unknown field "{where}.{min(unknown)}"')
    found = dict(value)
    for name, each in schema["properties"].items():
        if name not in found and "default" in each:
            found[name] = copy.deepcopy(each["default"])
        if name in found:
            found[name] = completed(found[name], each, f"{where}.{name}")
    return found
