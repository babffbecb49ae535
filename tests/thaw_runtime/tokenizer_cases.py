"""Tiny tokenizers of each kind, in the layouts in which checkpoints ship them: which file names what.

Each layout is the content of a checkpoint's small files.  test_text_conformance.py reads each with Thaw and with vLLM.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from tests.thaw_runtime.models import byte_characters

Files = dict[str, Any]

N_MODEL: Final = 4096
"""The vocabulary of the models, which have room for more tokens than their tokenizers."""
TEXTS: Final = (
    "",
    "hello world",
    " two  spaces \na\nb\n\nc ",
    "naïve 世界 🙂",
    "He said: it 's n't , ok ?",
    "<s>hello</s> world<|im_end|>\n",
    "<|im_start|>user\nhello<|im_end|>",
    "x<think> y </think>z<extra>",
    "[CLS] hello [SEP][PAD][MASK] <img><pad><unk><s>",
    "hellohello 12345 HELLO",
    "\n<s> \nhello",
)
WORDS: Final = ("hello", "world", "he", "llo", "user", "ok", "12", "th", "tU")


def token(content: str, number: int | None = None, **flags: bool) -> dict[str, Any]:
    made = {
        "content": content,
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": True,
    }
    return {**made, **flags} | ({} if number is None else {"id": number})


def _whole(model: Mapping[str, Any], added: list[dict[str, Any]], **parts: Any) -> Files:
    empty = dict.fromkeys(("truncation", "padding", "normalizer", "pre_tokenizer", "post_processor", "decoder"))
    return {"version": "1.0", **empty, **parts, "added_tokens": added, "model": dict(model)}


def _merged(vocabulary: list[str], words: list[str]) -> list[list[str]]:
    """The merges that make these words of characters, left to right; the vocabulary grows by each step."""
    merges = []
    for word in words:
        left = word[0]
        for char in word[1:]:
            if [left, char] not in merges:
                merges.append([left, char])
            left += char
            if left not in vocabulary:
                vocabulary.append(left)
    return merges


def _bpe(vocabulary: list[str], words: list[str], **others: Any) -> dict[str, Any]:
    merges = _merged(vocabulary, words)
    plain = {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None}
    plain |= {"end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False}
    return {**plain, **others, "vocab": {piece: i for i, piece in enumerate(vocabulary)}, "merges": merges}


def _around(begin: str, end: str, ids: Mapping[str, int]) -> dict[str, Any]:
    """A post-processor that puts a token before each text, and one behind it."""
    pieces: list[dict[str, Any]] = [{"Sequence": {"id": "A", "type_id": 0}}]
    if begin:
        pieces.insert(0, {"SpecialToken": {"id": begin, "type_id": 0}})
    if end:
        pieces.append({"SpecialToken": {"id": end, "type_id": 0}})
    pair = [*pieces, {"Sequence": {"id": "B", "type_id": 1}}]
    special = {t: {"id": t, "ids": [ids[t]], "tokens": [t]} for t in (begin, end) if t}
    return {"type": "TemplateProcessing", "single": pieces, "pair": pair, "special_tokens": special}


_QWENS: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def byte_level(*added: dict[str, Any], n_more: int = 0, **parts: Any) -> Files:
    """As GPT-2, Llama 3 and Qwen have it.  ``n_more`` words have no merges, so no text has them."""
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    split = {"type": "Split", "pattern": {"Regex": _QWENS}, "behavior": "Isolated", "invert": False}
    pre = {"type": "Sequence", "pretokenizers": [split, level]}
    model = _bpe(byte_characters(), [*WORDS, *(f"Ġ{word}" for word in WORDS)])
    model["vocab"] |= {f"more{i}": len(model["vocab"]) + i for i in range(n_more)}
    n = len(model["vocab"])
    numbered = [{**one, "id": n + i} if "id" not in one else one for i, one in enumerate(added)]
    return _whole(model, numbered, **{"pre_tokenizer": pre, "decoder": level, "normalizer": {"type": "NFC"}} | parts)


N_BYTES: Final = len(byte_level()["model"]["vocab"])

_BYTES: Final = [f"<0x{n:02X}>" for n in range(256)]
_LETTERS: Final = [*"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789.,:?'!<>|_[]/▁", "\n", "▁▁"]
_REPLACE: Final = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
_BACK: Final = [
    {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
    {"type": "ByteFallback"},
    {"type": "Fuse"},
]
_STRIP: Final = {"type": "Strip", "content": " ", "start": 1, "stop": 0}


def sentencepiece(*added: dict[str, Any], **parts: Any) -> Files:
    """As Llama 2 has it: a space is a character of words, and an unknown character is its bytes."""
    first = ["<unk>", "<s>", "</s>"]
    model = _bpe(
        [*first, *_BYTES, *_LETTERS],
        [f"▁{word}" for word in WORDS] + list(WORDS),
        unk_token="<unk>",
        fuse_unk=True,
        byte_fallback=True,
    )
    tokens = [token(content, i) for i, content in enumerate(first)]
    n = len(model["vocab"])
    tokens += [{**one, "id": n + i} for i, one in enumerate(added)]
    usual: dict[str, Any] = {
        "normalizer": {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "▁"}, _REPLACE]},
        "decoder": {"type": "Sequence", "decoders": [*_BACK, _STRIP]},
        "post_processor": _around("<s>", "", model["vocab"]),
    }
    return _whole(model, tokens, **usual | parts)


def metaspace(*added: dict[str, Any]) -> Files:
    """As sentencepiece's files are today."""
    first = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": False}
    return sentencepiece(*added, normalizer=None, pre_tokenizer=first)


