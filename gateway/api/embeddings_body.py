"""Checks the bodies of /v1/embeddings.  As in openai_body.py, no parameter is passed over in silence."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from gateway.api.bad_field import BadField

MOST_INPUTS: Final = 2048
"""As OpenAI has it."""
ENCODINGS: Final = ("float", "base64")
_BIG: Final = 2**31 - 1
_CHECKS: Final[Mapping[str, tuple[Callable[[Any], bool], str]]] = {
    "model": (lambda v: isinstance(v, str), "the name of a deployed action"),
    "encoding_format": (lambda v: v in ENCODINGS, "float or base64"),
    "dimensions": (lambda v: type(v) is int and 1 <= v <= _BIG, "a whole number of at least 1"),
    "user": (lambda v: isinstance(v, str), "a string"),
}
KNOWN: Final = (*_CHECKS, "input")
_WANTED: Final = "a string, a list of token ids, or a list of either"


def check_embeddings(body: Mapping[str, Any]) -> None:
    """Raises BadField, which names the parameter."""
    for name, value in body.items():
        if value is not None and name not in KNOWN:
            raise BadField(name, f"Unrecognized request argument supplied: {name}.")
    for name, (check, wanted) in _CHECKS.items():
        if body.get(name) is not None and not check(body[name]):
            raise BadField(name, f"{name} must be {wanted}, not {body[name]!r:.60}.")
    given = body.get("input")
    if not isinstance(given, list):
        _check_one("input", given)
    elif not given:
        raise BadField("input", "input must not be an empty list.")
    elif not _are_ids(given):
        if len(given) > MOST_INPUTS:
            raise BadField("input", f"input has {len(given)} texts; at most {MOST_INPUTS}.")
        for i, one in enumerate(given):
            _check_one(f"input[{i}]", one)


def _check_one(path: str, value: Any) -> None:
    if value == "" or value == []:
        raise BadField(path, f"{path} must not be empty.")
    if not isinstance(value, str) and not (isinstance(value, list) and path != "input" and _are_ids(value)):
        wanted = _WANTED if path == "input" else "a string or a list of token ids"
        raise BadField(path, f"{path} must be {wanted}, not {value!r:.60}.")


def _are_ids(value: list[Any]) -> bool:
    return all(type(t) is int for t in value)
