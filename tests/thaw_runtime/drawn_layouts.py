"""Layouts of a tokenizer drawn over what its files may say of tokens: the same token in several files, with other flags,
under several names, in lists of both spellings."""

from __future__ import annotations

import random
from typing import Any, Final

from tests.thaw_runtime.tokenizer_cases import Files, byte_level, files, sentencepiece, token

_CONTENTS: Final = [
    "<s>",
    "</s>",
    "<|im_end|>",
    "<|im_start|>",
    "<extra>",
    "<think>",
    "<pad>",
    "<unk>",
    "<img>",
    "hello",
    "he",
]
_NAMES: Final = [f"{n}_token" for n in ("bos", "eos", "unk", "pad", "sep", "cls", "mask", "image", "think")]
_FLAGS: Final = ("single_word", "lstrip", "rstrip", "normalized", "special")
_SWITCHES: Final = ("split_special_tokens", "add_bos_token", "add_eos_token", "add_prefix_space", "legacy")


def layout(draw: random.Random) -> Files:
    is_bytes, kind = (
        draw.random() < 0.3,
        draw.choice(("PreTrainedTokenizerFast", "LlamaTokenizer", "LlamaTokenizerFast")),
    )
    contents = [c for c in _CONTENTS if is_bytes or c not in ("<s>", "</s>", "<unk>")]
    listed = [
        token(c, **{"special": draw.random() < 0.6, **_flags(draw)}) for c in draw.sample(contents, draw.randint(0, 4))
    ]
    tokenizer = byte_level(*listed) if is_bytes else sentencepiece(*listed)
    if draw.random() < 0.2:
        tokenizer["post_processor"] = None
    config = _config(draw) | {"tokenizer_class": "PreTrainedTokenizerFast" if is_bytes else kind}
    next_id = len(tokenizer["model"]["vocab"]) + len(listed)
    if draw.random() < 0.5:
        config["added_tokens_decoder"] = _decoder(draw, tokenizer["added_tokens"], next_id)
    others: dict[str, Any] = {}
    if draw.random() < 0.4:
        named = {n: value for n, value in _config(draw).items() if n in _NAMES and value is not None}
        others["special_tokens_map"] = {n: _untyped(value) for n, value in named.items()}
    if draw.random() < 0.3:
        others["added_tokens"] = {c: next_id + i for i, c in enumerate(draw.sample(_CONTENTS, draw.randint(1, 3)))}
    return files(tokenizer, config, **others)


def _config(draw: random.Random) -> dict[str, Any]:
    made: dict[str, Any] = {
        n: None if draw.random() < 0.15 else _token(draw) for n in draw.sample(_NAMES, draw.randint(0, 5))
    }
    if draw.random() < 0.3:
        made["additional_special_tokens"] = [_token(draw) for _ in range(draw.randint(0, 3))]
    if draw.random() < 0.2:
        made["extra_special_tokens"] = [_token(draw) for _ in range(draw.randint(0, 3))]
    elif draw.random() < 0.2:
        made["extra_special_tokens"] = {draw.choice(_NAMES): draw.choice(_CONTENTS) for _ in range(2)}
    return made | {n: draw.random() < 0.5 for n in _SWITCHES if draw.random() < 0.15}


def _decoder(draw: random.Random, listed: list[dict[str, Any]], next_id: int) -> dict[str, Any]:
    """Most tokens of tokenizer.json, some with other flags, and a few more."""
    kept = [one for one in listed if draw.random() < 0.8]
    made: dict[str, Any] = {
        str(one["id"]): {n: value for n, value in one.items() if n != "id"}
        | (_flags(draw) if draw.random() < 0.3 else {})
        for one in kept
    }
    return made | {
        str(next_id + i): {"content": draw.choice(_CONTENTS), **_flags(draw)} for i in range(draw.randint(0, 3))
    }


def _token(draw: random.Random) -> str | dict[str, Any]:
    content = draw.choice(_CONTENTS)
    return content if draw.random() < 0.6 else {"__type": "AddedToken", "content": content, **_flags(draw)}


def _flags(draw: random.Random) -> dict[str, bool]:
    return {name: draw.random() < 0.3 for name in _FLAGS if draw.random() < 0.8}


def _untyped(value: str | dict[str, Any]) -> str | dict[str, Any]:
    return value if isinstance(value, str) else {n: flag for n, flag in value.items() if n != "__type"}