def gemma() -> Files:
    split = {"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": False}
    decoder = {"type": "Sequence", "decoders": _BACK}
    first = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>"]
    model = _bpe([*first, *_BYTES, *_LETTERS], list(WORDS), unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    post = _around("<bos>", "", model["vocab"])
    tokens = [token(content, i) for i, content in enumerate(first)]
    return _whole(model, tokens, normalizer=_REPLACE, pre_tokenizer=split, decoder=decoder, post_processor=post)


def word_piece() -> Files:
    first = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    vocabulary = [*first, *"abcdefghijklmnopqrstuvwxyz0123456789.,:?'!<>|[]/", *WORDS]
    vocabulary += [f"##{piece}" for piece in vocabulary[len(first) :]]
    ids = {piece: i for i, piece in enumerate(vocabulary)}
    model = {
        "type": "WordPiece",
        "unk_token": "[UNK]",
        "continuing_subword_prefix": "##",
        "max_input_chars_per_word": 100,
        "vocab": ids,
    }
    normalizer = {
        "type": "BertNormalizer",
        "clean_text": True,
        "handle_chinese_chars": True,
        "strip_accents": None,
        "lowercase": True,
    }
    return _whole(
        model,
        [token(content, i) for i, content in enumerate(first)],
        normalizer=normalizer,
        pre_tokenizer={"type": "BertPreTokenizer"},
        decoder={"type": "WordPiece", "prefix": "##", "cleanup": True},
        post_processor=_around("[CLS]", "[SEP]", ids),
    )


def unigram() -> Files:
    first = ["<s>", "<pad>", "</s>", "<unk>"]
    pieces = [*first, *_LETTERS, *(f"▁{word}" for word in WORDS), *WORDS]
    space = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True}
    model = {
        "type": "Unigram",
        "unk_id": 3,
        "vocab": [[p, -0.1 * i] for i, p in enumerate(pieces)],
        "byte_fallback": False,
    }
    ids = {piece: i for i, piece in enumerate(pieces)}
    tokens = [token(content, i) for i, content in enumerate(first)]
    return _whole(model, tokens, pre_tokenizer=space, decoder=space, post_processor=_around("<s>", "</s>", ids))


def files(tokenizer: Files, config: Any = None, model_type: str = "llama", **others: Any) -> Files:
    """The files of a layout.  ``others`` are files by their names without ``.json``."""
    made: Files = {
        "tokenizer.json": tokenizer,
        "config.json": {"model_type": model_type, "vocab_size": N_MODEL, "eos_token_id": None},
    }
    if config is not None:
        made["tokenizer_config.json"] = config
    return made | {f"{name}.json": content for name, content in others.items()}


