"""The API as an OpenAPI 3.0 document, at ``/openapi.json`` and ``/api/v1/api-docs`` (OpenWhisk's path).

The table below says what each route takes.  One test compares it with the routes.  Another one sends requests that it
describes, and requests that it does not.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from flask import Blueprint, Response

from gateway.api import openapi_v1 as v1
from gateway.api.http import OPENAI_PATHS, json_response
from gateway.api.openwhisk.action_body import LLM_LIMITS
from thaw import __version__
from thaw.config import MOST_INSTANCES
from thaw.quotas import MOST_WEIGHT, NAMES

blueprint = Blueprint("openapi", __name__)
Json = Mapping[str, Any]

_TEXT: Final = {"type": "string"}
_FLAG: Final = {"type": "boolean"}
_COUNT: Final = {"type": "integer", "minimum": 0, "maximum": 2**53 - 1}
_PAIRS: Final = {
    "type": "array",
    "items": {"type": "object", "required": ["key"], "properties": {"key": _TEXT, "value": {}}},
}
_VERSION: Final = {"type": "string", "pattern": "^[0-9]{1,9}(\\.[0-9]{1,9}){2}$"}
_NS: Final = {"name": "ns", "in": "path", "required": True, "schema": {"type": "string", "example": "_"}}


def _path(name: str) -> Json:
    return {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}


def _query(**schemas: Json) -> list[Json]:
    return [{"name": name, "in": "query", "schema": schema} for name, schema in schemas.items()]


_LIMITS: Final = {
    "type": "object",
    "properties": {
        name: {"type": "integer", "minimum": low, "maximum": high} for name, (low, high) in LLM_LIMITS.items()
    },
}
_ACTION: Final = {
    "type": "object",
    "properties": {
        "exec": {
            "type": "object",
            "required": ["kind"],
            "properties": {
                "kind": {
                    "type": "string",
                    "enum": ["python:3.11", "python:default", "llm:vllm", "llm:default", "sequence"],
                },
                "code": _TEXT,
                "main": _TEXT,
                "binary": _FLAG,
                "components": {"type": "array", "items": _TEXT},
            },
        },
        "config": {"type": "object"},
        "scaling": {"type": "object", "properties": {"min_instances": _COUNT, "max_instances": _COUNT}},
        "limits": _LIMITS,
        "parameters": _PAIRS,
        "annotations": _PAIRS,
        "delAnnotations": {"type": "array", "items": _TEXT},
        "publish": _FLAG,
        "version": _VERSION,
    },
}
_CONFIG: Final = {"type": "object", "required": ["config"], "properties": {"config": {"type": "object"}}}
_PAGE: Final[dict[str, Json]] = {
    "limit": {"type": "integer", "minimum": 0, "maximum": 200},
    "skip": _COUNT,
    "count": _FLAG,
}
_WAIT: Final = {"wait_s": {"type": "number", "minimum": 0, "maximum": 30}}
_RECORDS: Final = _query(**_PAGE, name=_TEXT, since=_COUNT, upto=_COUNT, docs=_FLAG)
_ENDINGS: Final = _query(after=_TEXT, name=_TEXT, limit=_PAGE["limit"], **_WAIT)
_INVOKE: Final = _query(blocking=_FLAG, result=_FLAG, timeout={"type": "integer", "minimum": 1, "maximum": 60_000})
_OF_NS: Final = "/api/v1/namespaces/{ns}"
_ACTION_PATH: Final = (f"{_OF_NS}/actions/{{name}}", [_NS, _path("name")])
_WRITE: Final = [*_ACTION_PATH[1], *_query(version=_VERSION)]
_WEB_PATH: Final = (
    "/api/v1/web/{ns}/{package}/{rest}",
    [{**_NS, "schema": {"type": "string", "example": "guest"}}, _path("package"), _path("rest")],
)
_RECORD_PARAMETERS: Final = [_NS, _path("activation_id")]

_MODELS_OF: Final = "/api/v1/thaw/namespaces/{ns}/models"
_KEY: Final = {
    "type": "object",
    "required": ["namespace"],
    "properties": {"namespace": _TEXT, "role": {"type": "string", "enum": ["tenant", "operator"]}},
}
_QUOTAS_OF: Final = "/api/v1/thaw/namespaces/{ns}/quotas"
_QUOTAS: Final = {
    "type": "object",
    "minProperties": 1,
    "additionalProperties": False,
    "properties": {
        name: {"type": "number", "minimum": 0, "exclusiveMinimum": True, "maximum": MOST_WEIGHT, "nullable": True}
        if name == "weight"
        else {"type": "integer", "minimum": 0, "maximum": 2**53 - 1, "nullable": True}
        for name in NAMES
    },
}
_PREFIXES: Final = {
    "type": "object",
    "required": ["prefixes"],
    "properties": {"prefixes": {"type": "array", "minItems": 1, "items": _TEXT}},
}

_SCALING: Final = {
    "type": "object",
    "minProperties": 1,
    "additionalProperties": False,
    "properties": {
        "min_instances": {"type": "integer", "minimum": 0, "maximum": MOST_INSTANCES},
        "max_instances": {"type": "integer", "minimum": 1, "maximum": MOST_INSTANCES},
        "keep_alive_s": {"type": "number", "minimum": 0, "maximum": 31_536_000},
        "annotations": _PAIRS,
    },
}

_ENTITY: Final = {"parameters": _PAIRS, "annotations": _PAIRS, "publish": _FLAG}
_PACKAGE: Final = {
    "type": "object",
    "properties": {
        **_ENTITY,
        "binding": {"type": "object", "properties": {"namespace": _TEXT, "name": _TEXT}},
    },
}
_TRIGGER: Final = {"type": "object", "properties": _ENTITY}
_RULE: Final = {"type": "object", "required": ["trigger", "action"], "properties": {"trigger": _TEXT, "action": _TEXT}}
_STATUS: Final = {
    "type": "object",
    "required": ["status"],
    "properties": {"status": {"type": "string", "enum": ["active", "inactive"]}},
}


def _entity_routes(name: str, entity: Json) -> list[tuple[str, str, str, list[Json], Json | None]]:
    """The routes that packages, triggers and rules have in common: method, end of the path, summary, parameters,
    body."""
    one, path = f"/{{{name}}}", [_path(name)]
    more = _query(public=_FLAG) if name == "package" else []
    return [
        ("get", "", "a list", [*_query(**_PAGE), *more], None),
        ("get", one, "one", path, None),
        ("put", one, "create or update one", [*path, *_query(overwrite=_FLAG)], entity),
        ("delete", one, "delete one", [*path, *(_query(force=_FLAG) if name == "package" else [])], None),
    ]


_OPEN: Final = {
    "/": "the installation",
    "/api/v1": "the API",
    "/health": "ready to serve?",
    "/live": "alive?",
    "/metrics": "Prometheus",
}
"""The routes that need no key."""
_HERE: Final = ("/openapi.json", "/api/v1/api-docs")
_ROUTES: Final[tuple[tuple[str, str, str, list[Json], Json | None], ...]] = (
    ("get", "/api/v1/namespaces", "the key's namespace", [], None),
    ("get", f"{_OF_NS}/limits", "limits and sizes", [_NS], None),
    ("get", f"{_OF_NS}/actions", "list actions", [_NS, *_query(**_PAGE)], None),
    ("get", _ACTION_PATH[0], "an action", [*_ACTION_PATH[1], *_query(code=_FLAG)], None),
    ("put", _ACTION_PATH[0], "create or update", [*_WRITE, *_query(overwrite=_FLAG, force=_FLAG)], _ACTION),
    ("post", _ACTION_PATH[0], "invoke", [*_ACTION_PATH[1], *_INVOKE], {"type": "object"}),
    ("delete", _ACTION_PATH[0], "delete", _WRITE, None),
    *(
        (method, f"{_OF_NS}/{kind}{part}", f"{what} of {kind}", [_NS, *more], body)
        for kind, entity in (("packages", _PACKAGE), ("triggers", _TRIGGER), ("rules", _RULE))
        for method, part, what, more, body in _entity_routes(kind[:-1], entity)
    ),
    ("post", f"{_OF_NS}/packages/refresh", "absent", [_NS], None),
    ("post", f"{_OF_NS}/triggers/{{trigger}}", "fire", [_NS, _path("trigger")], {"type": "object"}),
    ("post", f"{_OF_NS}/rules/{{rule}}", "switch on or off", [_NS, _path("rule")], _STATUS),
    *((method, _WEB_PATH[0], "call a web action", _WEB_PATH[1], None) for method in ("get", "delete")),
    *(
        (method, _WEB_PATH[0], "call a web action", _WEB_PATH[1], {"type": "object"})
        for method in ("post", "put", "patch")
    ),
    ("get", f"{_OF_NS}/logs/{{name}}", "the last output of ended containers", _ACTION_PATH[1], None),
    ("get", f"{_OF_NS}/scaling/{{name}}", "how many instances an action has", _ACTION_PATH[1], None),
    ("put", f"{_OF_NS}/scaling/{{name}}", "change that, without a new version", _WRITE, _SCALING),
    ("post", f"{_OF_NS}/warm/{{name}}", "start an instance ahead", [*_ACTION_PATH[1], *_query(**_WAIT)], None),
    ("get", f"{_OF_NS}/standings", "how models stand", [_NS, *_query(known=_TEXT, **_WAIT)], None),
    ("get", f"{_OF_NS}/work", "what runs, starts and waits", [_NS, *_query(known=_TEXT, **_WAIT)], None),
    ("post", f"{_OF_NS}/preflight", "would this model start?", [_NS], _CONFIG),
    ("get", f"{_OF_NS}/activations", "list records", [_NS, *_RECORDS], None),
    ("get", f"{_OF_NS}/endings", "follow calls as they end", [_NS, *_ENDINGS], None),
    ("get", f"{_OF_NS}/activations/{{activation_id}}", "a record", [*_RECORD_PARAMETERS, *_query(**_WAIT)], None),
    *(
        ("get", f"{_OF_NS}/activations/{{activation_id}}{part}", what, _RECORD_PARAMETERS, None)
        for part, what in (("/result", "its result"), ("/logs", "its logs"), ("/trace", "its trace"))
    ),
    ("get", "/api/v1/thaw/hosts", "the hosts' reports", [], None),
    ("put", "/api/v1/thaw/hosts/{host_id}/drain", "drain a host", [_path("host_id")], None),
    ("delete", "/api/v1/thaw/hosts/{host_id}/drain", "take a host back", [_path("host_id")], None),
    (
        "get",
        "/api/v1/thaw/hosts/{host_id}/drain",
        "what is left on a host",
        [_path("host_id"), *_query(known=_TEXT, **_WAIT)],
        None,
    ),
    ("get", "/api/v1/thaw/work", "what runs, starts and waits everywhere", _query(known=_TEXT, **_WAIT), None),
    ("get", "/api/v1/thaw/keys", "list keys", _query(namespace=_TEXT), None),
    ("post", "/api/v1/thaw/keys", "make a key", [], _KEY),
    ("delete", "/api/v1/thaw/keys/{key_id}", "revoke a key", [_path("key_id")], None),
    ("get", "/api/v1/thaw/models", "who uses which model", [], None),
    ("get", "/api/v1/thaw/namespaces", "what each namespace uses", [], None),
    ("get", _MODELS_OF, "what a namespace may run", [_NS], None),
    ("put", _MODELS_OF, "allow prefixes of models", [_NS], _PREFIXES),
    ("delete", _MODELS_OF, "take prefixes back", [_NS], _PREFIXES),
    ("get", _QUOTAS_OF, "what a namespace may have", [_NS], None),
    ("put", _QUOTAS_OF, "set a namespace's quotas", [_NS], _QUOTAS),
    ("get", "/v1/models", "list models", [], None),
    ("get", "/v1/models/{name}", "a model", [_path("name")], None),
    ("post", "/v1/chat/completions", "OpenAI's chat", [], v1.CHAT),
    ("post", "/v1/completions", "OpenAI's completions", [], v1.COMPLETION),
    ("post", "/v1/responses", "OpenAI's responses, of which none is kept", [], v1.RESPONSE),
    ("post", "/v1/embeddings", "OpenAI's embeddings", [], v1.EMBEDDING),
    ("post", "/tokenize", "vLLM's: the tokens of a text or a chat", [], v1.TOKENIZE),
    ("post", "/detokenize", "vLLM's: the text of tokens", [], v1.DETOKENIZE),
)


def document() -> dict[str, Any]:
    paths: dict[str, dict[str, Json]] = {
        path: {"get": {"summary": what, "security": [], "responses": _responses()}} for path, what in _OPEN.items()
    }
    for path in _HERE:
        paths[path] = {"get": {"summary": "this document", "security": [], "responses": _responses()}}
    for method, path, what, parameters, body in _ROUTES:
        content = {} if body is None else {"requestBody": {"content": {"application/json": {"schema": body}}}}
        operation = {"summary": what, "parameters": parameters, **content, "responses": _responses(path)}
        if path == _WEB_PATH[0]:
            operation["security"] = []
        paths.setdefault(path, {})[method] = operation
    return {
        "openapi": "3.0.3",
        "info": {"title": "Thaw", "version": __version__},
        "security": [{"basic": []}, {"bearer": []}],
        "paths": paths,
        "components": {
            "securitySchemes": {
                "basic": {"type": "http", "scheme": "basic"},
                "bearer": {"type": "http", "scheme": "bearer"},
            }
        },
    }


def _responses(path: str = "") -> Json:
    if path.startswith(OPENAI_PATHS):
        of_openai = {"application/json": {"schema": v1.ERROR}}
        return {"200": {"description": "the answer"}, "default": {"description": "an error", "content": of_openai}}
    return {"200": {"description": "the answer"}, "default": {"description": "an error: {error, code, hint}"}}


@blueprint.get("/openapi.json")
@blueprint.get("/api/v1/api-docs")
def api_docs() -> Response:
    return json_response(document())
