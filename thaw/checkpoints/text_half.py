"""The language model inside a model that also reads pictures or sound, as hubs have Gemma 3, Qwen 3.5 and Mistral.

Its configuration is ``text_config`` of config.json, and its tensors have names of their own beside those of the other
parts.  Here they get the names that the language model's own class has, as save_pretrained of that part writes them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, Final

from thaw.model import TensorInfo

TEXT: Final = "text_config"
_OTHERS: Final = ("vision_config", "audio_config", "speech_config", "image_config", "video_config")
_SHARED: Final = ("bos_token_id", "dtype", "eos_token_id", "pad_token_id", "torch_dtype")
"""Keys that many a config.json has beside ``text_config`` and not in it."""
_OF_THE_WHOLE: Final = ("quantization_config", "tie_word_embeddings")
"""Keys that hold for the whole model if they are beside ``text_config``, whatever it says itself."""
_PREFIXES: Final = (
    ("model.language_model.", "model."),
    ("model.text_model.", "model."),
    ("language_model.lm_head.", "lm_head."),
    ("language_model.model.", "model."),
    ("lm_head.", "lm_head."),
    ("model.embed_tokens.", "model.embed_tokens."),
    ("model.layers.", "model.layers."),
    ("model.norm.", "model.norm."),
)
"""The beginning of a tensor's name, and the beginning of its name in the language model alone."""


def text_half(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the config.json of the language model alone, or None if ``config`` is that of a model of text."""
    text = config.get(TEXT)
    kind = text.get("model_type") if isinstance(text, dict) else None
    if not isinstance(text, dict) or not isinstance(kind, str) or not any(config.get(name) for name in _OTHERS):
        return None
    shared, whole = (
        {key: config[key] for key in keys if config.get(key) is not None} for keys in (_SHARED, _OF_THE_WHOLE)
    )
    return {**shared, **text, **whole, "architectures": [_architecture(kind)]}


def text_tensors(config: Mapping[str, Any], tensors: Iterable[TensorInfo]) -> tuple[TensorInfo, ...]:
    """Return the tensors of the language model under its own names, in the same order: all as they are, if ``config``
    is that of a model of text."""
    if text_half(config) is None:
        return tuple(tensors)
    named = ((t, _text_name(t.name)) for t in tensors)
    return tuple(replace(t, name=name) for t, name in named if name is not None)


def _text_name(name: str) -> str | None:
    for before, after in _PREFIXES:
        if name.startswith(before):
            return after + name.removeprefix(before)
    return None


def _architecture(kind: str) -> str:
    """Return the name of the class: ``qwen3_5_moe_text`` is Qwen3_5MoeForCausalLM."""
    words = kind.removesuffix("_text").split("_")
    return "".join(f"_{w}" if w[:1].isdigit() else w[:1].upper() + w[1:] for w in words) + "ForCausalLM"
