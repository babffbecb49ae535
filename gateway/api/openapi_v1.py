"""The bodies of /v1, /tokenize and /detokenize as the OpenAPI document has them.

A null counts as absent everywhere, and no parameter is ignored, so every body is closed.  Conditions between parameters
(``stream_options`` needs ``stream``) are only in the answer of a 400.  One test compares the names with those that the
checks know.  Another one sends bodies that are described, and bodies that are not.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from gateway.api.embeddings_body import ENCODINGS, MOST_INPUTS
from gateway.api.openai_body import NO_EFFECT, ONLY
from gateway.api.openai_tools import MOST_TOOLS, NOT_BESIDE
from gateway.api.responses_body import ONLY as RESPONSES_ONLY
from gateway.serving.answers.several import MOST_CHOICES, MOST_PARTS

Json = Mapping[str, Any]
_BIG: Final = 2**31 - 1
_TEXT: Final = {"type": "string"}
_SOME: Final = {"type": "string", "minLength": 1}
_FLAG: Final = {"type": "boolean"}
_OBJECT: Final = {"type": "object"}
_NAME: Final = {"type": "string", "pattern": "^[a-zA-Z0-9_-]{1,64}$"}
_FUNCTION_NAME: Final = {"type": "string", "pattern": "^[a-zA-Z0-9_.-]{1,64}$"}


def _whole(low: int, high: int = _BIG) -> Json:
    return {"type": "integer", "minimum": low, "maximum": high}


def _number(low: float, high: float, **more: bool) -> Json:
    return {"type": "number", "minimum": low, "maximum": high, **more}


def _list(items: Json, **bounds: int) -> Json:
    return {"type": "array", "items": items, **bounds}


def _closed(required: tuple[str, ...] = (), **properties: Json) -> Json:
    """An object that has no other keys, unless they are null.  Those that are not required may be null, too."""
    return {**_shut(required, **properties), "additionalProperties": {"enum": [None], "nullable": True}}


def _shut(required: tuple[str, ...] = (), **properties: Json) -> Json:
    """An object that has no other keys."""
    named = {name: s if name in required or not s else _or_null(s) for name, s in properties.items()}
    needed = {"required": list(required)} if required else {}
    return {"type": "object", **needed, "properties": named, "additionalProperties": False}


def _or_null(schema: Json) -> Json:
    return {**schema, "nullable": True}


def _one_of(*schemas: Json) -> Json:
    return {"anyOf": list(schemas)}


_CONTENT: Final = _one_of(
    _TEXT,
    _list(
        {
            "type": "object",
            "required": ["type", "text"],
            "properties": {"type": {"type": "string", "enum": ["text"]}, "text": _TEXT},
        }
    ),
)
_CALL: Final = {
    "type": "object",
    "required": ["function"],
    "properties": {
        "id": _TEXT,
        "type": {"type": "string", "enum": ["function"]},
        "function": {
            "type": "object",
            "required": ["name", "arguments"],
            "properties": {"name": _TEXT, "arguments": _TEXT},
        },
    },
}
_ANY: Final[Json] = {}
_SIDE: Final = {"name": _ANY, "refusal": _ANY, "reasoning": _ANY, "reasoning_content": _ANY}


def _role(*names: str) -> Json:
    return {"type": "string", "enum": list(names)}


_MESSAGE: Final = _one_of(
    _closed(("role", "content"), role=_role("system", "developer", "user"), content=_CONTENT, **_SIDE),
    _closed(("role", "content", "tool_call_id"), role=_role("tool"), content=_CONTENT, tool_call_id=_TEXT, **_SIDE),
    _closed(("role", "content"), role=_role("assistant"), content=_CONTENT, tool_calls=_list(_CALL), **_SIDE),
    _closed(
        ("role", "tool_calls"), role=_role("assistant"), content=_CONTENT, tool_calls=_list(_CALL, minItems=1), **_SIDE
    ),
)
_PARAMETERS: Final = {
    "type": "object",
    "properties": {"type": {"type": "string", "enum": ["object"]}},
    "not": {"anyOf": [{"required": [name]} for name in NOT_BESIDE]},
    "description": "a JSON Schema of an object",
}
_FUNCTION: Final = {
    "type": "object",
    "required": ["name"],
    "properties": {
        "name": _FUNCTION_NAME,
        "description": _or_null(_TEXT),
        "parameters": _or_null(_PARAMETERS),
        "strict": _ANY,
    },
}
_TOOL: Final = {
    "type": "object",
    "required": ["type", "function"],
    "properties": {"type": {"type": "string", "enum": ["function"]}, "function": _FUNCTION},
}
_CHOICE: Final = {
    "type": "object",
    "required": ["type", "function"],
    "properties": {
        "type": {"type": "string", "enum": ["function"]},
        "function": {"type": "object", "required": ["name"], "properties": {"name": _FUNCTION_NAME}},
    },
}
_AUTO: Final = {"type": "string", "enum": ["none", "auto", "required"]}
_PLAIN_FORMAT: Final = _closed(("type",), type={"type": "string", "enum": ["text", "json_object"]})
_NAMED: Final = {"name": _NAME, "schema": _OBJECT, "strict": _ANY, "description": _ANY}
_FORMAT: Final = _one_of(
    _PLAIN_FORMAT,
    _closed(
        ("type", "json_schema"),
        type={"type": "string", "enum": ["json_schema"]},
        json_schema=_shut(("name",), **_NAMED),
    ),
)
_STRINGS: Final = _list(_SOME, minItems=1)
_RULES: Final = _one_of(_OBJECT, _TEXT)
_GRAMMARS: Final = {
    "response_format": _FORMAT,
    "structured_outputs": _closed(
        json=_RULES, regex=_TEXT, choice=_STRINGS, grammar=_TEXT, json_object=_FLAG, structural_tag=_RULES
    ),
    "guided_json": _RULES,
    "guided_regex": _TEXT,
    "guided_choice": _STRINGS,
    "guided_grammar": _TEXT,
}
_WITHOUT_EFFECT: Final = {
    name: {
        **(_FLAG if name == "store" else _OBJECT if name in ("metadata", "prediction") else _TEXT),
        "description": "changes no answer",
    }
    for name in NO_EFFECT
}
_SAMPLING: Final = {
    "temperature": _number(0, 2),
    "top_p": _number(0, 1, exclusiveMinimum=True),
    "top_k": _whole(-1),
    "min_p": _number(0, 1),
    "min_tokens": _whole(0),
    "presence_penalty": _number(-2, 2),
    "frequency_penalty": _number(-2, 2),
    "repetition_penalty": _number(0, 100, exclusiveMinimum=True),
    "seed": _whole(-(2**63), 2**63 - 1),
    "stop": _one_of(_SOME, _list(_SOME, maxItems=4)),
    "stop_token_ids": _list({"type": "integer"}),
    "ignore_eos": _FLAG,
    "logit_bias": _OBJECT,
    "stream": _FLAG,
}
_COMMON: Final = {
    **_SAMPLING,
    "max_tokens": _whole(0),
    "n": _whole(1, MOST_CHOICES),
    "return_token_ids": _FLAG,
    "prompt_logprobs": _whole(0, 20),
    "stream_options": _shut(include_usage=_FLAG, include_obfuscation=_FLAG),
    **_WITHOUT_EFFECT,
    **{name: {"enum": list(allowed)} for name, allowed in ONLY.items()},
    **_GRAMMARS,
}
CHAT: Final = _closed(
    ("model", "messages"),
    model=_TEXT,
    messages=_list(_MESSAGE, minItems=1),
    max_completion_tokens=_whole(1),
    logprobs=_FLAG,
    top_logprobs=_whole(0, 20),
    chat_template_kwargs=_OBJECT,
    add_generation_prompt=_FLAG,
    continue_final_message=_FLAG,
    parallel_tool_calls=_FLAG,
    tools=_list(_TOOL, maxItems=MOST_TOOLS),
    tool_choice=_one_of(_AUTO, _CHOICE),
    **_COMMON,
)
_IDS: Final = _list({"type": "integer"}, minItems=1)
COMPLETION: Final = _closed(
    ("model", "prompt"),
    model=_TEXT,
    prompt=_one_of(_TEXT, _IDS, _list(_one_of(_TEXT, _IDS), minItems=1, maxItems=MOST_PARTS)),
    logprobs=_whole(0, 20),
    echo=_FLAG,
    suffix=_TEXT,
    best_of=_whole(1, MOST_CHOICES),
    **_COMMON,
)


def _kind(name: str) -> Json:
    return {"type": "string", "enum": [name]}


def _part(kind: str, key: str) -> Json:
    return {"type": "object", "required": ["type", key], "properties": {"type": _kind(kind), key: _TEXT}}


_PARTS: Final = _one_of(_part("input_text", "text"), _part("output_text", "text"), _part("refusal", "refusal"))
_TEXTS: Final = _one_of(_TEXT, _list(_PARTS))
_ITEM_OF: Final = {"id": _ANY, "status": _ANY}


_ITEM: Final = _one_of(
    _closed(
        ("role", "content"),
        type=_kind("message"),
        role=_role("system", "developer", "user", "assistant"),
        content=_TEXTS,
        **_ITEM_OF,
    ),
    _closed(
        ("type", "call_id", "name", "arguments"),
        type=_kind("function_call"),
        call_id=_TEXT,
        name=_TEXT,
        arguments=_TEXT,
        **_ITEM_OF,
    ),
    _closed(
        ("type", "call_id", "output"), type=_kind("function_call_output"), call_id=_TEXT, output=_TEXTS, **_ITEM_OF
    ),
)
RESPONSE: Final = _closed(
    ("model", "input"),
    model=_TEXT,
    input=_one_of(_TEXT, _list(_ITEM, minItems=1)),
    instructions=_TEXT,
    max_output_tokens=_whole(1),
    max_tool_calls=_whole(1),
    text=_closed(
        format=_one_of(_PLAIN_FORMAT, _shut(("type", "name"), type=_kind("json_schema"), **_NAMED)),
        verbosity={"type": "string", "enum": ["medium"]},
    ),
    tools=_list(
        _closed(
            ("type", "name"),
            type=_kind("function"),
            name=_FUNCTION_NAME,
            description=_TEXT,
            parameters=_PARAMETERS,
            strict=_ANY,
        ),
        maxItems=MOST_TOOLS,
    ),
    tool_choice=_one_of(
        _AUTO,
        {
            "type": "object",
            "required": ["type", "name"],
            "properties": {"type": _kind("function"), "name": _FUNCTION_NAME},
        },
    ),
    include=_list({"type": "string", "enum": ["message.output_text.logprobs", "reasoning.encrypted_content"]}),
    top_logprobs=_whole(0, 20),
    stream_options=_closed(include_obfuscation=_FLAG),
    reasoning=_closed(effort=_kind("none")),
    parallel_tool_calls=_FLAG,
    chat_template_kwargs=_OBJECT,
    **_SAMPLING,
    **{name: schema for name, schema in _WITHOUT_EFFECT.items() if name not in ("store", "prediction")},
    **{name: {"enum": [*allowed, None]} for name, (allowed, _) in RESPONSES_ONLY.items()},
)
EMBEDDING: Final = _closed(
    ("model", "input"),
    model=_TEXT,
    input=_one_of(_SOME, _IDS, _list(_one_of(_SOME, _IDS), minItems=1, maxItems=MOST_INPUTS)),
    encoding_format={"type": "string", "enum": list(ENCODINGS)},
    dimensions=_whole(1),
    user=_TEXT,
)
TOKENIZE: Final = _closed(
    ("model",),
    model=_TEXT,
    prompt=_TEXT,
    messages=_list(_MESSAGE, minItems=1),
    tools=_list(_TOOL, maxItems=MOST_TOOLS),
    add_special_tokens=_FLAG,
    add_generation_prompt=_FLAG,
    return_token_strs=_FLAG,
    chat_template_kwargs=_OBJECT,
)
DETOKENIZE: Final = _closed(("model", "tokens"), model=_TEXT, tokens=_list({"type": "integer"}))
ERROR: Final = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": _TEXT,
                "type": _TEXT,
                **{name: {"type": "string", "nullable": True} for name in ("param", "code", "hint")},
            },
        }
    },
}
"""OpenAI's error object."""
