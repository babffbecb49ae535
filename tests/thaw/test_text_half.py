"""The language model inside a model that also reads pictures or sound: its configuration, tensors, layers and parts."""

from __future__ import annotations

from typing import Any

import pytest

from thaw.checkpoints.checkpoint import build_index, facts_of
from thaw.checkpoints.text_half import text_half, text_tensors
from thaw.model import ModelFile, TensorInfo

TEXT = {"model_type": "gemma3_text", "num_hidden_layers": 2, "hidden_size": 8}
GEMMA: dict[str, Any] = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "model_type": "gemma3",
    "text_config": TEXT,
    "vision_config": {"num_hidden_layers": 3},
}
OLD_NAMES = (
    "vision_tower.vision_model.encoder.layers.0.mlp.fc1.weight",
    "language_model.model.embed_tokens.weight",
    "language_model.model.layers.0.mlp.up_proj.weight",
    "language_model.model.layers.1.mlp.up_proj.weight",
    "language_model.model.norm.weight",
    "language_model.lm_head.weight",
    "multi_modal_projector.mm_soft_emb_norm.weight",
    "vision_tower.vision_model.encoder.layers.2.mlp.fc1.weight",
)
NEW_NAMES = (
    "lm_head.weight",
    "model.language_model.embed_tokens.weight",
    "model.language_model.layers.0.mlp.up_proj.weight",
    "model.language_model.layers.1.mlp.up_proj.weight",
    "model.language_model.norm.weight",
    "model.visual.blocks.0.mlp.weight",
    "mtp.layers.0.mlp.weight",
)
OF_TEXT = (
    "model.embed_tokens.weight",
    "model.layers.0.mlp.up_proj.weight",
    "model.layers.1.mlp.up_proj.weight",
    "model.norm.weight",
    "lm_head.weight",
)


def tensors(names: tuple[str, ...]) -> list[TensorInfo]:
    return [TensorInfo(name, "model.safetensors", 100 + 8 * i, 8, "F32", (2,)) for i, name in enumerate(names)]


@pytest.mark.parametrize("names", [OLD_NAMES, NEW_NAMES], ids=["as saved once", "as saved now"])
def test_its_tensors_have_the_names_of_the_language_models_own_class(names: tuple[str, ...]) -> None:
    found = text_tensors(GEMMA, tensors(names))
    assert sorted(t.name for t in found) == sorted(OF_TEXT)
    assert [t.offset for t in found] == sorted(t.offset for t in found)


def test_a_model_of_text_keeps_its_configuration_and_tensors() -> None:
    for config in (TEXT, {"text_config": TEXT}, {"text_config": "no object", "vision_config": {"a": 1}}, {}):
        assert text_half(config) is None
        assert text_tensors(config, tensors(OLD_NAMES)) == tuple(tensors(OLD_NAMES))


@pytest.mark.parametrize(
    ("kind", "architecture"),
    [
        ("gemma3_text", "Gemma3ForCausalLM"),
        ("gemma3n_text", "Gemma3nForCausalLM"),
        ("qwen3_5_text", "Qwen3_5ForCausalLM"),
        ("qwen3_5_moe_text", "Qwen3_5MoeForCausalLM"),
        ("mistral", "MistralForCausalLM"),
        ("ministral3", "Ministral3ForCausalLM"),
        ("llama4_text", "Llama4ForCausalLM"),
        ("lfm2", "Lfm2ForCausalLM"),
    ],
)
def test_its_architecture_follows_from_its_type(kind: str, architecture: str) -> None:
    found = text_half({**GEMMA, "text_config": {**TEXT, "model_type": kind}})
    assert found is not None
    assert found["architectures"] == [architecture]


def test_what_holds_for_the_whole_model_holds_for_it() -> None:
    beside = {"eos_token_id": [1, 106], "tie_word_embeddings": True, "quantization_config": {"quant_method": "fp8"}}
    inside = {**TEXT, "tie_word_embeddings": False, "bos_token_id": 2}
    found = text_half({**GEMMA, **beside, "bos_token_id": 9, "text_config": inside})
    assert found is not None
    assert {key: found[key] for key in beside} == beside
    assert found["bos_token_id"] == 2
    assert "vision_config" not in found


def test_only_its_layers_and_bytes_are_parts_of_a_pipeline() -> None:
    files = [ModelFile("config.json", 10, True), ModelFile("model.safetensors", 100 + 8 * len(OLD_NAMES), False)]
    facts = facts_of("s3://m/x", build_index(files, tensors(OLD_NAMES), etag="e"), GEMMA)
    assert facts.n_layers == 2
    assert facts.layer_bytes == (8, 8)
    assert facts.outer_bytes == 24
    assert facts.parts is not None
    ranges = [r for part in (facts.parts.entry, *facts.parts.layers, facts.parts.exit) for r in part]
    assert sum(r.n_bytes for r in ranges) == 8 * len(OF_TEXT)
