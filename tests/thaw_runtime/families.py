"""Tiny checkpoints of many families of models: their config.json, for random weights."""

from __future__ import annotations

from typing import Any

VOCAB = 512

TINY = {
    "vocab_size": VOCAB,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
    "initializer_range": 0.15,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
}
TINY_GPT = {
    "vocab_size": VOCAB,
    "n_embd": 128,
    "n_head": 4,
    "n_layer": 8,
    "n_positions": 512,
    "initializer_range": 0.15,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", **TINY, "num_key_value_heads": 2, "tie_word_embeddings": True},
    "qwen2": {"model_type": "qwen2", **TINY, "num_key_value_heads": 2, "tie_word_embeddings": True},
    "qwen3": {"model_type": "qwen3", **TINY, "num_key_value_heads": 2, "head_dim": 64},
    "mistral": {"model_type": "mistral", **TINY, "num_key_value_heads": 2, "sliding_window": None},
    "sliding": {"model_type": "mistral", **TINY, "num_key_value_heads": 2, "sliding_window": 32},
    "gemma2": {
        "model_type": "gemma2",
        **TINY,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "sliding_window": 32,
        "query_pre_attn_scalar": 32,
    },
    "gemma": {"model_type": "gemma", **TINY, "num_key_value_heads": 1, "head_dim": 32},
    "opt": {"model_type": "opt", **TINY, "ffn_dim": 256, "word_embed_proj_dim": 128, "initializer_range": 0.4},
    "gpt2": {"model_type": "gpt2", **TINY_GPT, "initializer_range": 0.4},
    "mixtral": {
        "model_type": "mixtral",
        **TINY,
        "num_key_value_heads": 2,
        "num_local_experts": 4,
        "sliding_window": None,
    },
    "qwen3_moe": {
        "model_type": "qwen3_moe",
        **TINY,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "initializer_range": 0.4,
    },
    "gemma3": {
        "model_type": "gemma3_text",
        **TINY,
        "tie_word_embeddings": False,
        "initializer_range": 0.4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "sliding_window": 32,
        "query_pre_attn_scalar": 32,
    },
    "phi3": {"model_type": "phi3", **TINY, "num_key_value_heads": 2, "sliding_window": None},
    "granite": {"model_type": "granite", **TINY, "num_key_value_heads": 2},
    "cohere": {"model_type": "cohere", **TINY, "num_key_value_heads": 2},
    "falcon": {
        "model_type": "falcon",
        "vocab_size": VOCAB,
        "hidden_size": 128,
        "num_hidden_layers": 8,
        "num_attention_heads": 4,
        "initializer_range": 0.15,
        "bos_token_id": 0,
        "eos_token_id": 0,
    },
    "bloom": {
        "model_type": "bloom",
        "vocab_size": VOCAB,
        "hidden_size": 128,
        "n_layer": 8,
        "n_head": 4,
        "initializer_range": 0.15,
        "bos_token_id": 0,
        "eos_token_id": 0,
    },
    "stablelm": {"model_type": "stablelm", **TINY, "num_key_value_heads": 2},
    "phi": {"model_type": "phi", **TINY},
    "olmo2": {"model_type": "olmo2", **TINY, "num_key_value_heads": 2},
    "starcoder2": {"model_type": "starcoder2", **TINY, "num_key_value_heads": 2, "sliding_window": None},
    "smollm3": {"model_type": "smollm3", **TINY, "num_key_value_heads": 2},
    "olmo": {"model_type": "olmo", **TINY, "num_key_value_heads": 2},
    "olmoe": {"model_type": "olmoe", **TINY, "num_key_value_heads": 2, "num_experts": 4, "num_experts_per_tok": 2},
    "glm": {"model_type": "glm", **TINY, "num_key_value_heads": 2, "head_dim": 32},
    "nemotron": {"model_type": "nemotron", **TINY, "num_key_value_heads": 2},
    "arcee": {"model_type": "arcee", **TINY, "num_key_value_heads": 2},
    "gptj": {"model_type": "gptj", **TINY_GPT, "rotary_dim": 16},
    "gpt_neox": {"model_type": "gpt_neox", **TINY},
    "gpt_bigcode": {"model_type": "gpt_bigcode", **TINY_GPT, "initializer_range": 0.4},
    "gpt_oss": {
        "model_type": "gpt_oss",
        **TINY,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 32,
        "rope_scaling": None,
    },
    "minicpm3": {
        "model_type": "minicpm3",
        **TINY,
        "q_lora_rank": 32,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 16,
        "v_head_dim": 16,
        "dim_model_base": 64,
        "scale_emb": 1,
        "scale_depth": 1.4,
    },
    "helium": {"model_type": "helium", **TINY, "num_key_value_heads": 2, "head_dim": 32},
    "nanochat": {"model_type": "nanochat", **TINY, "num_key_value_heads": 2},
}

ONE_STAGE = ("nanochat",)
"""Families that run in one stage alone, as their check says."""

