"""OpenAI's Python SDK, unmodified, against the real processes and the real small model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import accumulate
from typing import Any, Literal

import openai
import pydantic
import pytest
from openai.types.chat import ChatCompletionMessageFunctionToolCall

from tests.e2e.machine import Machine
from tests.e2e.node_clients import node
from thaw.dev.known_answers import OF_FRANCE

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

ASKED: Any = [{"role": "user", "content": "Tell me about the city of Paris."}]
PAIR = {
    "type": "object",
    "properties": {"a": {"type": "integer", "maximum": 99}, "b": {"type": "integer", "maximum": 99}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
ROUNDING_NAT = 0.5
"""The largest distance of two log probabilities that a model in 16 bits computes in two ways."""
TOOLS: Any = [
    {"type": "function", "function": {"name": name, "description": f"Computes {name}.", "parameters": PAIR}}
    for name in ("add", "multiply")
]


class City(pydantic.BaseModel):
    name: Literal["Paris", "Rome"]
    is_capital: bool
    country: Literal["France", "Italy"]


class Town(pydantic.BaseModel):
    name: Literal["Paris", "Rome"]


@pytest.fixture(scope="module")
def client(platform: Machine) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(api_key=":".join(platform.auth()), base_url=f"{platform.url}/v1", max_retries=0) as made:
        yield made


def test_a_response_format_is_followed(client: openai.OpenAI) -> None:
    named = {"name": "city", "schema": City.model_json_schema()}
    formats: Any = ({"type": "json_schema", "json_schema": named}, {"type": "json_object"})
    for form in formats:
        answer = client.chat.completions.create(
            model="chat",
            messages=ASKED,
            response_format=form,
            max_tokens=160 if form["type"] == "json_schema" else 16,
            temperature=0,
        )
        assert answer.choices[0].message.content is not None
        if form["type"] == "json_schema":
            City.model_validate_json(answer.choices[0].message.content)
        else:
            assert answer.choices[0].message.content.startswith("{")


def test_an_answer_is_parsed_into_a_class(client: openai.OpenAI) -> None:
    answer = client.beta.chat.completions.parse(
        model="chat", messages=ASKED, response_format=City, max_tokens=160, temperature=0
    )
    assert isinstance(answer.choices[0].message.parsed, City)
    with client.beta.chat.completions.stream(
        model="chat", messages=ASKED, response_format=City, temperature=0
    ) as stream:
        for _ in stream:
            pass
        assert isinstance(stream.get_final_completion().choices[0].message.parsed, City)


def called(answer: Any) -> list[tuple[str, dict[str, Any]]]:
    found = []
    for call in answer.choices[0].message.tool_calls or ():
        assert isinstance(call, ChatCompletionMessageFunctionToolCall)
        found.append((call.function.name, json.loads(call.function.arguments)))
    return found


@pytest.mark.parametrize("stream", [False, True])
def test_a_required_tool_is_called(client: openai.OpenAI, stream: bool) -> None:
    asked: Any = [{"role": "user", "content": "Add 3 and 4."}]
    more: Any = {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 96}
    if stream:
        with client.chat.completions.stream(model="chat", messages=asked, temperature=0, **more) as events:
            kinds = [e.type for e in events]
            answer: Any = events.get_final_completion()
        assert "tool_calls.function.arguments.delta" in kinds
    else:
        answer = client.chat.completions.create(model="chat", messages=asked, temperature=0, **more)
    (choice,) = answer.choices
    assert choice.finish_reason == "tool_calls"
    assert not choice.message.content
    ((name, arguments),) = called(answer)
    assert name in ("add", "multiply")
    assert set(arguments) == {"a", "b"}


def test_a_named_tool_is_called_and_its_result_goes_into_the_history(client: openai.OpenAI) -> None:
    named: Any = {"type": "function", "function": {"name": "multiply"}}
    asked: Any = [{"role": "user", "content": "What is 6 times 7?"}]
    answer = client.chat.completions.create(
        model="chat", messages=asked, tools=TOOLS, tool_choice=named, max_tokens=96, temperature=0
    )
    message = answer.choices[0].message
    assert [name for name, _ in called(answer)] == ["multiply"]
    assert answer.choices[0].finish_reason == "stop"
    assert message.tool_calls is not None
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "42"}
    history: Any = [*asked, message.model_dump(exclude_none=False, include={"role", "content", "tool_calls"}), result]
    after = client.chat.completions.create(
        model="chat", messages=history, tools=TOOLS, tool_choice="none", max_tokens=8
    )
    assert after.choices[0].message.content
    assert after.choices[0].message.tool_calls is None


def test_a_schema_that_cannot_be_followed_is_a_bad_request_with_its_parameter(client: openai.OpenAI) -> None:
    schema = {"type": "number", "multipleOf": 3}
    form: Any = {"type": "json_schema", "json_schema": {"name": "three", "schema": schema}}
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="chat", messages=ASKED, response_format=form)
    assert caught.value.param == "response_format"


def test_a_completion_that_echoes_its_prompt_has_the_prompts_logprobs(client: openai.OpenAI) -> None:
    """An evaluation harness asks in this way how likely a text is."""
    more: Any = {"model": "chat", "temperature": 0, "logprobs": 2}
    plain = client.completions.create(prompt=OF_FRANCE.prompt, max_tokens=2, **more)
    whole = f"{OF_FRANCE.prompt}{plain.choices[0].text}"
    echoed = client.completions.create(prompt=OF_FRANCE.prompt, max_tokens=2, echo=True, **more)
    scored = client.completions.create(prompt=whole, max_tokens=0, echo=True, **more)
    assert echoed.choices[0].text == scored.choices[0].text == whole
    found, likely = echoed.choices[0].logprobs, scored.choices[0].logprobs
    assert found is not None
    assert likely is not None
    assert plain.choices[0].logprobs is not None
    assert (
        found.tokens
        == likely.tokens
        == ["The", " capital", " of", " France", " is", *(plain.choices[0].logprobs.tokens or [])]
    )
    assert found.text_offset == list(accumulate(map(len, likely.tokens[:-1]), initial=0))
    assert (found.token_logprobs or [0])[0] is None
    for a, b in zip((found.token_logprobs or [])[1:], (likely.token_logprobs or [])[1:], strict=True):
        assert abs(a - b) < ROUNDING_NAT  # once token by token and once at once
    assert scored.usage is not None
    assert scored.usage.completion_tokens == 0


def test_the_logprobs_of_a_prompt_come_as_vllm_has_them(client: openai.OpenAI, platform: Machine) -> None:
    more: Any = {"model": "chat", "prompt": OF_FRANCE.prompt, "max_tokens": 1, "temperature": 0}
    echoed = client.completions.create(**more, logprobs=1, echo=True).choices[0].logprobs
    assert echoed is not None
    choice: Any = client.completions.create(**more, extra_body={"prompt_logprobs": 2}).choices[0].model_dump()
    first, *rest = choice["prompt_logprobs"]
    assert first is None
    own = [next(iter(place.values())) for place in rest]  # the prompt's own token comes first
    assert [one["decoded_token"] for one in own] == [" capital", " of", " France", " is"]
    for one, logprob in zip(own, (echoed.token_logprobs or [])[1:4], strict=False):
        assert abs(one["logprob"] - logprob) < ROUNDING_NAT
    assert all({1, 2} <= {one["rank"] for one in place.values()} for place in rest)
    chat = client.chat.completions.create(model="chat", messages=ASKED, max_tokens=1, extra_body={"prompt_logprobs": 0})
    assert chat.usage is not None
    assert len(chat.model_dump()["prompt_logprobs"]) == chat.usage.prompt_tokens


def test_a_model_that_cannot_fill_in_says_so(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="chat", prompt="Once", suffix="the end.")
    assert caught.value.param == "suffix"


def test_token_ids_come_with_an_answer_and_lead_back_to_its_text(client: openai.OpenAI, platform: Machine) -> None:
    answer = client.completions.create(
        model="chat", prompt="Once upon", max_tokens=4, temperature=0, extra_body={"return_token_ids": True}
    )
    choice: Any = answer.choices[0].model_dump()
    tokens = platform.request(
        "POST", "/tokenize", json={"model": "chat", "prompt": "Once upon", "return_token_strs": True}
    )
    assert tokens.json() == {
        "count": 2,
        "max_model_len": 2048,
        "tokens": choice["prompt_token_ids"],
        "token_strs": ["Once", " upon"],
    }
    text = platform.request("POST", "/detokenize", json={"model": "chat", "tokens": choice["token_ids"]})
    assert text.json() == {"prompt": choice["text"]}
    chat = platform.request("POST", "/tokenize", json={"model": "chat", "messages": ASKED}).json()
    asked = client.chat.completions.create(model="chat", messages=ASKED, max_tokens=1)
    assert asked.usage is not None
    assert chat["count"] == asked.usage.prompt_tokens
    stray = platform.request("POST", "/detokenize", json={"model": "chat", "tokens": [10**6]})
    assert (stray.status_code, stray.json()["error"]["param"]) == (400, "tokens")


def test_a_response_has_text_in_its_form_and_calls_tools_whole_and_streamed(client: openai.OpenAI) -> None:
    parsed = client.responses.parse(
        model="chat", input="Tell me about the city of Paris.", text_format=Town, max_output_tokens=24, temperature=0
    )
    assert isinstance(parsed.output_parsed, Town)
    assert parsed.status == "completed"
    digit = {"type": "object", "properties": {"a": {"type": "integer", "maximum": 9}}, "required": ["a"]}
    tools: Any = [{"type": "function", "name": "double", "parameters": {**digit, "additionalProperties": False}}]
    more: Any = {"tools": tools, "tool_choice": {"type": "function", "name": "double"}, "temperature": 0}
    asked: Any = {"model": "chat", "instructions": "Use the tool.", "input": "Double 7.", **more}
    with client.responses.stream(**asked, max_output_tokens=40) as stream:
        parts = [e.delta for e in stream if e.type == "response.function_call_arguments.delta"]
        (call,) = stream.get_final_response().output
    assert call.type == "function_call"
    assert call.arguments == "".join(parts)
    assert set(json.loads(call.arguments)) == {"a"}
    history = [
        {"role": "user", "content": "Double 7."},
        call.to_dict(),
        {"type": "function_call_output", "call_id": call.call_id, "output": "14"},
    ]
    after = client.responses.create(model="chat", input=history, max_output_tokens=4)  # type: ignore[arg-type]
    assert after.output_text
    assert after.usage is not None
    assert after.usage.output_tokens <= 4
    with pytest.raises(openai.BadRequestError) as kept:
        client.responses.create(model="chat", input="And now?", previous_response_id=after.id)
    assert kept.value.param == "previous_response_id"


def test_openais_npm_client_works_unmodified(platform: Machine) -> None:
    said = node("openai_verbs.js", THAW_TEST_APIHOST=platform.url, THAW_TEST_AUTH=":".join(platform.auth()))
    assert "smollm2" in said["models"]
    assert said["whole"] == said["streamed"] != ""
    assert said["texts"] == 2
    assert said["city"] == ["name"]
    assert said["called"] == [["add", ["a", "b"]]]
    assert said["response"] == ["incomplete", True]
    assert said["final"] is True
    assert said["kept"] == [400, "store", None]
    assert said["unknown"] == [400, "frobnicate", None]
    assert said["missing"] == [404, "model", "model_not_found"]


def test_several_choices_and_prompts_are_answered(client: openai.OpenAI) -> None:
    """The engine promises that a seed repeats an answer only when the request is alone in its batch: in bfloat16, other
    requests change the last bits of a logit. tests/conformance/test_engine.py checks this promise.
    """
    texts = client.completions.create(model="chat", prompt=["One two", "A b"], n=2, seed=1, max_tokens=4)
    assert [c.index for c in texts.choices] == [0, 1, 2, 3]
    assert len({c.text for c in texts.choices}) > 1
