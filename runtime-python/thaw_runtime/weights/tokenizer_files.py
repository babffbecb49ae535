"""A checkpoint's tokenizer, made of its files as transformers 5 makes it (``TokenizersBackend.from_pretrained``).

::

    tokenizer.json ──────────▶ Tokenizer ─────────────────────────╮
    tokenizer_config.json ───▶ names of special tokens, settings ─┼─▶ tokens to add ─▶ Tokenizer, special tokens
    special_tokens_map.json, added_tokens.json: only beside ──────╯
        a tokenizer_config.json without added_tokens_decoder

The proxy and the grammars' process both read here, so that they agree.  transformers is too heavy for the proxy;
tests/thaw_runtime/test_text_conformance.py holds this module to it.  Two things are different on purpose: the marks of
a call are text (see read_tokenizer), and a class of transformers that makes its tokenizer anew, without most of
tokenizer.json, counts only if it is Llama's.  For the others the check of a model compares both
(thaw_runtime/engine/vllm/text_side.py).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers

from thaw.errors import ModelCorrupt
from thaw_runtime.weights.readable_segment import Segment
from thaw_runtime.weights.sidecars import CALL_MARKS, read_json, read_tokenizer

_NAMES: Final = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
"""The special tokens that every tokenizer of transformers has, in its order, which is that of new tokens."""
_FLAGS: Final = ("single_word", "lstrip", "rstrip", "normalized", "special")
_OF_LLAMA: Final = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
"""The special tokens that transformers' LlamaTokenizer has where the checkpoint names none."""


@dataclass(frozen=True, slots=True)
class TokenizerFiles:
    """The content of the files.  ``vocabulary`` is tokenizer.json."""

    vocabulary: bytes
    config: Mapping[str, Any]  # tokenizer_config.json
    special_map: Mapping[str, Any]
    added: Mapping[str, int]  # added_tokens.json
    model_type: str = ""  # config.json's

    def dumped(self) -> bytes:
        """Everything but the vocabulary, for another process."""
        return json.dumps([self.config, self.special_map, self.added, self.model_type]).encode()

    @classmethod
    def loaded(cls, vocabulary: bytes, dumped: bytes) -> TokenizerFiles:
        return cls(vocabulary, *json.loads(dumped))


@dataclass(frozen=True, slots=True)
class MadeTokenizer:
    """``special`` has the names and texts of the special tokens, as templates see them."""

    tokenizer: Any
    special: Mapping[str, str]

    def id_of(self, name: str) -> int | None:
        text = self.special.get(name)
        found: int | None = None if text is None else self.tokenizer.token_to_id(text)
        return found


def read_tokenizer_files(segment: Segment) -> TokenizerFiles | None:
    """None when the checkpoint has no tokenizer.json.  Raises ModelCorrupt."""
    vocabulary = read_tokenizer(segment)
    if vocabulary is None:
        return None
    config = read_json(segment, "tokenizer_config.json") or {}
    is_legacy = "added_tokens_decoder" not in config
    special_map, added = (
        (read_json(segment, name) or {}) if is_legacy else {}
        for name in ("special_tokens_map.json", "added_tokens.json")
    )
    model_type = (read_json(segment, "config.json") or {}).get("model_type")
    return TokenizerFiles(vocabulary, config, special_map, added, str(model_type or ""))


def made(files: TokenizerFiles) -> MadeTokenizer:
    """Raises ModelCorrupt, and AttributeError, KeyError, TypeError or ValueError for a value of an unexpected type."""
    try:
        tokenizer = Tokenizer.from_buffer(files.vocabulary)
    except Exception as e:  # tokenizers raises bare Exception
        raise ModelCorrupt(f"tokenizer.json cannot be read: {e}") from e
    settings = _settings(files)
    if tokenizer.padding is not None:
        settings.setdefault("pad_token", tokenizer.padding["pad_token"])
    if _is_llamas(files, tokenizer):
        settings = _OF_LLAMA | settings
        _become_llamas(tokenizer, settings)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    named = dict(_named(settings))
    extra = settings.get("extra_special_tokens")
    others = [_token(one, special=True) for one in (extra if isinstance(extra, list) else [])]
    if added := _to_add(files, tokenizer.get_added_tokens_decoder(), named, others):
        tokenizer.add_tokens(added)  # all at once: the tokenizer builds its tables anew for each call
    if settings.get("split_special_tokens"):
        tokenizer.encode_special_tokens = True
    return MadeTokenizer(tokenizer, {name: token.content for name, token in named.items()})


