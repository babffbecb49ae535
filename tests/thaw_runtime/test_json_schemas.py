"""An answer fits its schema, or the schema is refused: no keyword of any draft is passed over in silence."""

from __future__ import annotations

import json
import random
from collections import Counter
from datetime import datetime, time
from typing import Any

import pytest
from jsonschema import Draft202012Validator, FormatChecker, SchemaError

from tests.thaw_runtime.drawn_schemas import WORDS, Schemas
from tests.thaw_runtime.sampled_answers import Sampler
from thaw_runtime.engine.json_patterns import Unwritable, in_json
from thaw_runtime.engine.json_schemas import Unenforced, narrowed

INTEGER = {"type": "integer"}
ONLY_A = {"type": "object", "properties": {"a": INTEGER}, "additionalProperties": False}
SAMPLER = Sampler([*WORDS, '"b": ', '"kind": "x"', '"kind": "y"'])


FORMATS = FormatChecker(["date", "email", "ipv4", "ipv6", "uuid"])


@FORMATS.checks("date-time", raises=ValueError)
def is_moment(value: object) -> bool:
    return not isinstance(value, str) or datetime.fromisoformat(value).tzinfo is not None


@FORMATS.checks("time", raises=ValueError)
def is_time(value: object) -> bool:
    return not isinstance(value, str) or time.fromisoformat(value).tzinfo is not None


def misfits(schema: Any, n: int, draw: random.Random) -> list[str]:
    """Those of ``n`` sampled answers that do not fit."""
    fits = Draft202012Validator(schema, format_checker=FORMATS).is_valid
    grammar = SAMPLER.grammar(narrowed(schema))
    answers = [a for _ in range(n) if (a := SAMPLER.answer(grammar, draw)) is not None]
    return [answer for answer in answers if not fits(json.loads(answer))]


@pytest.mark.parametrize(
    ("seed", "n"), [(20261130, 250), *(pytest.param(seed, 2000, marks=pytest.mark.full) for seed in range(1, 9))]
)
def test_no_answer_of_an_accepted_schema_fails_to_fit_it(seed: int, n: int) -> None:
    schemas, draw, met = Schemas(seed), random.Random(seed), Counter[str]()
    for _ in range(n):
        schema = schemas.one()
        try:
            Draft202012Validator.check_schema(schema)
            wrong = misfits(schema, 8, draw)
        except SchemaError:
            continue
        except Unenforced:
            met["refused"] += 1
            continue
        assert not wrong, schema
        met["accepted"] += 1
    assert min(met["accepted"], met["refused"]) > n / 5, met  # otherwise little was tried


@pytest.mark.parametrize(
    ("schema", "says"),
    [
        ({**ONLY_A, "anyOf": [{"required": ["a"]}]}, "additionalProperties, properties, type beside anyOf cannot be"),
        ({**ONLY_A, "not": {"required": ["a"]}}, "not beside the type object cannot be enforced (at #)"),
        ({"not": INTEGER}, "not together, without a type, cannot"),
        ({**ONLY_A, "required": ["b"]}, "no answer has the property 'b', which is required"),
        ({"type": "array", "items": {"type": "integer", "multipleOf": 3}}, "(at #/items)"),
        ({"$ref": "https://example.com/x"}, "leads to no schema here"),
        ({"$ref": "#/$defs/x", "minLength": 1, "$defs": {"x": INTEGER}}, "minLength beside $ref"),
        ({"$ref": "#/$defs/none"}, "leads to no schema here"),
        ({"$ref": "#node", "$defs": {"x": {"$anchor": "node"}}}, "leads to no schema here"),
        ({"allOf": [INTEGER, {"minimum": 3}]}, "allOf of several schemas"),
        ({"oneOf": [INTEGER, {"type": "number"}]}, "may fit the same answer"),
        ({"if": INTEGER, "then": {"minimum": 3}}, "if, then together"),
        ({"minLength": 1, "minimum": 1}, "minLength, minimum together, without a type"),
        ({"type": "string", "pattern": "a", "maxLength": 3}, "only one can be enforced"),
        ({"type": "string", "format": "json-pointer"}, "the format 'json-pointer' cannot be enforced"),
        ({"type": "string", "pattern": r"^(?!a)"}, "assert not"),
        ({"type": "object", "properties": {"a": {}}, "patternProperties": {"a": INTEGER}}, "alone, with one pattern"),
        ({"type": "object", "minProperties": 1}, "minProperties above"),
        ({"type": "number", "maximum": 1e-7}, "only with 6 decimals"),
        ({"type": "integer", "minimum": 3, "exclusiveMaximum": 3}, "no number is within its bounds"),
        ({"type": "array", "items": False, "minItems": 1}, "no answer has so many items"),
        ({"type": "nothing"}, "type must be one or more of"),
        ({"type": "string", "enum": [1, 2]}, "no value of it has its type"),
        ({"properties": {"a": False}}, "no answer fits false (at #/properties/a)"),
    ],
)
def test_what_no_answer_can_be_held_to_is_refused_by_its_name_and_place(schema: Any, says: str) -> None:
    with pytest.raises(Unenforced) as told:
        narrowed(schema)
    assert says in str(told.value)


