"""Narrows a JSON Schema to one that xgrammar enforces whole, or refuses it.

xgrammar compiles a schema by the first of its keywords that it knows, and passes silently over what stands beside it
and over what it does not know.  So nothing is passed on: the narrowed schema is built here from the few forms that
xgrammar enforces, and each answer that fits it fits the original one.  A keyword that no JSON Schema defines says
nothing about an answer, and is left out.  tests/thaw_runtime/test_json_schemas.py generates schemas over all keywords,
and finds no answer that does not fit.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, Final

from thaw_runtime.engine.json_patterns import FORMATS, Unwritable, in_json

_OBJECT: Final = frozenset(
    (
        *("properties", "required", "additionalProperties", "patternProperties", "propertyNames"),
        *("minProperties", "maxProperties", "unevaluatedProperties"),
    )
)
_ARRAY: Final = frozenset(("items", "prefixItems", "minItems", "maxItems", "unevaluatedItems"))
_STRING: Final = frozenset(("minLength", "maxLength", "pattern", "format"))
_NUMBER: Final = frozenset(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"))
_TYPES: Final[Mapping[str, frozenset[str]]] = {
    **{"object": _OBJECT, "array": _ARRAY, "string": _STRING, "number": _NUMBER, "integer": _NUMBER},
    **{"boolean": frozenset[str](), "null": frozenset[str]()},
}
_FORMS: Final = ("$ref", "const", "enum", "anyOf", "oneOf", "allOf")
"""A schema with one of these has no other keyword that says something, but for the type of a const or an enum."""
_REFUSED: Final = frozenset(
    (
        *("not", "if", "then", "else", "dependentSchemas", "dependentRequired", "dependencies", "contains"),
        *("minContains", "maxContains", "uniqueItems", "multipleOf", "additionalItems", "divisibleBy", "disallow"),
        *("extends", "$dynamicRef", "$recursiveRef", "$dynamicAnchor", "$recursiveAnchor", "$anchor", "$id", "id"),
    )
)
_KEYWORDS: Final = frozenset(("type", *_FORMS)) | _OBJECT | _ARRAY | _STRING | _NUMBER | _REFUSED
"""All keywords of drafts 3 to 2020-12 that say something about an answer, or about where a reference leads."""
_AT_THE_ROOT: Final = frozenset(("$id", "id"))
"""They name the document, and no reference may be relative to them."""
_FORMATS: Final = frozenset(("duration", "email", "hostname", "ipv6", "uuid", "uri", "uri-reference", "uri-template"))
"""The formats that xgrammar writes as they are meant.  json_patterns.FORMATS has the others."""
_MOST_NUMBER: Final = 2**53
_DECIMALS: Final = 6
"""xgrammar writes a bound with so many decimals."""


class Unenforced(Exception):
    """An answer cannot be held to the schema at the JSON pointer ``where``."""

    def __init__(self, where: str, problem: str) -> None:
        super().__init__(f"{problem} (at {where})")


def narrowed(schema: Any) -> Any:
    """``schema`` is parsed JSON.  Raises Unenforced."""
    return _Narrowing(schema).whole()


class _Narrowing:
    """``_names`` has the definitions of the narrowed schema by the pointers that the original one refers to."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._names: dict[str, str] = {}

    def whole(self) -> Any:
        made, defs = self._one("#", self._root), dict[str, Any]()
        while missing := [where for where, name in self._names.items() if name not in defs]:
            for where in missing:
                defs[self._names[where]] = self._one(where, self._at(where))
        return {**made, "$defs": defs} if defs else made

    def _one(self, where: str, schema: Any) -> dict[str, Any]:
        if schema is True:
            return {}
        if not isinstance(schema, dict):
            raise Unenforced(where, "no answer fits false" if schema is False else "this is not a schema")
        words = schema.keys() & _KEYWORDS - (_AT_THE_ROOT if where == "#" else frozenset())
        form = next((name for name in _FORMS if name in words), "")
        if form:
            beside = words - {form} - ({"type"} if form in ("const", "enum") else set())
            _refuse(where, beside, f"beside {form}")
            made: dict[str, Any] = getattr(self, f"_{form.strip('$').lower()}")(where, schema)
            return made
        types = _types(where, schema, words)
        about = frozenset[str]().union(*(_TYPES[one] for one in types))
        _refuse(where, words - {"type"} - about, f"beside the type {' or '.join(types)}")
        choices = [self._typed(where, one, schema) for one in types]
        return choices[0] if len(choices) == 1 else {"anyOf": choices} if choices else {}

    def _typed(self, where: str, name: str, schema: Mapping[str, Any]) -> dict[str, Any]:
        if name in ("number", "integer"):
            return {"type": name, **_bounds(where, schema, whole=name == "integer")}
        of_type = {"object": self._object, "array": self._array, "string": self._string}.get(name)
        return {"type": name} if of_type is None else {"type": name, **of_type(where, schema)}

    # ── strings, arrays, objects ─────────────────────────────────────────────────────────────────────────────────

    def _string(self, where: str, schema: Mapping[str, Any]) -> dict[str, Any]:
        least, most = _counts(where, schema, "minLength", "maxLength")
        is_bounded = least > 0 or most is not None
        if is_bounded + ("pattern" in schema) + ("format" in schema) > 1:
            raise Unenforced(where, "of pattern, format and a length, only one can be enforced")
        if is_bounded:
            return {"minLength": least, **({} if most is None else {"maxLength": most})}
        if "pattern" in schema:
            return {"pattern": self._pattern(where, schema["pattern"])}
        name = schema.get("format")
        if name is None:
            return {}
        if isinstance(name, str) and name in FORMATS:
            return {"pattern": FORMATS[name]}
        if name not in _FORMATS:
            raise Unenforced(where, f"the format {name!r:.60} cannot be enforced")
        return {"format": name}

    def _pattern(self, where: str, pattern: Any) -> str:
        try:
            return in_json(str(pattern))
        except Unwritable as e:
            raise Unenforced(where, f"the pattern {pattern!r:.60} cannot be enforced: {e}") from None

    def _array(self, where: str, schema: Mapping[str, Any]) -> dict[str, Any]:
        least, most = _counts(where, schema, "minItems", "maxItems")
        prefix = self._each(where, "prefixItems", schema)[:most] if "prefixItems" in schema else []
        name = "items" if "items" in schema else "unevaluatedItems"
        rest = schema.get(name, True)
        if rest is False or most == len(prefix):
            if least > len(prefix):
                raise Unenforced(where, f"no answer has so many items as minItems wants: {least}")
            return {"prefixItems": prefix, "items": False, "minItems": least} if prefix else {"items": False}
        bounds = {} if most is None else {"maxItems": most}
        begin = {"prefixItems": prefix} if prefix else {}
        return {**begin, "items": self._one(f"{where}/{name}", rest), "minItems": least, **bounds}

    def _object(self, where: str, schema: Mapping[str, Any]) -> dict[str, Any]:
        least, most = _counts(where, schema, "minProperties", "maxProperties")
        properties, patterns = (self._named(where, name, schema) for name in ("properties", "patternProperties"))
        required = schema.get("required", [])
        if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
            raise Unenforced(where, "required must be a list of names")
        more_name = "additionalProperties" if "additionalProperties" in schema else "unevaluatedProperties"
        if patterns:
            if properties or required or "propertyNames" in schema or len(patterns) > 1 or least:
                raise Unenforced(where, "patternProperties can be enforced only alone, with one pattern")
            ((pattern, below),) = patterns.items()
            of_name = {self._pattern(f"{where}/patternProperties", pattern): below}
            return {"patternProperties": of_name, "additionalProperties": False, **_most(most)}
        if missing := [name for name in required if name not in properties]:
            if schema.get(more_name) is False:
                raise Unenforced(where, f"no answer has the property {missing[0]!r:.60}, which is required")
            below = self._one(f"{where}/{more_name}", schema.get(more_name, True))
            properties |= dict.fromkeys(missing, below)
        if "propertyNames" in schema:
            return self._with_names(where, schema, properties, more_name, most, least)
        if least > len(properties):
            raise Unenforced(where, "minProperties above the number of its properties cannot be enforced")
        wanted = list(dict.fromkeys(required))
        if most is not None and most < len(wanted):
            raise Unenforced(where, f"no answer has at most {most} properties and those that are required")
        if not properties:
            below = schema.get(more_name, True)
            others = below if below is False else self._one(f"{where}/{more_name}", below)
            return {"additionalProperties": others, **_most(most)}
        # only these: xgrammar knows another spelling of a property's name for another name
        bounds = {"minProperties": least} if least > len(wanted) else {}
        return {"properties": properties, "required": wanted, "additionalProperties": False, **bounds, **_most(most)}

    def _with_names(
        self,
        where: str,
        schema: Mapping[str, Any],
        properties: Mapping[str, Any],
        more_name: str,
        most: int | None,
        least: int,
    ) -> dict[str, Any]:
        """An object whose properties are all additional ones, with a pattern for their names."""
        names = schema["propertyNames"]
        if names is True:
            return self._object(where, {name: value for name, value in schema.items() if name != "propertyNames"})
        if properties or least:
            raise Unenforced(where, "propertyNames beside properties, required or minProperties cannot be enforced")
        narrow = self._one(f"{where}/propertyNames", {"type": "string", **names} if isinstance(names, dict) else names)
        pattern = narrow.get("pattern")
        if pattern is None:
            raise Unenforced(where, "propertyNames can be enforced only with a pattern")
        below = schema.get(more_name, True)
        if below is False:
            return {"additionalProperties": False}
        return {
            "patternProperties": {pattern: self._one(f"{where}/{more_name}", below)},
            "additionalProperties": False,
            **_most(most),
        }

    def _named(self, where: str, name: str, schema: Mapping[str, Any]) -> dict[str, Any]:
        schemas = schema.get(name, {})
        if not isinstance(schemas, dict):
            raise Unenforced(where, f"{name} must be an object")
        return {key: self._one(f"{where}/{name}/{_escaped(key)}", below) for key, below in schemas.items()}

    def _each(self, where: str, name: str, schema: Mapping[str, Any]) -> list[Any]:
        schemas = schema[name]
        if not isinstance(schemas, list) or not schemas:
            raise Unenforced(where, f"{name} must be a list of schemas")
        return [self._one(f"{where}/{name}/{n}", below) for n, below in enumerate(schemas)]

    # ── schemas of one keyword ───────────────────────────────────────────────────────────────────────────────────

    def _ref(self, where: str, schema: Mapping[str, Any]) -> dict[str, Any]:
        named = schema["$ref"]
        is_local = isinstance(named, str) and (named == "#" or named.startswith("#/"))
        if not is_local or "~" in named or "%" in named or self._at(named) is None:
            raise Unenforced(where, f"the reference {named!r:.100} leads to no schema here; write it as #/$defs/NAME")
        return {"$ref": f"#/$defs/{self._names.setdefault(named, f'd{len(self._names)}')}"}

    def _at(self, named: str) -> Any:
        at = self._root
        for part in named.split("/")[1:]:
            at = at.get(part) if isinstance(at, dict) else None
        return at

    def _const(self, where: str, schema: Mapping[str, Any]) -> dict[str, Any]:
        return self._enum(where, {**schema, "enum": [schema["const"]]})

    def _enum(self, where: str, schema: Mapping[str, Any]) -> dict[str, Any]:
        members = schema["enum"]
        if not isinstance(members, list) or not members:
            raise Unenforced(where, "enum must be a list of values")
        types = set(_types(where, schema, {"type"})) if "type" in schema else set(_TYPES)
        fitting = [member for member in members if _types_of(member) & types]
        if not fitting:
            raise Unenforced(where, "no value of it has its type")
        return {"enum": fitting}

    def _anyof(self, where: str, schema: Mapping[str, Any]) -> dict[str, Any]:
        return {"anyOf": self._each(where, "anyOf", schema)}

    def _oneof(self, where: str, schema: Mapping[str, Any]) -> dict[str, Any]:
        """xgrammar takes it as anyOf, so no two of its schemas may fit the same answer."""
        made = self._each(where, "oneOf", schema)
        shapes = [self._target(part) for part in schema["oneOf"]]
        for n, one in enumerate(shapes):
            if not all(_exclude_one_another(one, other) for other in shapes[:n]):
                raise Unenforced(where, "oneOf of schemas that may fit the same answer cannot be enforced; use anyOf")
        return {"anyOf": made}

    def _allof(self, where: str, schema: Mapping[str, Any]) -> dict[str, Any]:
        made = self._each(where, "allOf", schema)
        if len(made) > 1:
            raise Unenforced(where, "allOf of several schemas cannot be enforced")
        return dict(made[0])

    def _target(self, schema: Any) -> Any:
        """The schema that a reference leads to, over others."""
        for _ in range(_MOST_HOPS):
            if not isinstance(schema, dict) or "$ref" not in schema:
                break
            schema = self._at(schema["$ref"])
        return schema