def _settings(files: TokenizerFiles) -> dict[str, Any]:
    """tokenizer_config.json with what the legacy files add to it."""
    found = dict(files.config)
    if "additional_special_tokens" in found and not found.get("extra_special_tokens"):
        found["extra_special_tokens"] = found.pop("additional_special_tokens")
    found |= files.special_map
    if "additional_special_tokens" in found and "extra_special_tokens" not in found:
        found["extra_special_tokens"] = found.pop("additional_special_tokens")
    extra = found.get("extra_special_tokens")
    if isinstance(extra, dict):  # names of the model's own
        found |= extra
    elif extra and isinstance(own := files.config.get("extra_special_tokens"), list):
        found["extra_special_tokens"] = [*own, *(token for token in extra if token not in own)]
    return found


def _named(settings: Mapping[str, Any]) -> Iterator[tuple[str, AddedToken]]:
    """The special tokens with names: those that all tokenizers have, and those of the model (``image_token``)."""
    extra = settings.get("extra_special_tokens")
    own = extra if isinstance(extra, dict) else {}
    others = [n for n in settings if n not in _NAMES and (n.endswith("_token") or n in own)]
    for name in (*_NAMES, *others):
        value = settings.get(name)
        if isinstance(value, str) or (isinstance(value, dict) and "content" in value):
            yield name, _token(value, special=True)


def _token(value: str | Mapping[str, Any], special: bool | None = None) -> AddedToken:
    """A token as one of the files writes it.  A flag that it leaves out is the library's default."""
    plain = {"content": value} if isinstance(value, str) else value
    flags = {name: bool(plain[name]) for name in _FLAGS if plain.get(name) is not None}
    if special is not None:
        flags["special"] = special
    return AddedToken(plain["content"], **flags)


def _copy(token: AddedToken) -> AddedToken:
    return AddedToken(token.content, **{name: getattr(token, name) for name in _FLAGS})


def _to_add(
    files: TokenizerFiles, known: Mapping[int, AddedToken], named: Mapping[str, AddedToken], extra: list[AddedToken]
) -> list[AddedToken]:
    """The tokens that the files name beside those of tokenizer.json, or with other flags, in the order of their ids;
    behind them the special tokens that are in no list."""
    listed = {int(number): _token(token) for number, token in (files.config.get("added_tokens_decoder") or {}).items()}
    special = {token.content for token in named.values()}
    if "added_tokens_decoder" not in files.config:
        is_special = special | {token.content for token in extra}
        for content, number in files.added.items():
            listed[int(number)] = _token(content, special=content in is_special)
        listed |= {number: _copy(token) for number, token in known.items()}
    of_file = {token.content: token for token in known.values()}
    added = {token.content: token for _, token in sorted(listed.items(), key=lambda item: item[0])}
    for token in (*named.values(), *extra):
        if token.content not in added and token.content not in of_file:
            added[token.content] = token
    for token in added.values():
        if token.content in special:
            token.special = True
        if token.content in CALL_MARKS:
            token.special = False
    return [token for token in added.values() if token.content and of_file.get(token.content) != token]


# ── the one class that transformers makes anew and whose texts Thaw's users would miss ───────────────────────────


def _is_llamas(files: TokenizerFiles, tokenizer: Any) -> bool:
    """Whether transformers takes the vocabulary alone from tokenizer.json, and the rest from its LlamaTokenizer.  It
    would do so with any file whose config names that class; one that is not of SentencePiece's kind would be spoilt,
    and the check of the model says so."""
    named = str(files.config.get("tokenizer_class") or "").removesuffix("Fast")
    is_fitting = bool(getattr(tokenizer.model, "byte_fallback", False))  # only BPE has it
    return files.model_type == "llama" and named == "LlamaTokenizer" and is_fitting


def _become_llamas(tokenizer: Any, settings: Mapping[str, Any]) -> None:
    """The space before the first word: tokenizer.json of that time puts one behind each special token, too."""
    begins = settings.get("add_prefix_space")
    begins = True if begins is None else bool(begins)
    scheme = ("always" if settings.get("legacy", False) else "first") if begins else "never"
    tokenizer.model.fuse_unk = True
    tokenizer.model.unk_token = None
    tokenizer.normalizer = None
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme=scheme, split=False)
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*parts, decoders.Strip(content=" ", left=1)] if begins else parts)
