"""A client only gets whole characters, and nothing from a stop string on."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer

from tests.thaw_runtime.models import write_tiny_model
from thaw_runtime.llm.text_stream import Detokenizer, StopStrings, TextStream


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """A tokenizer with one token per byte, so that every character beyond ASCII has several tokens."""
    return Tokenizer.from_file(str(write_tiny_model(tmp_path_factory.mktemp("m") / "model") / "tokenizer.json"))


def test_a_character_is_shown_only_when_its_last_byte_has_come(tokenizer: Tokenizer) -> None:
    detokenizer = Detokenizer(tokenizer, ())
    shown = [detokenizer.push(byte) for byte in "né🙂".encode()]
    assert shown == ["n", "", "é", "", "", "", "🙂"]


def test_the_pieces_add_up_to_the_text_wherever_the_prompt_was_cut(tokenizer: Tokenizer) -> None:
    text = "Grüße, 世界! 🙂 ok " * 8
    data = text.encode()
    for cut in range(0, 12):
        if (data[cut] & 0xC0) == 0x80:
            continue  # no prompt ends inside a character
        detokenizer = Detokenizer(tokenizer, tuple(data[:cut]))
        assert "".join(detokenizer.push(b) for b in data[cut:]) == data[cut:].decode()


def test_bytes_that_are_no_character_never_reach_the_client(tokenizer: Tokenizer) -> None:
    detokenizer = Detokenizer(tokenizer, ())
    assert "".join(detokenizer.push(b) for b in (0xE4, 0xBD)) == ""


def test_special_tokens_have_no_text(tokenizer: Tokenizer) -> None:
    detokenizer = Detokenizer(tokenizer, ())
    assert [detokenizer.push(t) for t in (104, 256, 105)] == ["h", "", "i"]


def test_text_that_may_begin_a_stop_string_is_held_back_until_it_is_clear() -> None:
    stops = StopStrings(["END"])
    assert [stops.push(c).text for c in "aENbE"] == ["a", "", "", "ENb", ""]
    assert stops.flush() == "E"


def test_text_is_cut_at_the_first_stop_string() -> None:
    stops = StopStrings(["###", "stop"])
    shown = stops.push("one stop two ###")
    assert (shown.text, shown.stopped) == ("one ", True)


def test_a_stop_string_may_span_tokens_and_overlap_itself() -> None:
    stops = StopStrings(["aab"])
    shown = [stops.push(c) for c in "aaab"]
    assert [s.text for s in shown] == ["", "", "a", ""]
    assert shown[-1].stopped


def test_a_continued_answer_shows_what_the_uninterrupted_one_would(tokenizer: Tokenizer) -> None:
    data = "x🙂 STO yes STOP no".encode()
    whole = TextStream(tokenizer, (), ["STOP"])
    shown = [whole.push(b) for b in data]
    for cut in range(1, 12):
        continued = TextStream(tokenizer, (), ["STOP"])
        for token_id in data[:cut]:
            continued.push(token_id)
        assert [continued.push(b) for b in data[cut:]] == shown[cut:]


def test_the_first_of_several_stop_strings_in_one_piece_ends_the_text() -> None:
    assert StopStrings(["END"]).push("a END b END").text == "a "


def test_every_length_of_a_stop_strings_beginning_is_held_back() -> None:
    for n in range(1, 5):
        stops = StopStrings(["ABCDE", "AB", "x"] if n == 1 else ["ABCDE"])
        assert stops.push("1" + "ABCDE"[:n]).text == "1"
        assert stops.flush() == "ABCDE"[:n]
