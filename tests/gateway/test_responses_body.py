"""The bodies of /v1/responses that are accepted, and the chat requests that they are converted to."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.api.bad_field import BadField
from gateway.api.responses_body import chat_of, own_words
from thaw.errors import BadParameter, BadRequest

FORM = {"type": "json_schema", "name": "city", "schema": {"type": "object"}, "strict": True}
ADD = {"type": "function", "name": "add", "parameters": {"type": "object"}, "strict": True}


def chat(**body: Any) -> dict[str, Any]:
    return chat_of({"model": "m", "input": "hi", **body})


def refused(**body: Any) -> tuple[str, str]:
    with pytest.raises(BadField) as caught:
        chat(**body)
    return caught.value.param, caught.value.message


def test_a_response_is_a_chat_in_other_words() -> None:
    assert chat(instructions="Be brief.", max_output_tokens=9, temperature=0, text={"format": FORM}, user="u") == {
        "model": "m",
        "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}],
        "max_completion_tokens": 9,
        "temperature": 0,
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "city", "schema": {"type": "object"}, "strict": True},
        },
    }
    assert chat(tools=[ADD], tool_choice={"type": "function", "name": "add"}) == {
        "model": "m",
        "messages": [{"role": "user", "content": "hi"}],
        "tools": [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}],
        "tool_choice": {"type": "function", "function": {"name": "add"}},
    }
    assert chat(include=["message.output_text.logprobs"], top_logprobs=2)["top_logprobs"] == 2


def test_a_history_with_calls_and_their_results_is_one_of_a_chat() -> None:
    said = {"type": "output_text", "text": "I add.", "annotations": [], "logprobs": []}
    call = {"type": "function_call", "id": "fc_1", "call_id": "c1", "name": "add", "arguments": "{}", "status": None}
    history = [
        {"role": "user", "content": [{"type": "input_text", "text": "Add."}]},
        {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed", "content": [said]},
        call,
        {**call, "call_id": "c2"},
        {"type": "function_call_output", "call_id": "c1", "output": "3"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "4"}]},
    ]
    calls = [{"id": i, "type": "function", "function": {"name": "add", "arguments": "{}"}} for i in ("c1", "c2")]
    assert chat(input=history)["messages"] == [
        {"role": "user", "content": [{"type": "text", "text": "Add."}]},
        {"role": "assistant", "content": [{"type": "text", "text": "I add."}], "tool_calls": calls},
        {"role": "tool", "tool_call_id": "c1", "content": "3"},
        {"role": "tool", "tool_call_id": "c2", "content": [{"type": "text", "text": "4"}]},
    ]
    assert chat(input=[call])["messages"][0]["content"] is None


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("store", True),
        ("previous_response_id", "resp_1"),
        ("conversation", "conv_1"),
        ("prompt", {"id": "pmpt_1"}),
        ("background", True),
        ("truncation", "auto"),
        ("context_management", [{"type": "compaction"}]),
        ("moderation", {"model": "m"}),
        ("frobnicate", 1),
        ("messages", []),
        ("max_tokens", 3),
        ("n", 2),
        ("echo", True),
        ("access_programs", {}),
    ],
)
def test_what_refers_to_an_earlier_response_or_is_unknown_is_refused_by_its_name(name: str, value: Any) -> None:
    assert refused(**{name: value})[0] == name
    assert chat(**{name: None}) == chat()


def test_what_says_what_is_the_case_anyway_is_accepted() -> None:
    chat(store=False, background=False, truncation="disabled", context_management=[], max_tool_calls=3)
    chat(reasoning={"effort": None, "summary": None}, text={"verbosity": "medium"}, service_tier="auto", metadata={})
    chat(include=["reasoning.encrypted_content"], stream=True, stream_options={"include_obfuscation": False})


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input": []}, "input"),
        ({"input": None}, "input"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0]"),
        ({"input": [{"type": "reasoning", "summary": []}]}, "input[0]"),
        ({"input": [{"role": "tool", "content": "3"}]}, "input[0].role"),
        ({"input": [{"role": [], "content": "3"}]}, "input[0].role"),
        ({"input": [{"type": [], "content": "3"}]}, "input[0]"),
        ({"input": [{"role": "user", "content": 3}]}, "input[0].content"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0]"),
        ({"input": [{"role": "user", "content": [{"type": []}]}]}, "input[0].content[0]"),
        ({"input": [{"role": "user", "content": "x", "phase": "commentary"}]}, "input[0].phase"),
        ({"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]}, "input[0].call_id"),
        ({"input": [{"type": "function_call_output", "call_id": "c"}]}, "input[0].output"),
        ({"instructions": ["x"]}, "instructions"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_tool_calls": 0}, "max_tool_calls"),
        ({"tools": [{"type": "web_search"}]}, "tools[0]"),
        ({"tools": {}}, "tools"),
        ({"tools": [{**ADD, "defer_loading": True}]}, "tools[0].defer_loading"),
        ({"tools": [{**ADD, "name": "a b"}]}, "tools[0].name"),
        ({"tools": [{**ADD, "parameters": {"type": "array"}}]}, "tools[0].parameters.type"),
        ({"tools": [ADD], "tool_choice": {"type": "allowed_tools"}}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"text": []}, "text"),
        ({"text": {"format": []}}, "text.format"),
        ({"text": {"format": {"type": "grammar"}}}, "text.format"),
        ({"text": {"format": {**FORM, "name": "a b"}}}, "text.format.name"),
        ({"text": {"format": {**FORM, "examples": []}}}, "text.format.examples"),
        ({"text": {"verbosity": "low"}}, "text.verbosity"),
        ({"text": {"stop": "x"}}, "text.stop"),
        ({"reasoning": {"effort": "low"}}, "reasoning.effort"),
        ({"include": ["web_search_call.results"]}, "include[0]"),
        ({"include": "x"}, "include"),
        ({"include": ""}, "include"),
        ({"top_logprobs": False}, "top_logprobs"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"include": ["message.output_text.logprobs"], "top_logprobs": 21}, "top_logprobs"),
        ({"stream_options": {}}, "stream_options"),
        ({"stream": True, "stream_options": {"include_usage": True}}, "stream_options.include_usage"),
        ({"temperature": 3}, "temperature"),
    ],
)
def test_a_wrong_value_is_refused_with_the_name_that_it_has_here(body: dict[str, Any], param: str) -> None:
    found, message = refused(**body)
    assert found == param
    assert param.partition("[")[0] in message


def test_an_error_of_the_container_is_told_in_the_words_of_a_response() -> None:
    error = own_words(BadParameter("tools[0].function.parameters", "multipleOf cannot be followed"))
    assert (error.param, error.message) == ("tools[0].parameters", "tools[0].parameters: multipleOf cannot be followed")
    assert own_words(BadRequest("too long", hint="context_length_exceeded")).openai_code == "context_length_exceeded"
