"""A client only gets whole characters, and nothing from a stop string on."""

from __future__ import annotations

import json
from collections import Counter
from contextlib import closing
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models

from relay.protocol.token_names import token_bytes
from tests.thaw_runtime.fake_descriptor_socket import FakeDescriptorSocket
from tests.thaw_runtime.models import read_segment, write_tiny_model
from thaw_runtime.llm.model_text import ModelText, load_model_text
from thaw_runtime.llm.text_stream import Detokenizer, StopStrings, TextStream
from thaw_runtime.weights import tokenizer_files


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


def test_half_a_character_is_named_by_its_bytes_and_every_token_by_its_own(tokenizer: Tokenizer) -> None:
    text = ModelText(tokenizer, None, (), 257, {})
    names = [text.token_text(token) for token in range(257)]
    assert len(set(names)) == 257
    assert [token_bytes(name) for name in names[:256]] == [bytes([n]) for n in range(256)]
    assert (names[0x61], names[0xF0], names[256]) == ("a", r"bytes:\xf0", "<end>")


def test_a_token_keeps_the_space_that_a_decoder_takes_from_the_first_one() -> None:
    vocabulary = {"<unk>": 0, "▁the": 1, "the": 2, "<0xE2>": 3, "<0x61>": 4}
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True, unk_token="<unk>"))
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    text = ModelText(made, None, (), 5, {})
    assert [text.token_text(n) for n in range(1, 5)] == [" the", "the", r"bytes:\xe2", "a"]


def loaded(model: Path) -> ModelText:
    with closing(FakeDescriptorSocket(model, model.parent / "socket")) as descriptor_socket:
        client, segment = read_segment(descriptor_socket)
        text = load_model_text(segment)
        segment.close()
        client.close()
    return text


def test_thousands_of_tokens_are_looked_up_and_added_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of these calls goes over all of the tokens."""
    calls = Counter[str]()

    class Counting:
        def __init__(self, made: Tokenizer) -> None:
            self._made = made

        def __getattr__(self, name: str) -> object:
            calls[name] += 1
            return getattr(self._made, name)

    class Opening:
        @staticmethod
        def from_buffer(data: bytes) -> Counting:
            return Counting(Tokenizer.from_buffer(data))

    monkeypatch.setattr(tokenizer_files, "Tokenizer", Opening)
    model = write_tiny_model(tmp_path / "model")
    named = {str(257 + n): {"content": f"<reserved {n}>", "special": True} for n in range(3000)}
    (model / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": named}))
    assert loaded(model).encode("<reserved 2999>") == (3256,)
    assert (calls["get_added_tokens_decoder"], calls["add_tokens"]) == (1, 1)


@pytest.mark.parametrize("eos", ["<|im_end|>", {"content": "<|im_end|>", "special": True}])
def test_tokens_that_only_the_tokenizers_config_names_are_the_models(tmp_path: Path, eos: object) -> None:
    """Many chat models keep their turns' marks there, and the one that ends an answer."""
    model = write_tiny_model(tmp_path / "model")
    marks = {str(257 + n): {"content": text, "special": True} for n, text in enumerate(("<|im_start|>", "<|im_end|>"))}
    (model / "tokenizer_config.json").write_text(
        json.dumps({"added_tokens_decoder": {"256": {"content": "<end>", "special": True}} | marks, "eos_token": eos})
    )
    (model / "config.json").write_text(json.dumps({"vocab_size": 259, "eos_token_id": 256}))
    text = loaded(model)
    assert text.encode("<|im_start|>a<|im_end|>") == (257, 97, 258)
    assert set(text.eos_token_ids) == {256, 258}
    stream = text.stream((), ())
    assert "".join(stream.push(token).text for token in (257, 97, 258)) == "a"


def test_the_marks_of_a_call_are_text_also_where_they_are_special_tokens(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "model")
    plain = json.loads((model / "tokenizer.json").read_text())
    for n, mark in enumerate(("<tool_call>", "</tool_call>")):
        plain["added_tokens"].append({**plain["added_tokens"][0], "id": 257 + n, "content": mark})
        plain["model"]["vocab"][mark] = 257 + n
    (model / "tokenizer.json").write_text(json.dumps(plain, indent=1))
    text = loaded(model)
    assert text.encode("<tool_call>a</tool_call>") == (257, 97, 258)
    stream = text.stream((), ())
    assert "".join(stream.push(token).text for token in (257, 97, 258, 256)) == "<tool_call>a</tool_call>"
