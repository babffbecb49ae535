"""Sampling when the request does not set it: as the checkpoint says, else as OpenAI does it."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from relay.protocol.messages import LlmRun
from tests.thaw_runtime.conftest import run_probe
from tests.thaw_runtime.fake_descriptor_socket import FakeDescriptorSocket
from tests.thaw_runtime.models import read_segment, write_tiny_model
from thaw import wire
from thaw.errors import BadParameter, BadRequest, from_info
from thaw_runtime.engine.protocol import Grammar, GrammarKind, Sampling
from thaw_runtime.llm.model_text import load_model_text
from thaw_runtime.llm.openai_request import parse_run

Choose = Callable[..., Sampling]


@pytest.fixture
def choose(tmp_path: Path) -> Iterator[Choose]:
    """The sampling of a request to a model with this generation_config.json."""
    descriptor_sockets: list[FakeDescriptorSocket] = []

    def sampling(generation: Mapping[str, Any] | None, endpoint: str = "chat", **body: Any) -> Sampling:
        model = write_tiny_model(tmp_path / str(len(descriptor_sockets)))
        if generation is not None:
            (model / "generation_config.json").write_text(json.dumps(generation))
        descriptor_sockets.append(FakeDescriptorSocket(model, tmp_path / f"socket{len(descriptor_sockets)}"))
        client, segment = read_segment(descriptor_sockets[-1])
        text = load_model_text(segment)
        segment.close()
        client.close()
        prompt = {"messages": [{"role": "user", "content": "hi"}]} if endpoint == "chat" else {"prompt": "hi"}
        run = wire.from_plain(LlmRun, {"endpoint": endpoint, "seed": 0, "body": prompt | body})
        return parse_run(run, "r", text, 512).engine.sampling

    yield sampling
    for descriptor_socket in descriptor_sockets:
        descriptor_socket.close()


def test_without_any_word_openais_defaults_hold(choose: Choose) -> None:
    for generation in (None, {}, {"do_sample": False, "eos_token_id": 256}):
        found = choose(generation)
        assert (found.temperature, found.top_p, found.top_k, found.min_p) == (1.0, 1.0, 0, 0.0)
        assert (found.presence_penalty, found.frequency_penalty, found.repetition_penalty) == (0.0, 0.0, 1.0)


def test_the_checkpoints_defaults_hold_where_the_request_is_silent(choose: Choose) -> None:
    generation = {
        "temperature": 0.6,
        "top_p": 0.95,
        "top_k": 20,
        "min_p": 0.05,
        "repetition_penalty": 1.05,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.25,
    }
    found = choose(generation)
    for name, value in generation.items():
        assert getattr(found, name) == value, name


def test_the_requests_own_word_goes_before_the_checkpoints_even_if_it_is_zero(choose: Choose) -> None:
    generation = {"temperature": 0.6, "top_p": 0.95, "presence_penalty": 0.5, "max_new_tokens": 9}
    found = choose(generation, temperature=0, top_p=1, presence_penalty=0, max_tokens=100)
    assert (found.temperature, found.top_p, found.presence_penalty, found.max_tokens) == (0.0, 1.0, 0.0, 100)
    assert choose(generation, temperature=None).temperature == 0.6


def test_a_chat_is_as_long_as_the_checkpoint_says_or_as_there_is_room(choose: Choose) -> None:
    room = choose(None).max_tokens
    assert 400 < room < 512
    assert choose({"max_new_tokens": 9}).max_tokens == 9
    assert choose({"max_new_tokens": 9999}).max_tokens == room
    assert choose({"max_new_tokens": 9}, "completions").max_tokens == 16


def test_what_is_no_number_in_generation_config_is_left_alone(choose: Choose) -> None:
    assert choose({"temperature": None, "top_p": "0.5", "top_k": True, "min_p": math.nan}) == choose(None)


LAST = 256  # the last token of the tiny model


def test_tokens_of_the_model_may_be_biased_and_stop_an_answer(choose: Choose) -> None:
    found = choose(None, logit_bias={"0": -100, str(LAST): 2.5}, stop_token_ids=[0, LAST], min_tokens=3)
    assert dict(found.logit_bias) == {0: -100.0, LAST: 2.5}
    assert found.stop_token_ids == (LAST, 0, LAST)
    assert found.min_tokens == 3


@pytest.mark.parametrize(
    "body",
    [
        {"logit_bias": {str(LAST + 1): 1}},
        {"logit_bias": {"-1": 1}},
        {"logit_bias": {"a": 1}},
        {"logit_bias": {"5": None}},
        {"logit_bias": {"5": math.nan}},
        {"logit_bias": {"5": math.inf}},
        {"logit_bias": {"5": 10**400}},
        {"logit_bias": {"5": 101}},
        {"stop_token_ids": [LAST + 1], "min_tokens": 1},
        {"stop_token_ids": [-1]},
        {"stop_token_ids": ["a"]},
        {"stop_token_ids": [1.5]},
        {"stop_token_ids": [True]},
        {"stop_token_ids": 5},
        {"stop_token_ids": {"5": 1}},
        {"min_tokens": 9, "max_tokens": 8},
    ],
)
def test_what_would_end_the_engine_is_refused(choose: Choose, body: dict[str, Any]) -> None:
    with pytest.raises(BadRequest):
        choose(None, **body)


@pytest.mark.parametrize("prompt", [[], "", [LAST + 1], [-1], [5, 10**30]])
def test_a_prompt_is_of_the_models_tokens(choose: Choose, prompt: object) -> None:
    with pytest.raises(BadRequest):
        choose(None, "completions", prompt=prompt)


def test_an_end_of_sequence_that_is_none_of_the_models_tokens_stops_nothing(choose: Choose) -> None:
    assert choose({"eos_token_id": [LAST, LAST + 1, 3]}).stop_token_ids == (LAST, 3)


@pytest.mark.vllm
def test_every_seed_of_64_bits_is_one_to_the_engine() -> None:
    """vLLM takes -1 for no seed, and the same request would then have another answer each time."""
    asked = [-(2**63), -2, -1, 0, 7, 2**63 - 1]
    out = run_probe("seeds_probe", *map(str, asked)).stdout
    assert json.loads(out.splitlines()[-1]) == [0, 2**63 - 2, 2**63 - 1, 0, 7, 2**63 - 1]


CITY = {"type": "object", "properties": {"city": {"type": "string"}}}


@pytest.mark.parametrize(
    ("body", "grammar"),
    [
        ({"response_format": {"type": "text"}}, None),
        (
            {"response_format": {"type": "json_object"}},
            Grammar(GrammarKind.JSON, '{"type": "object"}', "response_format"),
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "c", "schema": CITY}}},
            Grammar(GrammarKind.JSON, json.dumps(CITY), "response_format"),
        ),
        ({"guided_json": json.dumps(CITY)}, Grammar(GrammarKind.JSON, json.dumps(CITY), "guided_json")),
        ({"guided_choice": ["a", "b"]}, Grammar(GrammarKind.CHOICE, '["a", "b"]', "guided_choice")),
        ({"guided_regex": "a*"}, Grammar(GrammarKind.REGEX, "a*", "guided_regex")),
        ({"structured_outputs": {"json": CITY}}, Grammar(GrammarKind.JSON, json.dumps(CITY), "structured_outputs")),
        (
            {"structured_outputs": {"json_object": True, "regex": None}},
            Grammar(GrammarKind.JSON, '{"type": "object"}', "structured_outputs"),
        ),
        (
            {"structured_outputs": {"grammar": "root ::= 'a'"}},
            Grammar(GrammarKind.GRAMMAR, "root ::= 'a'", "structured_outputs"),
        ),
    ],
)
def test_each_way_to_ask_for_a_form_gives_its_grammar(choose: Choose, body: dict[str, Any], grammar: Grammar) -> None:
    assert choose(None, **body).grammar == grammar


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice"),
        ({"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs"),
        ({"guided_regex": "a" * 262_145}, "guided_regex"),
        ({"guided_json": '{"items":' * 65 + "{}" + "}" * 65}, "guided_json"),
        ({"guided_json": '{"items":' * 9_000 + "{}" + "}" * 9_000}, "guided_json"),
        ({"guided_json": "{"}, "guided_json"),
        ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos"),
        ({"guided_regex": "a", "min_tokens": 3}, "min_tokens"),
    ],
)
def test_a_form_that_no_answer_can_have_is_refused_by_its_name(
    choose: Choose, body: dict[str, Any], param: str
) -> None:
    with pytest.raises(BadParameter) as caught:
        choose(None, **body)
    assert caught.value.param == param
    again = from_info(caught.value.info())
    assert isinstance(again, BadParameter)
    assert again.param == param