_MOST_HOPS: Final = 16


def _refuse(where: str, names: Iterable[str], how: str) -> None:
    if found := sorted(names):
        raise Unenforced(where, f"{', '.join(found)} {how} cannot be enforced")


def _types(where: str, schema: Mapping[str, Any], words: Iterable[str]) -> list[str]:
    """The types of a schema.  Without ``type`` it is the one that all its keywords are about, which narrows it."""
    if "type" not in schema:
        said = set(words)
        about = [one for one in _TYPES if said and said <= _TYPES[one] and one != "integer"]
        if said and not about:
            _refuse(where, said, "together, without a type,")
        return about[:1]
    named = schema["type"]
    types = named if isinstance(named, list) else [named]
    if not types or not all(isinstance(one, str) and one in _TYPES for one in types):
        raise Unenforced(where, f"type must be one or more of {', '.join(_TYPES)}")
    return list(dict.fromkeys(types))


def _counts(where: str, schema: Mapping[str, Any], least: str, most: str) -> tuple[int, int | None]:
    found = [schema.get(name, missing) for name, missing in ((least, 0), (most, None))]
    if not all(n is None or (isinstance(n, int) and not isinstance(n, bool) and 0 <= n <= _MOST_COUNT) for n in found):
        raise Unenforced(where, f"{least} and {most} must be whole numbers from 0 to {_MOST_COUNT}")
    if found[1] is not None and found[0] > found[1]:
        raise Unenforced(where, f"no answer fits {least} above {most}")
    return found[0], found[1]


