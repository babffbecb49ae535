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
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from thaw.errors import ModelCorrupt
from thaw_runtime.weights.readable_segment import Segment
from thaw_runtime.weights.sidecars import CALL_MARKS, read_json, read_tokenizer

_NAMES: Final = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
"""The special tokens that every tokenizer of transformers has, in its order, which is that of new tokens."""
_FLAGS: Final = ("single_word", "lstrip", "rstrip", "normalized", "special")
_EXTRA: Final = "extra_special_tokens"
_ADDITIONAL: Final = "additional_special_tokens"
"""Special tokens without names: the name that transformers 5 has for the list, and the one that it had."""
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
    settings, begun = _settings(files), None
    if _may_be_llamas(files):
        begun = _as_llamas(files.vocabulary, settings.found)
    tokenizer, of_file, padding = begun or _as_it_is(files.vocabulary)
    usual = {} if begun is None else _OF_LLAMA
    if padding is not None:
        usual = {**usual, "pad_token": padding["pad_token"]}
    named = dict(_named(settings, usual))
    if added := _to_add(files, settings, of_file, named, has_those=begun is None):
        tokenizer.add_tokens(added)  # all at once: the tokenizer builds its tables anew for each call
    if settings.found.get("split_special_tokens"):
        tokenizer.encode_special_tokens = True
    return MadeTokenizer(tokenizer, {name: token.content for name, token in named.items()})


_Begun = tuple[Any, Mapping[int, AddedToken], Mapping[str, Any] | None]
"""A tokenizer, the added tokens of tokenizer.json by id, and the padding there."""


def _as_it_is(vocabulary: bytes) -> _Begun:
    """Raises ModelCorrupt."""
    try:
        tokenizer = Tokenizer.from_buffer(vocabulary)
    except Exception as e:  # tokenizers raises bare Exception
        raise ModelCorrupt(f"tokenizer.json cannot be read: {e}") from e
    padding = tokenizer.padding
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer, tokenizer.get_added_tokens_decoder(), padding


@dataclass(frozen=True, slots=True)
class _Settings:
    """tokenizer_config.json with what special_tokens_map.json says instead."""

    found: Mapping[str, Any]
    own: Mapping[str, Any]  # the special tokens of the model (``image_token``); these names count before those in found
    extra: Sequence[Any]  # special tokens without names
    plain: Collection[str]  # the special tokens that added_tokens.json's are compared with


def _settings(files: TokenizerFiles) -> _Settings:
    """What counts if several files name a token is an accident of transformers' order of reading, and followed here."""
    found = dict(files.config)
    if _ADDITIONAL in found and not found.get(_EXTRA):
        found[_EXTRA] = found.pop(_ADDITIONAL)
    names = [n for n, value in found.items() if n not in _NAMES and n.endswith("_token") and isinstance(value, str)]
    own = {name: found.pop(name) for name in names}
    if isinstance(found.get(_EXTRA), dict):
        own |= found.pop(_EXTRA)
    before = found.get(_EXTRA) or []
    found |= files.special_map
    if isinstance(files.special_map.get(_EXTRA), list):
        found[_EXTRA] = [*before, *(token for token in files.special_map[_EXTRA] if token not in before)]
    if isinstance(found.get(_EXTRA), dict):
        own |= found.pop(_EXTRA)
    objects = [value for n in _NAMES if isinstance(value := files.special_map.get(n), dict)]
    texts = [*(found.get(n) for n in _NAMES), *(found.get(_EXTRA) or ())]
    plain = {text for text in texts if isinstance(text, str)} | {value["content"] for value in objects}
    extra = found.get(_EXTRA, found.get(_ADDITIONAL))
    return _Settings(found, own, extra if isinstance(extra, list) else (), plain)


def _named(settings: _Settings, usual: Mapping[str, str]) -> Iterator[tuple[str, AddedToken]]:
    """The special tokens with names, in the order in which new ones get their ids."""
    values = {**usual, **settings.found, **settings.own}
    others = [n for n in settings.found if n not in _NAMES and n.endswith("_token")]
    for name in dict.fromkeys((*_NAMES, *others, *settings.own)):
        value = values.get(name)
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
    files: TokenizerFiles,
    settings: _Settings,
    of_file: Mapping[int, AddedToken],
    named: Mapping[str, AddedToken],
    *,
    has_those: bool,
) -> list[AddedToken]:
    """The tokens that the files list, in the order of their ids, and behind them the special tokens that are in no
    list.  Those are left out that the tokenizer has with the same flags; ``has_those``: it has those ``of_file``."""
    listed = {int(number): _token(token) for number, token in (files.config.get("added_tokens_decoder") or {}).items()}
    if "added_tokens_decoder" not in files.config:
        for content, number in files.added.items():
            is_special = content in settings.plain
            listed[int(number)] = AddedToken(content, special=is_special, normalized=not is_special)
        listed |= {number: _copy(token) for number, token in of_file.items()}
    present = {token.content: token for token in of_file.values()} if has_those else {}
    added = [token for _, token in sorted(listed.items(), key=lambda item: item[0])]
    known = present.keys() | {token.content for token in added}
    extra = [_token(one, special=True if isinstance(one, str) else None) for one in settings.extra]
    for token in (*named.values(), *extra):
        if token.content not in known and token not in added:
            added.append(token)
    special = {token.content for token in named.values()}
    for token in added:
        token.special = (token.special or token.content in special) and token.content not in CALL_MARKS
    times = Counter(token.content for token in added)
    return [t for t in added if t.content and (times[t.content] > 1 or present.get(t.content) != t)]


# ── the one class that transformers makes anew and whose texts Thaw's users would miss ───────────────────────────


def _may_be_llamas(files: TokenizerFiles) -> bool:
    named = str(files.config.get("tokenizer_class") or "").removesuffix("Fast")
    return files.model_type == "llama" and named == "LlamaTokenizer"


def _as_llamas(vocabulary: bytes, settings: Mapping[str, Any]) -> _Begun | None:
    """Return the tokenizer that transformers' LlamaTokenizer makes: tokenizer.json gives the vocabulary and what stands
    around a text.  Most of these files would put a space behind each special token, and this tokenizer does not.

    None if the file is not of SentencePiece's kind.  transformers would make such a tokenizer of it all the same, and
    spoil it; the check of the model says so.
    """
    plain = json.loads(vocabulary)
    model = plain["model"]
    if not model.get("byte_fallback"):
        return None
    pairs = [tuple(pair.split(" ") if isinstance(pair, str) else pair) for pair in model["merges"]]
    try:
        tokenizer = Tokenizer(models.BPE(vocab=model["vocab"], merges=pairs, fuse_unk=True, byte_fallback=True))
    except Exception as e:  # tokenizers raises bare Exception
        raise ModelCorrupt(f"tokenizer.json cannot be read: {e}") from e
    empty = {**plain, "added_tokens": [], "model": {**model, "vocab": {}, "merges": []}}
    tokenizer.post_processor = _as_it_is(json.dumps(empty).encode())[0].post_processor
    begins = settings.get("add_prefix_space")
    begins = True if begins is None else bool(begins)
    scheme = ("always" if settings.get("legacy", False) else "first") if begins else "never"
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme=scheme, split=False)
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*parts, decoders.Strip(content=" ", left=1)] if begins else parts)
    return tokenizer, {token["id"]: _token(token) for token in plain["added_tokens"]}, plain.get("padding")
