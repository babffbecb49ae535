"""Checks the parameters for the form of an answer: ``response_format``, and vLLM's parameters for the same."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

from gateway.api.bad_field import BadField

_CHOICES: Final = "a non-empty list of non-empty strings"
_WANTED: Final[Mapping[str, str]] = {
    "json": "a JSON Schema, as an object or as text",
    "regex": "a regular expression",
    "choice": _CHOICES,
    "grammar": "rules in EBNF or in Lark's language",
    "json_object": "true",
    "structural_tag": "an object, or its text",
}
_GUIDED: Final = {f"guided_{kind}": kind for kind in ("json", "regex", "choice", "grammar")}
GRAMMARS: Final = {"response_format", "structured_outputs"} | _GUIDED.keys()
_NAME: Final = re.compile(r"[a-zA-Z0-9_-]{1,64}")


def check_grammars(body: Mapping[str, Any]) -> None:
    """Raises BadField."""
    if body.get("response_format") is not None:
        _response_format(body["response_format"])
    if body.get("structured_outputs") is not None:
        _structured_outputs(body["structured_outputs"])
    for name, kind in _GUIDED.items():
        if body.get(name) is not None:
            _check(name, kind, body[name])


def _response_format(wanted: Any) -> None:
    kind = wanted.get("type") if isinstance(wanted, dict) else None
    if kind not in ("text", "json_object", "json_schema"):
        raise BadField("response_format", 'response_format must have the type "text", "json_object" or "json_schema".')
    for name in wanted.keys() - ({"type", "json_schema"} if kind == "json_schema" else {"type"}):
        if wanted[name] is not None:
            path = f"response_format.{name}"
            raise BadField(path, f"Unrecognized request argument supplied: {path}.")
    if kind != "json_schema":
        return
    named = wanted.get("json_schema")
    path = "response_format.json_schema"
    if not isinstance(named, dict):
        raise BadField(path, f"{path} must be an object of name and schema.")
    if not isinstance(named.get("name"), str) or not _NAME.fullmatch(named["name"]):
        raise BadField(f"{path}.name", f"{path}.name must be 1 to 64 letters, digits, _ or -.")
    if named.get("schema") is not None and not isinstance(named["schema"], dict):
        raise BadField(f"{path}.schema", f"{path}.schema must be an object.")
    if unknown := sorted(named.keys() - {"name", "schema", "strict", "description"}):
        raise BadField(f"{path}.{unknown[0]}", f"Unrecognized request argument supplied: {path}.{unknown[0]}.")


def _structured_outputs(wanted: Any) -> None:
    name = "structured_outputs"
    if not isinstance(wanted, dict):
        raise BadField(name, f"{name} must be an object with one of {', '.join(_WANTED)}.")
    for kind, value in wanted.items():
        path = f"{name}.{kind}"
        if value is None:
            continue
        if kind not in _WANTED:
            raise BadField(path, f"Unrecognized request argument supplied: {path}.")
        _check(path, kind, value)


def _check(path: str, kind: str, value: Any) -> None:
    if kind == "choice":
        fits = isinstance(value, list) and value and all(isinstance(v, str) and v for v in value)
    elif kind == "json_object":
        fits = isinstance(value, bool)
    else:
        fits = isinstance(value, str) or (kind in ("json", "structural_tag") and isinstance(value, dict))
    if not fits:
        raise BadField(path, f"{path} must be {_WANTED[kind]}, not {value!r:.60}.")
