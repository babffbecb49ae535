"""The check of a model reads its text with vLLM, too, and says where Thaw reads it otherwise."""

from __future__ import annotations

from typing import Any

import pytest

from tests.thaw_runtime.sidecar_segment import SidecarSegment
from tests.thaw_runtime.text_cases import CHATS
from tests.thaw_runtime.text_probe import answers
from tests.thaw_runtime.tokenizer_cases import ENDS, LAYOUTS, UNLIKE, byte_level, files
from thaw import wire
from thaw_runtime.engine.text_reading import TextReading
from thaw_runtime.llm.model_text import ModelText, load_model_text
from thaw_runtime.llm.text_check import differences

pytestmark = pytest.mark.vllm

TEMPLATES = ("a loop over messages", "a loop over parts", "dates", "raise_exception")
UNREAD = "a tokenizer that transformers cannot read"
CHECKED = {
    **LAYOUTS,
    **ENDS,
    **{name: made for name, (made, _) in UNLIKE.items()},
    UNREAD: files(byte_level(), {"eos_token": ["no token"]}),
    **{
        name: LAYOUTS["an end that the config names"] | {"chat_template.jinja": CHATS[name]["template"]}
        for name in TEMPLATES
    },
}
"""The models that the check reads."""


@pytest.fixture(scope="module")
def reference() -> dict[str, Any]:
    """What the check reads of all models, from one process that imports vLLM once."""
    return answers({name: {"kind": "reading", "files": made} for name, made in CHECKED.items()})


def read(made: dict[str, Any]) -> ModelText:
    return load_model_text(SidecarSegment(made))  # type: ignore[arg-type]


def said(name: str, reference: dict[str, Any]) -> tuple[str, ...]:
    return differences(read(CHECKED[name]), wire.from_plain(TextReading | None, reference[name]))


@pytest.mark.parametrize("name", [name for name in CHECKED if name not in UNLIKE and name != UNREAD])
def test_the_check_of_a_model_says_nothing_where_both_read_the_same(name: str, reference: dict[str, Any]) -> None:
    assert reference[name] is not None
    assert said(name, reference) == ()


@pytest.mark.parametrize("name", UNLIKE)
def test_the_check_of_a_model_says_what_vllm_reads_otherwise(name: str, reference: dict[str, Any]) -> None:
    (note,) = said(name, reference)
    assert note.startswith(UNLIKE[name][1])
    assert " and Thaw " in note


def test_the_check_of_a_model_shows_where_two_prompts_part(reference: dict[str, Any]) -> None:
    engines = wire.from_plain(TextReading, reference["a loop over messages"])
    made = CHECKED["a loop over messages"] | {"chat_template.jinja": CHATS["a loop over messages"]["template"] + "!"}
    assert differences(read(made), engines) == (
        "the engine's libraries go on with '' in the prompt of a chat, and Thaw with '!'",
    )
    refused = read(made | {"chat_template.jinja": "{{ raise_exception('x') }}"})
    assert differences(refused, engines) == (
        "the engine's reading of the chat template takes a chat that Thaw's refuses",
    )


def test_a_tokenizer_that_transformers_cannot_read_is_not_compared(reference: dict[str, Any]) -> None:
    assert reference[UNREAD] is None
    assert said(UNREAD, reference) == ()
