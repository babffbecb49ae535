"""The text side of a model: its tokenizer, chat template, end-of-sequence tokens and default sampling."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from relay.protocol.token_names import token_name
from thaw.checkpoints import fitness, pooling
from thaw.errors import BadParameter, BadRequest, ModelCorrupt, PlatformError
from thaw_runtime.llm.chat_template import ChatTemplate
from thaw_runtime.llm.text_stream import TextStream
from thaw_runtime.llm.tools import FORMATS, HERMES, ToolFormat
from thaw_runtime.shown import shown
from thaw_runtime.weights.readable_segment import Segment
from thaw_runtime.weights.sidecars import model_config, read_json, read_sidecar
from thaw_runtime.weights.tokenizer_files import made, read_tokenizer_files

CONTEXT_HINT: Final = "context_length_exceeded"

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


_TEMPLATES: Final = ("default", "tool_use")
"""The names of templates that requests choose: the second one if there are tools.  Others (``rag``) would have to be
named in a request."""
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
    tool_template: ChatTemplate | None = None  # the template of requests with tools, if the checkpoint has its own
    longest_token: int | None = None  # its characters; None: any text is tokenised, however long it is

    @property
    def tool_format(self) -> ToolFormat | None:
        """The format in which the model writes tool calls; None if its template writes them in an unknown form."""
        if self.tool_parser:
            return FORMATS[self.tool_parser]
        template = self.tool_template or self.template
        return HERMES if template is None else template.tool_format

    def check_length(self, text: str, most_tokens: int, what: str = "your prompt") -> None:
        """Refuse a text that cannot have so few tokens, before the time is spent to tokenise it.  vLLM's server has the
        same bound.  Raises BadRequest."""
        if self.longest_token is not None and len(text) > (most := most_tokens * self.longest_token):
            raise BadRequest(
                f"This model's maximum context length is {most_tokens} tokens. However, {what} contains {len(text)} "
                f"characters, and {most_tokens} tokens have {most} at most. Please reduce its length.",
                hint=CONTEXT_HINT,
            )

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
        most_tokens: int | None = None,
    ) -> tuple[int, ...]:
        """Raises BadRequest for a model without a chat template, and as check_length()."""
        template = (tools and self.tool_template) or self.template
        if template is None:
            raise BadRequest("this model has no chat template", hint="use /v1/completions")
        # The template itself writes the special tokens.
        render = template.render_open if goes_on else template.render
        prompt = render(messages, variables, tools)
        if most_tokens is not None:
            self.check_length(prompt, most_tokens)
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
    files = read_tokenizer_files(segment)
    if files is None:
        raise fitness.no_tokenizer("the checkpoint")
    read = made(files)
    config, generation = model_config(segment), read_json(segment, "generation_config.json")
    vocab_size = int(config.get("text_config", config).get("vocab_size", read.tokenizer.get_vocab_size()))
    templates = {
        name: ChatTemplate(source, read.special) for name, source in _template_sources(segment, files.config).items()
    }
    sampling = generation or {}
    return ModelText(
        tokenizer=read.tokenizer,
        template=templates.get("default"),
        eos_token_ids=_eos(config, generation, read.id_of("eos_token"), vocab_size),
        vocab_size=vocab_size,
        default_sampling={k: sampling[k] for k in DEFAULT_SAMPLING_KEYS if _is_number(sampling.get(k))},
        tool_parser=tool_parser,
        lowers_case=pooling.lowers_case(partial(read_sidecar, segment)),
        tool_template=templates.get("tool_use"),
        longest_token=max(map(len, read.tokenizer.get_vocab(with_added_tokens=True)), default=None),
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


def _eos(
    config: Mapping[str, Any], generation: Mapping[str, Any] | None, own: int | None, vocab_size: int
) -> tuple[int, ...]:
    """The end-of-sequence tokens: ``own``, which is the tokenizer's, and those of generation_config.json, as vLLM has
    them.  config.json counts only without that file, or where nothing else would end an answer.  Ids outside the
    vocabulary are left out: an engine that is asked to suppress such a token (``min_tokens``) would end.
    """
    found = _ids(config if generation is None else generation)
    known = tuple(t for t in dict.fromkeys(found if own is None else [own, *found]) if 0 <= t < vocab_size)
    return known or tuple(t for t in _ids(config) if 0 <= t < vocab_size)


def _ids(source: Mapping[str, Any]) -> list[int]:
    ids = source.get("eos_token_id")
    found = [ids] if isinstance(ids, int) else list(ids or [])
    return [t for t in dict.fromkeys(found) if type(t) is int]


def _template_sources(segment: Segment, config: Mapping[str, Any]) -> dict[str, str]:
    """The checkpoint's templates by name.  Files of their own hide those in tokenizer_config.json, as in transformers.
    chat_template.json is a processor's."""
    files = (
        ("default", "chat_template.jinja"),
        *((name, f"additional_chat_templates/{name}.jinja") for name in _TEMPLATES),
    )
    found: Any = {name: data.decode() for name, file in files if (data := read_sidecar(segment, file)) is not None}
    found = found or config.get("chat_template")
    if isinstance(found, list):
        found = {one["name"]: one["template"] for one in found}
    found = found or (read_json(segment, "chat_template.json") or {}).get("chat_template") or {}
    if isinstance(found, str):
        found = {"default": found}
    return {name: found[name] for name in _TEMPLATES if isinstance(found.get(name), str)}
