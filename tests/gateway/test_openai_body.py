"""The bodies of /v1 that are accepted: no option that would change an answer is ignored silently."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.api.bad_field import BadField
from gateway.api.openai_body import check_text, validate

MESSAGES: Any = [{"role": "user", "content": "hi"}]
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
NAMED = {"name": "city", "schema": SCHEMA, "strict": True}


def accepted(endpoint: str = "chat", **body: Any) -> None:
    plain = {"messages": MESSAGES} if endpoint == "chat" else {"prompt": "Once"}
    validate(endpoint, {"model": "m", **plain, **body})


def refused(endpoint: str = "chat", **body: Any) -> tuple[str, str]:
    with pytest.raises(BadField) as caught:
        accepted(endpoint, **body)
    return caught.value.param, caught.value.message


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
@pytest.mark.parametrize(
    "name",
    ["frobnicate", "reasoning_effort", "web_search_options", "guided_whitespace_pattern", "max_token", "truncate"],
)
def test_a_parameter_that_nothing_here_obeys_is_refused_by_its_name(endpoint: str, name: str) -> None:
    assert refused(endpoint, **{name: 1}) == (name, f"Unrecognized request argument supplied: {name}.")
    accepted(endpoint, **{name: None})


@pytest.mark.parametrize(
    ("endpoint", "name", "value"),
    [
        ("completions", "messages", MESSAGES),
        ("completions", "top_logprobs", 2),
        ("completions", "max_completion_tokens", 3),
        ("completions", "chat_template_kwargs", {}),
        ("chat", "prompt", "Once"),
    ],
)
def test_a_parameter_of_the_other_endpoint_is_refused(endpoint: str, name: str, value: Any) -> None:
    assert refused(endpoint, **{name: value})[0] == name


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("length_penalty", 2),
        ("use_beam_search", True),
        ("include_stop_str_in_output", True),
        ("skip_special_tokens", False),
        ("bad_words", ["no"]),
        ("functions", [{"name": "f"}]),
    ],
)
def test_a_parameter_that_has_one_value_here_is_refused_with_another(name: str, value: Any) -> None:
    param, message = refused(**{name: value})
    assert param == name
    assert message.endswith(f"is not supported: leave {name} out.")


def test_what_changes_no_answer_is_accepted() -> None:
    accepted(
        user="u", metadata={"a": "b"}, store=True, service_tier="auto", prompt_cache_key="k", safety_identifier="s"
    )
    accepted(length_penalty=1, skip_special_tokens=True, modalities=["text"], priority=0)
    accepted("completions", stream=True, stream_options={"include_usage": True}, stop_token_ids=[3], min_tokens=1)


def test_options_of_a_stream_are_checked_one_by_one() -> None:
    assert refused(stream=True, stream_options={"chunks": 3})[0] == "stream_options.chunks"
    assert refused(stream=True, stream_options={"include_usage": 1})[0] == "stream_options.include_usage"


@pytest.mark.parametrize("role", ["user", "assistant", "system", "developer"])
def test_the_roles_of_openai_are_accepted(role: str) -> None:
    accepted(messages=[{"role": role, "content": "hi"}])


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "wizard", "content": "hi"}, "messages[0].role"),
        ({"role": "function", "content": "hi"}, "messages[0].role"),
        ({"role": "user"}, "messages[0].content"),
        ({"role": "assistant", "content": None}, "messages[0].content"),
        ({"role": "assistant", "content": None, "tool_calls": []}, "messages[0].content"),
        ({"role": "assistant", "content": None, "tool_calls": [{"id": "a"}]}, "messages[0].tool_calls[0]"),
        ({"role": "user", "content": "hi", "tool_calls": [{}]}, "messages[0].tool_calls"),
        ({"role": "tool", "content": "4"}, "messages[0].tool_call_id"),
        ({"role": "user", "content": "hi", "tool_call_id": "c1"}, "messages[0].tool_call_id"),
        ({"role": "assistant", "content": "a", "audio": {"id": "x"}}, "messages[0].audio"),
        ({"role": "user", "content": "hi", "weight": 2}, "messages[0].weight"),
    ],
)
def test_a_message_that_cannot_be_rendered_is_refused_where_it_is_wrong(message: Any, param: str) -> None:
    assert refused(messages=[message])[0] == param


def test_a_history_with_calls_and_their_results_is_accepted() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    called = {"role": "assistant", "content": None, "tool_calls": [call]}
    accepted(messages=[*MESSAGES, called, {"role": "tool", "tool_call_id": "c1", "content": "4"}])
    accepted(messages=[{"role": "assistant", "content": "4", "tool_calls": [], "tool_call_id": None}])


def schema_of(**fields: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": fields}}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"response_format": "json"}, "response_format"),
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"response_format": {"type": "text", "schema": {}}}, "response_format.schema"),
        ({"max_tokens": 7, "max_completion_tokens": 5}, "max_tokens"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        (schema_of(schema={}), "response_format.json_schema.name"),
        (schema_of(name="a", schema=3), "response_format.json_schema.schema"),
        (schema_of(name="a", shape={}), "response_format.json_schema.shape"),
        ({"structured_outputs": {"jason": {}}}, "structured_outputs.jason"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
        ({"structured_outputs": {"whitespace_pattern": " "}}, "structured_outputs.whitespace_pattern"),
        ({"guided_regex": 3}, "guided_regex"),
        ({"guided_choice": ["a", 3]}, "guided_choice"),
    ],
)
def test_a_form_that_is_none_is_refused_where_it_is_wrong(body: dict[str, Any], param: str) -> None:
    assert refused(**body)[0] == param


def test_the_forms_of_openai_and_vllm_are_accepted() -> None:
    accepted(response_format={"type": "text"})
    accepted(response_format={"type": "json_object"})
    accepted(response_format={"type": "json_schema", "json_schema": NAMED})
    accepted(structured_outputs={"json": SCHEMA})
    accepted("completions", guided_choice=["a", "b"], response_format=None)
    accepted("completions", structured_outputs={"regex": "a*", "json": None})


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"n": 0}, "n"),
        ({"n": True}, "n"),
        ({"best_of": 17}, "best_of"),
        ({"n": 3, "best_of": 2}, "best_of"),
        ({"best_of": 2, "stream": True}, "best_of"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ["a", 3]}, "prompt[1]"),
        ({"prompt": [[1], []]}, "prompt[1]"),
        ({"prompt": [[1, "a"]]}, "prompt"),
        ({"prompt": ["a"] * 33, "n": 2}, "prompt"),
    ],
)
def test_choices_and_prompts_that_cannot_be_are_refused(body: dict[str, Any], param: str) -> None:
    assert refused("completions", **body)[0] == param


def test_several_choices_and_prompts_are_accepted() -> None:
    accepted(n=16)
    accepted("completions", n=2, best_of=4, prompt=["a", "b"])
    accepted("completions", prompt=[[1, 2], [3]])
    accepted("completions", prompt=[1, 2])
    assert refused(best_of=2)[0] == "best_of"


JSON_OBJECT = {"type": "json_object"}
NO_PARAMETERS = {"type": "function", "function": {"name": "a"}}


def tool(**parameters: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "a", "parameters": parameters}}


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"tools": {}}, "tools"),
        ({"tools": [{"type": "retrieval"}]}, "tools[0]"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tools": [{"type": "function", "function": {"name": "a", "parameters": 3}}]}, "tools[0].function.parameters"),
        ({"tools": [tool(type="string")]}, "tools[0].function.parameters.type"),
        ({"tools": [tool(anyOf=[{"type": "string"}])]}, "tools[0].function.parameters.anyOf"),
        ({"tools": [tool()], "tool_choice": "required", "response_format": JSON_OBJECT}, "response_format"),
        ({"tools": [NO_PARAMETERS] * 2}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [NO_PARAMETERS], "tool_choice": "any"}, "tool_choice"),
        ({"tools": [NO_PARAMETERS], "tool_choice": {"type": "function", "function": {"name": "b"}}}, "tool_choice"),
    ],
)
def test_tools_that_are_none_are_refused_where_they_are_wrong(change: dict[str, Any], param: str) -> None:
    assert refused(**change)[0] == param


def test_what_is_only_known_at_the_end_is_no_part_of_a_stream() -> None:
    accepted("completions", echo=True, return_token_ids=True, max_tokens=0)
    assert refused("completions", echo=True, stream=True)[0] == "echo"
    assert refused(return_token_ids=True, stream=True)[0] == "return_token_ids"
    accepted(prompt_logprobs=0)
    assert refused(prompt_logprobs=0, stream=True)[0] == "prompt_logprobs"
    assert refused("completions", prompt_logprobs=21)[0] == "prompt_logprobs"


def test_a_suffix_is_one_of_a_completion_that_does_not_echo() -> None:
    accepted("completions", suffix="the end")
    accepted("completions", suffix="", echo=True)
    assert refused("completions", suffix="the end", echo=True)[0] == "suffix"
    assert refused("completions", suffix=3)[0] == "suffix"
    assert refused(suffix="the end")[0] == "suffix"
    assert refused("completions", max_tokens=0)[0] == "max_tokens"
    assert refused(echo=True)[0] == "echo"


@pytest.mark.parametrize(
    ("endpoint", "body", "param"),
    [
        ("tokenize", {}, "prompt"),
        ("tokenize", {"prompt": 3}, "prompt"),
        ("tokenize", {"prompt": "a", "messages": MESSAGES}, "prompt"),
        ("tokenize", {"prompt": "a", "temperature": 1}, "temperature"),
        ("tokenize", {"prompt": "a", "tools": []}, "tools"),
        ("tokenize", {"prompt": "a", "add_generation_prompt": True}, "add_generation_prompt"),
        ("tokenize", {"messages": [{"role": "x", "content": ""}]}, "messages[0].role"),
        ("detokenize", {}, "tokens"),
        ("detokenize", {"tokens": ["a"]}, "tokens"),
        ("detokenize", {"tokens": [1], "model": None}, "model"),
    ],
)
def test_a_text_without_its_parts_is_refused(endpoint: str, body: dict[str, Any], param: str) -> None:
    with pytest.raises(BadField) as caught:
        check_text(endpoint, {"model": "m", **body})
    assert caught.value.param == param


def test_an_answer_goes_on_with_a_message_or_begins_one() -> None:
    accepted(continue_final_message=True, add_generation_prompt=False)
    accepted(add_generation_prompt=True, continue_final_message=False)
    assert refused(continue_final_message=True, add_generation_prompt=True)[0] == "continue_final_message"