NODE = {"type": "object", "properties": {"next": {"anyOf": [{"$ref": "#/$defs/Node"}, {"type": "null"}]}}}


@pytest.mark.parametrize(
    "schema",
    [
        {**ONLY_A, "title": "T", "description": "d", "nullable": True, "x-more": {"minimum": 1}, "default": {}},
        {"type": "object", "required": ["a", "bb"]},
        {"type": "object", "properties": {"a": INTEGER}, "required": ["bb"], "additionalProperties": {"const": "x"}},
        {"properties": {"a": INTEGER}, "required": ["a"], "additionalProperties": True},
        {"type": "object", "properties": {"é": INTEGER}, "additionalProperties": {"type": "boolean"}},
        {"$ref": "#/$defs/Node", "$defs": {"Node": NODE}},
        {"allOf": [{"$ref": "#/$defs/Node"}], "description": "d", "$defs": {"Node": {**NODE, "required": ["next"]}}},
        {"anyOf": [{"type": "string", "maxLength": 3}, {"type": "null"}], "default": None},
        {
            "oneOf": [
                {"properties": {"kind": {"const": k}, "b": {}}, "required": ["kind"], "type": "object"} for k in "xy"
            ]
        },
        {"oneOf": [{"type": "string", "minLength": 2}, INTEGER]},
        {"type": ["string", "null"], "enum": ["x", None, 3]},
        {"type": ["integer", "string"], "minimum": 3, "maxLength": 2},
        {"type": "array", "prefixItems": [INTEGER, {"type": "string"}], "minItems": 2, "maxItems": 2},
        {"type": "array", "prefixItems": [INTEGER], "items": {"type": "boolean"}, "minItems": 2},
        {"type": "object", "additionalProperties": INTEGER, "maxProperties": 2},
        {"type": "object", "propertyNames": {"pattern": "^[a-z]{1,3}$"}, "additionalProperties": INTEGER},
        {"type": "object", "patternProperties": {"^x_": INTEGER}, "additionalProperties": False},
        {"type": "string", "minLength": 3},
        {"type": "string", "maxLength": 1},
        {"type": "string", "maxLength": 5000},
        {"type": "string", "format": "date"},
        {"type": "string", "format": "time"},
        {"type": "string", "format": "date-time"},
        {"type": "string", "format": "ipv4"},
        {"type": "string", "format": "ipv6"},
        {"type": "string", "format": "uuid"},
        {"type": "integer", "minimum": 2.5, "exclusiveMaximum": 12},
        {"type": "number", "minimum": -2.5, "exclusiveMinimum": -3, "maximum": 3.25},
        {"$id": "https://example.com/root", "$schema": "https://json-schema.org/draft/2020-12/schema", "minimum": 0},
        {"const": 'a"\\\n😀 Regex("x", json_string=true) [^"\\\r\n]'},
        {"type": "string", "pattern": '^["\\\\\n]{3}$'},
        True,
        {},
    ],
    ids=lambda schema: json.dumps(schema)[:60],
)
def test_what_people_write_is_accepted_and_its_answers_fit(schema: Any) -> None:
    assert misfits(schema, 40, random.Random(1)) == []


@pytest.mark.parametrize(
    ("pattern", "value"),
    [
        *(("^a", "abc"), ("b", "abc"), ("c$", "abc"), ("^a$|^b$", "b"), ("^(x|y$)", "xz"), ("a|^b", "ya")),
        *(("^[^x]$", '"'), ("^[^x]$", "\\"), ("^.$", "\t"), (r"^\\$", "\\"), (r"^\s$", "\n"), (r"^[\s\S]$", "\r")),
        *(
            (r"^\/\.\-[\]\-^]$", "/.--"),
            ("^(?<year>[0-9]{4})$", "2026"),
            (r"^\u00e9$", "é"),
            ("^😀+$", "😀😀"),
            ("", ""),
        ),
    ],
)
def test_a_pattern_is_written_for_the_text_between_the_quotes(pattern: str, value: str) -> None:
    assert SAMPLER.accepts({"type": "string", "pattern": in_json(pattern)}, json.dumps(value, ensure_ascii=False))


@pytest.mark.parametrize(
    ("pattern", "value"),
    [
        *(
            ("^a", "ba"),
            ("a$", "ab"),
            ("^a$|^b$", "ab"),
            ("^(x|y$)", "yz"),
            ("^.$", "\n"),
            (r"^\d$", "٣"),
            (r"^\w$", "é"),
        ),
        *(("^[^x]$", "x"), (r"^\S$", "\u2003"), ("b", "aca"), (r"^\D$", "4"), ("^.$", "")),
    ],
)
def test_a_pattern_lets_nothing_else_through(pattern: str, value: str) -> None:
    assert not SAMPLER.accepts({"type": "string", "pattern": in_json(pattern)}, json.dumps(value, ensure_ascii=False))


@pytest.mark.parametrize(
    "pattern", [r"^(a)\1$", r"\bx", "(?=a)", "(?<!a)b", "a^b", "(?i)a", r"\p{L}", "x{,3}", "(", "\x01"]
)
def test_a_pattern_that_cannot_be_written_anew_is_refused(pattern: str) -> None:
    with pytest.raises(Unwritable):
        in_json(pattern)