_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 32, "mamba_d_state": 16, "mamba_n_groups": 1}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
_LFM2 = {
    "conv_dim": 128,
    "conv_bias": False,
    "block_dim": 128,
    "block_ff_dim": 256,
    "block_multiple_of": 256,
    "block_ffn_dim_multiplier": 1.0,
    "block_auto_adjust_ff_dim": False,
    "conv_L_cache": 3,
    "layer_types": ["conv", "conv", "full_attention", "conv"] * 2,
}
STATEFUL: dict[str, dict[str, Any]] = {
    "granitemoehybrid": {
        "model_type": "granitemoehybrid",
        **TINY,
        **_MAMBA,
        "num_key_value_heads": 2,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 128,
        "mamba_expand": 2,
        "layer_types": ["mamba", "mamba", "mamba", "attention"] * 2,
        "position_embedding_type": "rope",
    },
    "nemotron_h": {
        "model_type": "nemotron_h",
        **TINY,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "mamba_num_heads": 8,
        "mamba_head_dim": 32,
        "ssm_state_size": 16,
        "n_groups": 1,
        "layers_block_type": ["mamba", "mlp", "mamba", "attention"] * 2,
    },
    "falcon_h1": {
        "model_type": "falcon_h1",
        **TINY,
        **_MAMBA,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "mamba_d_ssm": 256,
        "projectors_bias": False,
    },
    "lfm2": {"model_type": "lfm2", **TINY, **_LFM2, "num_key_value_heads": 2},
    "lfm2_moe": {
        "model_type": "lfm2_moe",
        **TINY,
        **_EXPERTS,
        "num_key_value_heads": 2,
        "num_dense_layers": 1,
        "conv_bias": False,
        "conv_L_cache": 3,
        "layer_types": ["conv", "conv", "full_attention", "conv"] * 2,
    },
    "mamba2": {
        "model_type": "mamba2",
        "vocab_size": VOCAB,
        "hidden_size": 128,
        "num_hidden_layers": 8,
        "num_heads": 8,
        "head_dim": 32,
        "state_size": 16,
        "n_groups": 1,
        "expand": 2,
        "initializer_range": 0.15,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "pad_token_id": 0,
    },
}
"""Families with layers that keep a state.  They run in one stage."""
QWEN3_NEXT = {
    "model_type": "qwen3_next",
    **TINY,
    **_EXPERTS,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "shared_expert_intermediate_size": 64,
    "full_attention_interval": 4,
}
"""Its kernel on a CPU computes in bfloat16 alone."""
ALL_ATTENTION = {
    **STATEFUL["granitemoehybrid"],
    "num_local_experts": 0,
    "num_experts_per_tok": 0,
    "shared_intermediate_size": 256,
    "layer_types": ["attention"] * 8,
}
"""A hybrid family's model without a layer that keeps a state (Granite 4 micro): it has stages like any other."""
_SEES = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
_READS = {**TINY, "num_key_value_heads": 2, "head_dim": 32}
MULTIMODAL: dict[str, dict[str, Any]] = {
    "mistral3": {
        "model_type": "mistral3",
        "text_config": {"model_type": "mistral", **_READS},
        "vision_config": {"model_type": "pixtral", **_SEES},
    },
    "gemma3_mm": {
        "model_type": "gemma3",
        "tie_word_embeddings": False,
        "text_config": {**_READS, "sliding_window": 32, "query_pre_attn_scalar": 32, "initializer_range": 0.4},
        "vision_config": _SEES,
        "mm_tokens_per_image": 4,
        "image_token_index": 5,
        "boi_token_index": 6,
        "eoi_token_index": 7,
    },
}
"""Families that read pictures, too.  Thaw serves their language models."""
WITHOUT_PIPELINES: dict[str, dict[str, Any]] = {
    "gemma3n": {
        "model_type": "gemma3n_text",
        **TINY,
        "intermediate_size": [256] * 8,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "hidden_size_per_layer_input": 32,
        "vocab_size_per_layer_input": VOCAB,
        "num_kv_shared_layers": 2,
        "laurel_rank": 16,
        "sliding_window": 32,
        "layer_types": ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"] * 2,
        "activation_sparsity_pattern": [0.0] * 8,
    },
    "ernie4_5_moe": {
        "model_type": "ernie4_5_moe",
        **TINY,
        "num_key_value_heads": 2,
        "moe_num_experts": 4,
        "moe_k": 2,
        "moe_intermediate_size": 64,
        "tie_word_embeddings": True,
        "moe_layer_start_index": 1,
        "moe_layer_end_index": 7,
    },
}
"""Families whose class in vLLM has no pipelines, or cannot be built in stages."""
MINIMAX_M2 = {
    "model_type": "minimax_m2",
    **TINY,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "rotary_dim": 16,
    "scoring_func": "sigmoid",
    "use_routing_bias": True,
    "num_mtp_modules": 0,
    "attn_type_list": [1] * 8,
    "shared_intermediate_size": 0,
    "qk_norm_type": "per_layer",
}
"""vLLM's router on a CPU does not have its way to choose experts."""
EVERY = {
    **FAMILIES,
    **STATEFUL,
    **WITHOUT_PIPELINES,
    "qwen3_next": QWEN3_NEXT,
    "all_attention": ALL_ATTENTION,
    "minimax_m2": MINIMAX_M2,
}
