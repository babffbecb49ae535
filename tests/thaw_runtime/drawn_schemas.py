"""JSON Schemas drawn over the keywords of all drafts: most from one type's keywords, some with any other beside them."""

from __future__ import annotations

import random
from typing import Any, Final

NAMES: Final = ["a", "bb", "cc", "x_1", "é"]
WORDS: Final = [
    *NAMES,
    *(f'"{name}"' for name in NAMES),
    '"a":',
    '"bb":',
    "null",
    "true",
    "false",
    "2.5",
    "{}",
    "[]",
    ", ",
]
_TYPES: Final = ["object", "array", "string", "number", "integer", "boolean", "null"]
_VALUES: Final = [1, 2.5, "bb", "", None, True, [1], {"a": 1}, -3, "cc"]
_BOUNDS: Final = [0, 1, -1, 5, 10, -10, 100, 0.5, -2.5, 3.25, 1e3, 12345, 0.001, 1e-7, 1e20, -0.0]
_PATTERNS: Final = [
    *(
        "^a+b?$",
        "b",
        "^[^x]{2}",
        "[a-c]+$",
        "^a|b$",
        "^(bb|cc)*$",
        r"\d{2}",
        r"^\w+\s?$",
        "^a.c$",
        r"^\p{L}+$",
        "é",
        "",
    ),
    *('^[^"]+$', r"\bab\b", r"^\S{1,3}$", "a{2,3}?", "(?=a)a", r"^\D$", r"^[\d-]+$", "^(?i)ab$", r"^[\s\S]{2}$", r"\\"),
]
_FORMATS: Final = [
    *("date", "time", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri", "uri-reference"),
    *("json-pointer", "regex"),
]
_ELSEWHERE: Final = ["multipleOf", "uniqueItems", "contains", "not", "if", "then", "dependentRequired", "$dynamicRef"]


class Schemas:
    def __init__(self, seed: int) -> None:
        self._draw = random.Random(seed)
        self._of = {
            "object": self._object,
            "array": self._array,
            "string": self._string,
            "number": self._number,
            "integer": self._number,
        }

    def one(self, depth: int = 2) -> Any:
        draw = self._draw
        kind = draw.choice(
            [*_TYPES, "const", "enum", "any"] if depth <= 0 else [*_TYPES * 2, "const", "enum", "any", *_NESTED]
        )
        made = self._made(kind, depth)
        if isinstance(made, dict) and depth > 0 and draw.random() < 0.15:
            made |= self._made(draw.choice([*_TYPES, *_NESTED, "const", "enum", "elsewhere"]), depth)
        return made

    def _made(self, kind: str, depth: int) -> Any:
        draw = self._draw
        if kind in _TYPES:
            return {"type": kind} | self._words(kind, depth)
        if kind == "untyped":
            return self._words(draw.choice(_TYPES), depth)
        if kind == "types":
            types = draw.sample(_TYPES, draw.randint(1, 3))
            made: dict[str, Any] = {"type": types}
            for one in types:
                made |= self._words(one, depth)
            return made
        if kind == "any":
            return draw.choice([{}, True])
        if kind == "const":
            return {"const": draw.choice(_VALUES)}
        if kind == "enum":
            return {"enum": draw.sample(_VALUES, draw.randint(1, 3))}
        if kind == "elsewhere":
            name = draw.choice(_ELSEWHERE)
            return {
                name: {"multipleOf": 2, "uniqueItems": True, "dependentRequired": {"a": ["bb"]}}.get(name, {"const": 1})
            }
        return {kind: [self.one(depth - 1) for _ in range(draw.randint(1, 3))]}

    def _words(self, kind: str, depth: int) -> dict[str, Any]:
        made = self._of[kind](depth - 1) if kind in self._of else {}
        return {name: value for name, value in made.items() if self._draw.random() < 0.35}

    def _object(self, depth: int) -> dict[str, Any]:
        draw = self._draw
        more = [True, False, self.one(depth)]
        return {
            "properties": {name: self.one(depth) for name in draw.sample(NAMES, draw.randint(0, 3))},
            "required": draw.sample(NAMES, draw.randint(0, 2)),
            "additionalProperties": draw.choice(more),
            "patternProperties": {draw.choice(_PATTERNS[:10]): self.one(depth)},
            "propertyNames": draw.choice([{"pattern": "^[a-c]+$"}, {"maxLength": 3}, {"enum": ["a", "bb"]}, True]),
            "minProperties": draw.randint(0, 3),
            "maxProperties": draw.randint(0, 4),
            "unevaluatedProperties": draw.choice(more),
        }

    def _array(self, depth: int) -> dict[str, Any]:
        draw = self._draw
        return {
            "items": draw.choice([True, False, self.one(depth), self.one(depth)]),
            "prefixItems": [self.one(depth) for _ in range(draw.randint(1, 3))],
            "minItems": draw.randint(0, 3),
            "maxItems": draw.randint(0, 4),
            "unevaluatedItems": draw.choice([True, False, self.one(depth)]),
        }

    def _string(self, _depth: int) -> dict[str, Any]:
        draw = self._draw
        lengths = {"minLength": draw.randint(0, 4), "maxLength": draw.randint(0, 6)}
        return lengths | {"pattern": draw.choice(_PATTERNS), "format": draw.choice(_FORMATS)}

    def _number(self, _depth: int) -> dict[str, Any]:
        names = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
        return {name: self._draw.choice(_BOUNDS) for name in names}


_NESTED: Final = ["anyOf", "oneOf", "allOf", "types", "untyped"]
