"""The text side of a model: its tokenizer, chat template, end-of-sequence tokens and default sampling."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from typing import Any, Final

from tokenizers import AddedToken, Tokenizer

from relay.protocol.token_names import token_name
from thaw.checkpoints import fitness, pooling
from thaw.errors import BadParameter, BadRequest, ModelCorrupt, PlatformError
from thaw_runtime.llm.chat_template import ChatTemplate
from thaw_runtime.llm.text_stream import TextStream
from thaw_runtime.llm.tools import FORMATS, HERMES, ToolFormat
from thaw_runtime.shown import shown
from thaw_runtime.weights.readable_segment import Segment
from thaw_runtime.weights.sidecars import model_config, read_json, read_sidecar, read_tokenizer

DEFAULT_SAMPLING_KEYS = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "max_new_tokens",
)
"""The keys of generation_config.json that are defaults for a request, as with vLLM's ``--generation-config auto``.
As in vLLM, ``do_sample`` is not among them, because it is often false in a checkpoint although nobody chose it.
"""


_FILL_IN: Final = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen-Coder, CodeGemma
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, Granite
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek-Coder
)
"""The special tokens for filling in text: before the prefix, before the suffix, and before the answer.  A model that
has all three was trained for this."""


_TOKEN_FLAGS: Final = ("single_word", "lstrip", "rstrip", "normalized", "special")
_BYTE: Final = re.compile("<0x([0-9A-F]{2})>")
_PLAIN: Final = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
_ALPHABET: Final = {chr(b): b for b in _PLAIN} | {
    chr(256 + n): b for n, b in enumerate(sorted(set(range(256)) - set(_PLAIN)))
}
"""The characters by which byte-level vocabularies write bytes, as GPT-2 did."""


@dataclass(frozen=True, slots=True)
class ModelText:
    tokenizer: Any
    template: ChatTemplate | None
    eos_token_ids: tuple[int, ...]
    vocab_size: int
    default_sampling: Mapping[str, float]
    tool_parser: str = ""  # as the function's config names it
    lowers_case: bool = False  # an embedding model reads its texts in lower case

    @property
    def tool_format(self) -> ToolFormat | None:
        """The format in which the model writes tool calls; None if its template writes them in an unknown form."""
        if self.tool_parser:
            return FORMATS[self.tool_parser]
        return HERMES if self.template is None else self.template.tool_format

    def encode(self, text: str, *, add_special_tokens: bool = True) -> tuple[int, ...]:
        return tuple(self.tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)

    def encode_each(self, texts: Sequence[str]) -> list[tuple[int, ...]]:
        """Return the token ids of each text, as an embedding model reads it."""
        found = self.tokenizer.encode_batch([t.lower() for t in texts] if self.lowers_case else list(texts))
        return [tuple(one.ids) for one in found]

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text with its special tokens, so that encoding it gives these tokens again."""
        return str(self.tokenizer.decode(list(token_ids), skip_special_tokens=False))

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        variables: Mapping[str, Any],
        tools: Sequence[Any] = (),
        *,
        goes_on: bool = False,
    ) -> tuple[int, ...]:
        """Raises BadRequest for a model without a chat template."""
        if self.template is None:
            raise BadRequest("this model has no chat template", hint="use /v1/completions")
        # The template itself writes the special tokens.
        render = self.template.render_open if goes_on else self.template.render
        prompt = render(messages, variables, tools)
        return tuple(self.tokenizer.encode(prompt, add_special_tokens=False).ids)

    def fill_in(self, prefix: object, suffix: str) -> tuple[int, ...]:
        """Return the prompt whose answer belongs between prefix and suffix.  Raises BadParameter for a model that was
        not trained for this."""
        if not isinstance(prefix, str):
            raise BadParameter("suffix", "a text is filled in between two texts: send the prompt as one")
        for begin, hole, end in _FILL_IN:
            if all(self.tokenizer.token_to_id(mark) is not None for mark in (begin, hole, end)):
                return self.encode(f"{begin}{prefix}{hole}{suffix}{end}")
        raise BadParameter("suffix", "this model has no tokens for a text that is filled in: leave suffix out")

    def stream(self, prompt_token_ids: Sequence[int], stops: Sequence[str]) -> TextStream:
        return TextStream(self.tokenizer, prompt_token_ids, stops)

    def token_text(self, token_id: int) -> str:
        """The text of a single token, for logprobs; special tokens are included.

        Half a character has no text: its name is its bytes as OpenAI writes them (relay/protocol/token_names.py).
        """
        text = str(self.tokenizer.decode([token_id], skip_special_tokens=False))
        piece = self.tokenizer.id_to_token(token_id)
        if "\ufffd" in text:
            return token_name(_bytes_of(piece or "") or text.encode())
        # a decoder takes the space from the first token, and here each one is the first
        return f" {text}" if piece and piece.startswith("▁") and not text.startswith(" ") else text


