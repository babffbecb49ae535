"""The grammar that a request's answer must follow: ``response_format``, or vLLM's parameters for the same."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

from thaw.errors import BadParameter
from thaw_runtime.engine.protocol import Grammar, GrammarKind

MAX_GRAMMAR_BYTES: Final = 256 * 1024
"""A compiler needs time and memory for each rule, and the container has other requests."""
MAX_DEPTH: Final = 64
ANY_OBJECT: Final = '{"type": "object"}'
_KINDS: Final = {kind.value: kind for kind in GrammarKind}


def grammar_of(body: Mapping[str, Any]) -> Grammar | None:
    """Return the grammar of a request. Raises BadParameter for several grammars, and for one that is too long."""
    found = list(_grammars(body))
    if len(found) > 1:
        raise BadParameter(found[1].param, f"an answer follows one grammar, and {found[0].param} names one, too")
    for grammar in found:
        check_bounds(grammar)
        for name in ("ignore_eos", "min_tokens"):
            if body.get(name):
                raise BadParameter(name, f"an answer that follows {grammar.param} ends where that ends")
    return found[0] if found else None


def check_bounds(grammar: Grammar) -> None:
    """Raises BadParameter."""
    if (n_bytes := len(grammar.text.encode())) > MAX_GRAMMAR_BYTES:
        raise BadParameter(grammar.param, f"a grammar of {n_bytes} bytes; at most {MAX_GRAMMAR_BYTES}")
    if grammar.kind in (GrammarKind.JSON, GrammarKind.STRUCTURAL_TAG) and _is_deep(grammar):
        raise BadParameter(grammar.param, f"more than {MAX_DEPTH} objects or lists inside one another")


def _is_deep(grammar: Grammar) -> bool:
    """Raises BadParameter for text that is not JSON."""
    try:
        level = [json.loads(grammar.text)]
    except RecursionError:
        return True
    except ValueError as e:
        raise BadParameter(grammar.param, f"this is not JSON: {e}") from e
    for _ in range(MAX_DEPTH):
        level = [part for whole in level for part in _parts(whole)]
    return any(isinstance(whole, (dict, list)) for whole in level)


def _parts(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()


def _grammars(body: Mapping[str, Any]) -> Iterator[Grammar]:
    wanted = body.get("response_format") or {}
    if wanted.get("type") == "json_object":
        yield Grammar(GrammarKind.JSON, ANY_OBJECT, "response_format")
    elif wanted.get("type") == "json_schema":
        schema = wanted["json_schema"].get("schema")
        yield Grammar(GrammarKind.JSON, ANY_OBJECT if schema is None else _text(schema), "response_format")
    for name, value in (body.get("structured_outputs") or {}).items():
        yield from _named(name, value, "structured_outputs")
    for kind in ("json", "regex", "choice", "grammar"):
        yield from _named(kind, body.get(f"guided_{kind}"), f"guided_{kind}")


def _named(name: str, value: Any, param: str) -> Iterator[Grammar]:
    if name == "json_object" and value:
        yield Grammar(GrammarKind.JSON, ANY_OBJECT, param)
    elif name in _KINDS and value is not None:
        yield Grammar(_KINDS[name], _text(value), param)


def _text(rules: Any) -> str:
    return rules if isinstance(rules, str) else json.dumps(rules)