_END: Final = token("<|im_end|>")
_MARKS: Final = [token("<|im_start|>"), _END]
_FAST: Final = {"tokenizer_class": "PreTrainedTokenizerFast"}
_DECODER: Final = {str(N_BYTES + i): token(c) for i, c in enumerate(("<|im_start|>", "<|im_end|>", "<s>"))}
_LLAMA: Final = {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}

_GPT: Final = [f"{name}_token" for name in ("bos", "eos", "unk", "pad", "sep", "cls", "mask")]
_LEVEL: Final = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
_DIGITS: Final = {"type": "Digits", "individual_digits": True}

LAYOUTS: Final[dict[str, Files]] = {
    "tokenizer.json alone": files(byte_level(*_MARKS)),
    "an end that the config names": files(byte_level(*_MARKS), {**_FAST, "eos_token": "<|im_end|>", "pad_token": None}),
    "tokens that the config lists": files(
        byte_level(), {**_FAST, "added_tokens_decoder": _DECODER, "eos_token": "<|im_end|>", "bos_token": "<s>"}
    ),
    "other flags in the config's list": files(
        byte_level(token("<think>", special=False), token("</think>"), *_MARKS),
        {
            **_FAST,
            "added_tokens_decoder": {
                str(N_BYTES): token("<think>", lstrip=True, rstrip=True),
                str(N_BYTES + 1): token("</think>", special=False),
            },
        },
    ),
    "an end that the list calls no special token": files(
        byte_level(),
        {
            **_FAST,
            "added_tokens_decoder": {str(N_BYTES): token("<|im_end|>", special=False)},
            "eos_token": "<|im_end|>",
        },
    ),
    "flags that the list leaves out": files(
        byte_level(), {**_FAST, "added_tokens_decoder": {str(N_BYTES): {"content": "<extra>"}}}
    ),
    "a token of the config that no list has": files(
        byte_level(*_MARKS), {**_FAST, "eos_token": "<|im_end|>", "pad_token": "<pad>", "bos_token": "hello"}
    ),
    "AddedToken objects": files(
        byte_level(*_MARKS),
        {
            **_FAST,
            "eos_token": {"__type": "AddedToken", **_END},
            "bos_token": {"__type": "AddedToken", **token("<s>", lstrip=True)},
        },
    ),
    "special_tokens_map.json": files(
        byte_level(*_MARKS),
        _FAST,
        special_tokens_map={"eos_token": {k: v for k, v in _END.items() if k != "special"}, "pad_token": "<pad>"},
    ),
    "special_tokens_map.json against the config": files(
        byte_level(*_MARKS), {**_FAST, "eos_token": "<|im_start|>"}, special_tokens_map={"eos_token": "<|im_end|>"}
    ),
    "special_tokens_map.json beside a list": files(
        byte_level(*_MARKS),
        {**_FAST, "added_tokens_decoder": _DECODER, "eos_token": "<|im_start|>"},
        special_tokens_map={"eos_token": "<|im_end|>"},
    ),
    "added_tokens.json": files(
        byte_level(),
        {**_FAST, "eos_token": "<|im_end|>"},
        added_tokens={"<|im_end|>": N_BYTES + 1, "<extra>": N_BYTES, "<|im_start|>": N_BYTES + 2},
    ),
    "added_tokens.json beside a list": files(
        byte_level(), {**_FAST, "added_tokens_decoder": _DECODER}, added_tokens={"<extra>": N_BYTES + 3}
    ),
    "an end in tokenizer.json that is no special token": files(
        byte_level(token("<|im_end|>", special=False)), {**_FAST, "eos_token": "<|im_end|>"}
    ),
    "additional special tokens": files(
        byte_level(*_MARKS), {**_FAST, "additional_special_tokens": ["<extra>", "<|im_start|>", "hello"]}
    ),
    "extra special tokens in a list": files(
        byte_level(*_MARKS), {**_FAST, "extra_special_tokens": ["<extra>"], "additional_special_tokens": ["<img>"]}
    ),
    "extra special tokens with names": files(
        byte_level(*_MARKS), {**_FAST, "extra_special_tokens": {"image_token": "<img>", "pad_token": "<pad>"}}
    ),
    "a special token of the model": files(byte_level(*_MARKS), {**_FAST, "image_token": "<img>", "think_token": None}),
    "additional special tokens in both files": files(
        byte_level(*_MARKS),
        {**_FAST, "additional_special_tokens": ["<extra>"]},
        special_tokens_map={"additional_special_tokens": ["<img>"]},
    ),
    "special tokens that are split": files(
        byte_level(*_MARKS), {**_FAST, "split_special_tokens": True, "eos_token": "<|im_end|>"}
    ),
    "tokens that strip, or are whole words": files(
        byte_level(
            token("<s>", lstrip=True),
            token("<extra>", rstrip=True),
            token("he", single_word=True, special=False),
            token("HELLO", normalized=True, special=False),
        )
    ),
    "a begin of text that a switch asks for": files(
        byte_level(*_MARKS),
        {**_FAST, "bos_token": "<|im_start|>", "add_bos_token": True, "eos_token": "<|im_end|>", "add_eos_token": True},
    ),
    "a begin of text that a switch forbids": files(sentencepiece(), {**_LLAMA, "add_bos_token": False}),
    "an end of each text": files(
        sentencepiece(post_processor=_around("<s>", "</s>", {"<s>": 1, "</s>": 2})),
        {**_FAST, "bos_token": "<s>", "eos_token": "</s>"},
    ),
    "padding and truncation in tokenizer.json": files(
        byte_level(
            *_MARKS,
            padding={
                "strategy": {"Fixed": 9},
                "direction": "Left",
                "pad_to_multiple_of": None,
                "pad_id": 0,
                "pad_type_id": 0,
                "pad_token": "!",
            },
            truncation={"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0},
        ),
        _FAST,
    ),
    "spaces that are cleaned up": files(byte_level(*_MARKS), {**_FAST, "clean_up_tokenization_spaces": True}),
    "a prefix space that the config asks for": files(byte_level(*_MARKS), {**_FAST, "add_prefix_space": True}),
    "the repair of Mistral's expression, which is for large vocabularies": files(
        byte_level(*_MARKS), {**_FAST, "fix_mistral_regex": True}, model_type="mistral"
    ),
    "a class that nobody knows": files(
        byte_level(*_MARKS), {"tokenizer_class": "MyTokenizer", "eos_token": "<|im_end|>"}
    ),
    "the class of another backend": files(
        byte_level(*_MARKS), {"tokenizer_class": "TokenizersBackend", "eos_token": "<|im_end|>"}
    ),
    "Qwen's class": files(
        byte_level(*_MARKS),
        {
            "tokenizer_class": "Qwen2Tokenizer",
            "eos_token": "<|im_end|>",
            "bos_token": None,
            "unk_token": None,
            "pad_token": "<|im_end|>",
        },
        model_type="qwen2",
    ),
    "Gemma's class": files(
        gemma(),
        {
            "tokenizer_class": "GemmaTokenizerFast",
            "bos_token": "<bos>",
            "eos_token": "<eos>",
            "pad_token": "<pad>",
            "mask_token": "<mask>",
            "unk_token": "<unk>",
        },
        model_type="gemma2",
    ),
    "GPT-2's class": files(
        byte_level(*_MARKS, normalizer=None, pre_tokenizer=_LEVEL),
        {"tokenizer_class": "GPT2Tokenizer", **dict.fromkeys(_GPT, "<|im_end|>")},
        model_type="gpt2",
    ),
    "GPT-NeoX's class": files(
        byte_level(*_MARKS, pre_tokenizer=_LEVEL),
        {"tokenizer_class": "GPTNeoXTokenizerFast", **dict.fromkeys(_GPT, "<|im_end|>")},
        model_type="gpt_neox",
    ),
    "Cohere's class": files(
        byte_level(*_MARKS, pre_tokenizer={"type": "Sequence", "pretokenizers": [_DIGITS, _LEVEL]}),
        {"tokenizer_class": "CohereTokenizerFast", **dict.fromkeys(_GPT, "<|im_end|>")},
        model_type="cohere",
    ),
    "SentencePiece as it is": files(sentencepiece(), {**_FAST, "bos_token": "<s>", "eos_token": "</s>"}),
    "SentencePiece without a config": files(sentencepiece()),
    "Llama's class": files(sentencepiece(), _LLAMA),
    "Llama's fast class": files(
        sentencepiece(token("<extra>"), token("<think>", special=False, normalized=True)),
        {**_LLAMA, "tokenizer_class": "LlamaTokenizerFast"},
    ),
    "Llama's class as it was": files(sentencepiece(), {**_LLAMA, "legacy": True}),
    "Llama's class without a prefix space": files(sentencepiece(), {**_LLAMA, "add_prefix_space": False}),
    "Llama's class with names left out": files(sentencepiece(), {"tokenizer_class": "LlamaTokenizer"}),
    "Llama's class and Metaspace": files(metaspace(token("<extra>")), _LLAMA),
    "Llama's class for Mistral": files(sentencepiece(), _LLAMA, model_type="mistral"),
    "Llama's class for Phi": files(sentencepiece(), _LLAMA, model_type="phi3"),
    "WordPiece": files(
        word_piece(),
        {
            "tokenizer_class": "BertTokenizer",
            "cls_token": "[CLS]",
            "sep_token": "[SEP]",
            "unk_token": "[UNK]",
            "pad_token": "[PAD]",
            "mask_token": "[MASK]",
            "do_lower_case": True,
        },
        model_type="bert",
    ),
    "Unigram": files(
        unigram(), {**_FAST, "bos_token": "<s>", "eos_token": "</s>", "cls_token": "<s>", "sep_token": "</s>"}
    ),
}

_ENDED: Final = {**_FAST, "eos_token": "<|im_end|>"}


def _ends(config: dict[str, Any], **others: Any) -> Files:
    return files(byte_level(*_MARKS), config, **others)


def _with(made: Files, **config: Any) -> Files:
    return {**made, "config.json": {**made["config.json"], **config}}


def _without(made: Files, name: str) -> Files:
    return {**made, "config.json": {k: v for k, v in made["config.json"].items() if k != name}}


ENDS: Final[dict[str, Files]] = {
    "the tokenizer's end alone": _ends(_ENDED, generation_config={}),
    "an end in config.json alone": _with(_ends(_FAST), eos_token_id=5),
    "two ends in config.json": _with(_ends(_ENDED), eos_token_id=[5, 6]),
    "an end in generation_config.json": _ends(_ENDED, generation_config={"eos_token_id": 7}),
    "ends in generation_config.json": _ends(_ENDED, generation_config={"eos_token_id": [7, 8, N_BYTES + 1]}),
    "generation_config.json against config.json": _with(
        _ends(_ENDED, generation_config={"eos_token_id": 7}), eos_token_id=5
    ),
    "generation_config.json without an end": _with(
        _ends(_ENDED, generation_config={"temperature": 0.5}), eos_token_id=5
    ),
}

UNLIKE: Final[dict[str, tuple[Files, str]]] = {
    "Llama's class over a file of another kind": (
        files(byte_level(*_MARKS), {**_LLAMA, "eos_token": "<|im_end|>"}),
        "the engine's tokenizer reads ",
    ),
    "an end that the class of the configuration has": (
        _without(files(byte_level(*_MARKS), _ENDED), "eos_token_id"),
        f"the engine's libraries end an answer at the tokens [2, {N_BYTES + 1}], and Thaw at [{N_BYTES + 1}]",
    ),
    "a large vocabulary of Mistral's": (
        files(byte_level(*_MARKS, n_more=100_000), {**_ENDED, "fix_mistral_regex": True}, model_type="mistral"),
        "the engine's tokenizer reads ",
    ),
}
"""Layouts that Thaw reads otherwise than vLLM, and the beginning of what the check of a model says of each."""
