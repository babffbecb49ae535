"""Find out whether the engine's own registry has one of the architectures that a checkpoint's config.json names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllm.model_executor.models import ModelRegistry

from thaw.errors import ModelUnsupported
from thaw_runtime.engine.vllm.errors import brings_code
from thaw_runtime.shown import shown

_FOR_OTHER_INPUTS = frozenset({"torchvision", "torchaudio", "torchcodec", "cv2", "PIL", "soundfile", "librosa"})
"""Packages that only models of pictures and sound import.  The engine's image need not have them."""


def register_architecture(config: Mapping[str, Any]) -> str:
    """Import the model's class here and return its name; vLLM would start a second Python to inspect it.

    Raises ModelUnsupported for a model that this engine does not have, or that Thaw cannot serve.
    """
    name = _known(config)
    if type(ModelRegistry.models[name]).__name__ == "_LazyRegisteredModel":
        try:
            ModelRegistry.register_model(name, ModelRegistry.models[name].load_model_cls())
        except ModuleNotFoundError as e:
            raise _multimodal(name) if e.name in _FOR_OTHER_INPUTS else _without_package(name, e) from e
    _check_servable(name)
    return name


def _known(config: Mapping[str, Any]) -> str:
    """Return the first architecture that the engine has.  A checkpoint's code is never fetched, so an architecture that
    only such code defines cannot run."""
    names = config.get("architectures") or ["(none)"]
    if not isinstance(names, list) or not all(isinstance(n, str) for n in names):
        raise ModelUnsupported(
            "the model's config.json does not list its architectures by name",
            hint='it needs "architectures": ["…ForCausalLM"], as save_pretrained writes it',
        )
    name = next((n for n in names if n in ModelRegistry.get_supported_archs()), None)
    if name is not None:
        return str(name)
    if config.get("auto_map"):
        raise brings_code(f"The architecture {shown(names[0])}")
    raise ModelUnsupported(
        f"the engine has no architecture {shown(names[0])}",
        hint="see vLLM's list of supported models, and docs/models.md",
    )


def _check_servable(name: str) -> None:
    facts = ModelRegistry.models[name].inspect_model_cls()
    if facts.supports_multimodal:
        raise _multimodal(name)
    if not (facts.is_text_generation_model or facts.is_pooling_model):
        raise ModelUnsupported(
            f"{name} neither generates text nor embeds it", hint="deploy a model of the kind …ForCausalLM or …Model"
        )
    if facts.is_attention_free or facts.is_hybrid:
        raise ModelUnsupported(
            f"{name} has layers that keep a state instead of keys and values (a state-space model), for which Thaw "
            "plans no memory",
            hint="deploy a model with attention in every layer",
        )


def _multimodal(name: str) -> ModelUnsupported:
    return ModelUnsupported(
        f"{name} reads pictures or sound beside text, and Thaw serves models of text alone",
        hint="push its language model alone, as save_pretrained of that part writes it",
    )


def _without_package(name: str, error: ModuleNotFoundError) -> ModelUnsupported:
    return ModelUnsupported(
        f"the engine's installation lacks the Python package {error.name}, which {name} needs",
        hint="use another model, or an image of the engine with that package",
    )