def _bytes_of(piece: str) -> bytes:
    """The bytes of a token as its vocabulary has it: in GPT-2's alphabet, or as ``<0xE2>``; nothing for others."""
    if fallback := _BYTE.fullmatch(piece):
        return bytes([int(fallback[1], 16)])
    return bytes(_ALPHABET[c] for c in piece) if all(c in _ALPHABET for c in piece) else b""


def load_model_text(segment: Segment, tool_parser: str = "") -> ModelText:
    """Load the text side as soon as the sidecars have arrived.  Raises ModelUnsupported or ModelCorrupt."""
    try:
        return _load(segment, tool_parser)
    except (AttributeError, KeyError, TypeError, ValueError) as e:  # a value has an unexpected type
        raise ModelCorrupt(f"the checkpoint's tokenizer, template or config cannot be read: {e}") from e


def _load(segment: Segment, tool_parser: str) -> ModelText:
    data = read_tokenizer(segment)
    if data is None:
        raise fitness.no_tokenizer("the checkpoint")
    try:
        tokenizer = Tokenizer.from_buffer(data)
    except Exception as e:  # tokenizers raises bare Exception
        raise ModelCorrupt(f"tokenizer.json cannot be read: {e}") from e
    tokenizer.no_truncation()
    tokenizer.no_padding()
    own = read_json(segment, "tokenizer_config.json") or {}
    _add_tokens(tokenizer, own.get("added_tokens_decoder") or {})
    config = model_config(segment)
    generation = read_json(segment, "generation_config.json") or {}
    vocab_size = int(config.get("text_config", config).get("vocab_size", tokenizer.get_vocab_size()))
    return ModelText(
        tokenizer=tokenizer,
        template=_template(segment, own),
        eos_token_ids=_eos(config, generation, tokenizer.token_to_id(_content(own.get("eos_token") or "")), vocab_size),
        vocab_size=vocab_size,
        default_sampling={k: generation[k] for k in DEFAULT_SAMPLING_KEYS if _is_number(generation.get(k))},
        tool_parser=tool_parser,
        lowers_case=pooling.lowers_case(partial(read_sidecar, segment)),
    )


def notes_on(text: ModelText) -> tuple[str, ...]:
    """Return sentences on limitations of the model that do not keep it from starting."""
    if text.template is None:
        return ("the model has no chat template, so it answers /v1/completions and no chat",)
    try:
        text.template.render([{"role": "user", "content": "Hello"}], {})
    except BadRequest as e:
        if isinstance(e.__cause__, MemoryError):
            raise PlatformError("the chat template takes more memory than a check may") from e
        return (f"the chat template refuses a plain question ({shown(e.message)}), so chat requests will fail",)
    if text.template.refuses_system:
        return (
            f"the chat template takes no system message ({shown(text.template.refuses_system)}): they will be a 400",
        )
    return ()


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _add_tokens(tokenizer: Tokenizer, named: Mapping[str, Mapping[str, Any]]) -> None:
    """Add the tokens that tokenizer_config.json names beside those of tokenizer.json, as transformers does.

    All at once: some models name thousands, and the tokenizer builds its tables anew for each call.
    """
    known = {number: token.content for number, token in tokenizer.get_added_tokens_decoder().items()} if named else {}
    added = [
        AddedToken(token["content"], **{name: bool(token.get(name)) for name in _TOKEN_FLAGS})
        for number, token in sorted(((int(number), token) for number, token in named.items()), key=itemgetter(0))
        if known.get(number) != token["content"]
    ]
    if added:
        tokenizer.add_tokens(added)


def _eos(config: Mapping[str, Any], generation: Mapping[str, Any], own: int | None, vocab_size: int) -> tuple[int, ...]:
    """The end-of-sequence tokens; ``own`` is the tokenizer's.  Ids outside the vocabulary are left out: an engine that
    is asked to suppress such a token (``min_tokens``) would end.
    """
    found: list[int] = [] if own is None else [own]
    for source in (config, generation):
        ids = source.get("eos_token_id")
        found.extend([ids] if isinstance(ids, int) else ids or [])
    return tuple(t for t in dict.fromkeys(found) if type(t) is int and 0 <= t < vocab_size)


def _template(segment: Segment, config: Mapping[str, Any]) -> ChatTemplate | None:
    source = _template_source(segment, config)
    if source is None:
        return None
    special = {
        name: _content(config[name])
        for name in ("bos_token", "eos_token", "pad_token", "unk_token")
        if config.get(name)
    }
    return ChatTemplate(source, special)


def _template_source(segment: Segment, config: Mapping[str, Any]) -> str | None:
    data = read_sidecar(segment, "chat_template.jinja")
    if data is not None:
        return data.decode()
    found = config.get("chat_template")
    if isinstance(found, list):  # the checkpoint has several named templates
        found = next((t.get("template") for t in found if t.get("name") == "default"), None)
    if found is None:
        found = (read_json(segment, "chat_template.json") or {}).get("chat_template")
    return found if isinstance(found, str) else None


def _content(token: str | Mapping[str, Any]) -> str:
    return token if isinstance(token, str) else str(token.get("content", ""))
