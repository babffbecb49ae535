"""Thaw's proxy reads a model's text side with code of its own: it must read what vLLM's server reads.

Each case is a checkpoint's small files.  text_probe.py reads them with vLLM and transformers; here Thaw reads them.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import xgrammar

from tests.thaw_runtime.drawn_layouts import layout
from tests.thaw_runtime.sidecar_segment import SidecarSegment
from tests.thaw_runtime.text_cases import CHATS
from tests.thaw_runtime.text_probe import answers
from tests.thaw_runtime.tokenizer_cases import ENDS, LAYOUTS, N_BYTES, N_MODEL, TEXTS, byte_level, files, token
from thaw.errors import ThawError
from thaw_runtime.engine.grammar_process import Rules, compiled, compiler_of
from thaw_runtime.llm.model_text import ModelText, load_model_text
from thaw_runtime.weights import tokenizer_files
from thaw_runtime.weights.tokenizer_files import TokenizerFiles, read_tokenizer_files

pytestmark = pytest.mark.vllm

NAMES = {
    "bos_token": "<s>",
    "eos_token": "<|im_end|>",
    "pad_token": None,
    "unk_token": {"__type": "AddedToken", **token("<unk>")},
}
MARKS = [token(content) for content in ("<s>", "<|im_start|>", "<|im_end|>", "<unk>")]


_DRAW = random.Random(61)
DRAWN = {f"draw {n}": layout(_DRAW) for n in range(150)}


def checkpoint(case: dict[str, Any]) -> dict[str, Any]:
    """The small files of a model with a case's templates."""
    template = case.get("template", case.get("config"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": template, **NAMES}
    return files(byte_level(*MARKS), config) | case.get("files", {})


@pytest.fixture(scope="module")
def reference() -> dict[str, Any]:
    """What vLLM reads in all cases, from one process that imports it once."""
    cases = {f"chat: {name}": {**case, "kind": "chat", "files": checkpoint(case)} for name, case in CHATS.items()}
    cases |= {name: {"kind": "tokenizer", "files": made} for name, made in {**LAYOUTS, **ENDS, **DRAWN}.items()}
    return answers(cases)


def thaws(case: dict[str, Any]) -> dict[str, Any]:
    text = load_model_text(SidecarSegment(checkpoint(case)))  # type: ignore[arg-type]
    variables = dict(case.get("variables", {}))
    if case.get("documents"):
        variables["documents"] = case["documents"]
    tools, goes_on = case.get("tools", ()), case.get("continue_final_message", False)
    ids = text.encode_chat(case["messages"], variables, tools, goes_on=goes_on)
    return {"text": text.decode(ids), "ids": list(ids)}


@pytest.mark.parametrize("name", CHATS)
def test_a_chat_has_the_prompt_that_vllm_gives_it(name: str, reference: dict[str, Any]) -> None:
    expected = reference[f"chat: {name}"]
    if "error" in expected:
        with pytest.raises(ThawError, match=r"the chat template|continue_final_message"):
            thaws(CHATS[name])
    else:
        assert thaws(CHATS[name]) == expected


def read(made: dict[str, Any]) -> ModelText:
    return load_model_text(SidecarSegment(made))  # type: ignore[arg-type]


def found_in(made: dict[str, Any]) -> dict[str, Any]:
    text = read(made)
    plain = [list(text.encode(one, add_special_tokens=False)) for one in TEXTS]
    return {
        "plain": plain,
        "whole": [list(text.encode(one)) for one in TEXTS],
        "shown": [text.tokenizer.decode(ids) for ids in plain],
        "texts": [text.decode([i]) for i in range(text.tokenizer.get_vocab_size())],
        "special": special_tokens(made),
        "ends": sorted(text.eos_token_ids),
    }


def special_tokens(made: dict[str, Any]) -> dict[str, str]:
    found = read_tokenizer_files(SidecarSegment(made))  # type: ignore[arg-type]
    assert found is not None
    return dict(tokenizer_files.made(found).special)


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_tokenizer_reads_as_in_vllm(name: str, reference: dict[str, Any]) -> None:
    assert found_in(LAYOUTS[name]) == reference[name]


def test_tokenizers_that_were_drawn_read_as_in_vllm(reference: dict[str, Any]) -> None:
    misread = {name: made for name, made in DRAWN.items() if found_in(made) != reference[name]}
    assert misread == {}


@pytest.mark.parametrize("name", ENDS)
def test_an_answer_ends_where_vllm_ends_it(name: str, reference: dict[str, Any]) -> None:
    assert sorted(read(ENDS[name]).eos_token_ids) == reference[name]["ends"]


@pytest.mark.parametrize(("special", "is_allowed"), [(False, True), (True, False)])
def test_a_grammar_knows_the_tokens_that_only_the_tokenizers_config_has(special: bool, is_allowed: bool) -> None:
    """Those that are text: a special token inside an answer would vanish from it."""
    made = files(byte_level(*MARKS), {"added_tokens_decoder": {"999": token("<think>", special=special)}})
    segment: Any = SidecarSegment(made)
    found = read_tokenizer_files(segment)
    assert found is not None
    compiler = compiler_of(TokenizerFiles.loaded(found.vocabulary, found.dumped()), N_MODEL, 1)
    matcher = xgrammar.GrammarMatcher(compiled(compiler, Rules("regex", "<think>x", "guided_regex")))
    assert matcher.accept_token(N_BYTES + len(MARKS)) is is_allowed
