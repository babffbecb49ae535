"""Find the class of a model as vLLM does, by the architectures that its config.json names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import transformers
from vllm.config.model import try_match_architecture_defaults
from vllm.model_executor.models import ModelRegistry, registry

from thaw.errors import ModelUnsupported
from thaw_runtime.engine.vllm.absent_packages import FOR_OTHER_INPUTS, stand_ins
from thaw_runtime.engine.vllm.errors import brings_code
from thaw_runtime.shown import shown


def inspect_here() -> None:
    """Let vLLM look at a model's class in this process; it would start a second Python, which takes ten seconds.  vLLM
    keeps CUDA out of its first process so, and an engine of Thaw computes in the process that looks."""
    registry._LazyRegisteredModel.inspect_model_cls = _inspected


def _inspected(lazy: Any) -> Any:
    return registry._ModelInfo.from_model_cls(lazy.load_model_cls())


def register_architecture(config: Mapping[str, Any]) -> str:
    """Import the model's class and return the name under which the engine's registry has it.

    Raises ModelUnsupported for a model that this engine does not have, or that Thaw cannot serve.
    """
    name = _known(config)
    if type(ModelRegistry.models[name]).__name__ == "_LazyRegisteredModel":
        try:
            with stand_ins():
                ModelRegistry.register_model(name, ModelRegistry.models[name].load_model_cls())
        except ModuleNotFoundError as e:
            raise _multimodal(name) if e.name in FOR_OTHER_INPUTS else _without_package(name, e) from e
    _check_servable(name)
    return name


def _known(config: Mapping[str, Any]) -> str:
    """Find the model as vLLM's registry does: by one of its names, by the name of the decoder that is its base
    (Qwen3Model), or in the Transformers library.  A checkpoint's code is never fetched, so an architecture that only
    such code defines cannot run."""
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
    base = ModelRegistry._normalize_arch(names[0], None)
    if base in ModelRegistry.models:
        return str(base)
    if (backend := _in_transformers(names[0])) is not None:
        return backend
    raise ModelUnsupported(
        f"the engine has no architecture {shown(names[0])}",
        hint="see vLLM's list of supported models, and docs/models.md",
    )


def _in_transformers(name: str) -> str | None:
    """Return vLLM's class that runs the library's own code of the model, or None if there is no such code."""
    made = getattr(transformers, name, None) if name.isidentifier() else None
    if not (isinstance(made, type) and issubclass(made, transformers.PreTrainedModel)):
        return None
    model: Any = made
    if not (model.is_backend_compatible() or model._can_set_attn_implementation()):
        return None
    return "TransformersEmbeddingModel" if _may_embed(name) else "TransformersForCausalLM"


def _may_embed(name: str) -> bool:
    """Return whether vLLM adds a pooling to a class of this name, as it does to ModernBertModel."""
    match = try_match_architecture_defaults(name)
    return match is not None and match[1] == ("pooling", "embed")


def _check_servable(name: str) -> None:
    facts = ModelRegistry.models[name].inspect_model_cls()
    if facts.supports_multimodal:
        raise _multimodal(name)
    if not (facts.is_text_generation_model or facts.is_pooling_model or _may_embed(name)):
        raise ModelUnsupported(
            f"{name} neither generates text nor embeds it", hint="deploy a model of the kind …ForCausalLM or …Model"
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