_MOST_COUNT: Final = 1_000_000


def _most(most: int | None) -> dict[str, int]:
    return {} if most is None else {"maxProperties": most}


def _bounds(where: str, schema: Mapping[str, Any], *, whole: bool) -> dict[str, Any]:
    """The tighter one of two bounds on a side, for integers without the excluded number."""
    found: dict[str, Any] = {}
    for name in _NUMBER & schema.keys():
        value = schema[name]
        if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= _MOST_NUMBER:
            raise Unenforced(where, f"{name} must be a number, and no larger than {_MOST_NUMBER}, to be enforced")
        if not whole and round(value, _DECIMALS) != value:
            raise Unenforced(where, f"{name} can be enforced only with {_DECIMALS} decimals")
    for sign, inclusive, exclusive in ((1, "minimum", "exclusiveMinimum"), (-1, "maximum", "exclusiveMaximum")):
        given = [(sign * schema[name], name == exclusive) for name in (inclusive, exclusive) if name in schema]
        if not given:
            continue
        value, is_exclusive = max(given)
        if whole:
            value, is_exclusive = math.floor(value) + 1 if is_exclusive else math.ceil(value), False
        found[exclusive if is_exclusive else inclusive] = sign * value
    low = found.get("minimum", found.get("exclusiveMinimum", -math.inf))
    high = found.get("maximum", found.get("exclusiveMaximum", math.inf))
    if low > high or (low == high and len(found.keys() & {"minimum", "maximum"}) < 2):
        raise Unenforced(where, "no number is within its bounds")
    return found


# ── which schemas exclude one another ────────────────────────────────────────────────────────────────────────────────


def _exclude_one_another(one: Any, other: Any) -> bool:
    """Whether no answer fits both, as far as types, constants and the constants of required properties show it."""
    if not isinstance(one, dict) or not isinstance(other, dict):
        return False
    ours, theirs = _values(one), _values(other)
    if ours is not None and theirs is not None:
        return not any(_is_same(a, b) for a in ours for b in theirs)
    common = _possible(one) & _possible(other)
    if not common:
        return True
    if common != {"object"} or ours is not None or theirs is not None:
        return False
    both = set(map(str, one.get("required", []))) & set(map(str, other.get("required", [])))
    parts = [(one.get("properties", {}).get(name), other.get("properties", {}).get(name)) for name in both]
    return any(_exclude_one_another(a, b) for a, b in parts)


def _values(schema: Mapping[str, Any]) -> list[Any] | None:
    """The only values that fit; None if there is no such list."""
    if "const" in schema:
        return [schema["const"]]
    return schema["enum"] if isinstance(schema.get("enum"), list) else None


def _possible(schema: Mapping[str, Any]) -> set[str]:
    """The types that may fit, with number for both kinds of numbers."""
    values = _values(schema)
    if values is not None:
        found = set[str]().union(*map(_types_of, values))
    else:
        named = schema.get("type", list(_TYPES))
        found = set(map(str, named if isinstance(named, list) else [named]))
    return {"number" if name == "integer" else name for name in found}


def _types_of(value: Any) -> set[str]:
    if value is None or isinstance(value, bool):
        return {"null" if value is None else "boolean"}
    if isinstance(value, int | float):
        return {"number", "integer"} if math.isfinite(value) and value == int(value) else {"number"}
    return {"string" if isinstance(value, str) else "array" if isinstance(value, list) else "object"}


def _is_same(one: Any, other: Any) -> bool:
    """As JSON Schema compares: 1 is 1.0, and true is not 1.  What is inside lists and objects is taken for equal if
    Python takes it for equal."""
    return bool(one == other) and isinstance(one, bool) is isinstance(other, bool)


def _escaped(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")
