"""The names of vLLM with which a model is looked at before it starts: a part of the table in vllm_names.py."""

from __future__ import annotations

from typing import Final

from thaw_runtime.engine.vllm.name_entry import Kind
from thaw_runtime.engine.vllm.name_entry import names as _names

_PUNICA: Final = "vllm.lora.punica_wrapper.punica_cpu:PunicaWrapperCPU"
LOADER_UTILS: Final = "vllm.model_executor.model_loader.utils"
MODELS: Final = "vllm.model_executor.models"
LINEAR: Final = "vllm.model_executor.layers.linear"
WORKER: Final = "vllm.v1.worker.gpu_worker:Worker"
_KV_UTILS: Final = "vllm.v1.core.kv_cache_utils"
_KNOW: Final = "know a model's class by its architecture"
_STATE: Final = "know how much memory a state takes"

CHECKED_WITH: Final = (
    # ── architectures.py, check.py ──
    _names(f"{MODELS}.registry:_LazyRegisteredModel", "inspect_model_cls", "refuse models that Thaw cannot serve"),
    _names(
        f"{MODELS}.registry:_ModelInfo",
        "is_text_generation_model is_pooling_model supports_multimodal is_attention_free is_hybrid",
        "refuse models that Thaw cannot serve",
        Kind.FIELD,
    ),
    _names("vllm.engine.arg_utils:EngineArgs", "create_model_config", "find out how long a model's context is"),
    _names("vllm.config", "set_current_vllm_config", "build a model without weights"),
    _names("vllm.tokenizers", "get_tokenizer", "compare what vLLM and Thaw read"),
    _names("vllm.renderers.hf", "resolve_chat_template_content_format safe_apply_chat_template", "compare prompts"),
    _names(LOADER_UTILS, "initialize_model", "build a model without weights"),
    _names(LINEAR, "LinearBase", "try a quantised layer on this device"),
    _names("vllm.lora.request", "LoRARequest", "name the adapter of a request"),
    _names("vllm.lora.request:LoRARequest", "lora_int_id", "remove an adapter", Kind.FIELD),
    _names("vllm.model_executor.layers.fused_moe", "MoERunner", "refuse adapters of a model with experts"),
    _names(MODELS, "supports_lora", "refuse adapters of a model that takes none"),
    _names(WORKER, "add_lora remove_lora", "load an adapter"),
    _names("vllm.config.vllm:VllmConfig", "lora_config", "load an adapter", Kind.FIELD),
    _names("vllm.config.lora:LoRAConfig", "target_modules", "say which layers adapters may change", Kind.FIELD),
    _names("vllm.platforms:current_platform", "get_punica_wrapper", "compute adapters on a CPU"),
    _names("vllm.lora.punica_wrapper.punica_cpu", "PunicaWrapperCPU", "compute adapters on a CPU"),
    _names(_PUNICA, "update_metadata token_lora_indices add_lora_linear", "compute adapters on a CPU"),
    _names("vllm.v1.request:Request", "lora_request", "name the adapter of a request", Kind.FIELD),
    _names(f"{LINEAR}:LinearBase", "input_size", "try a quantised layer on this device", Kind.FIELD),
    _names(f"{LINEAR}:UnquantizedLinearMethod", "apply", "try a quantised layer on this device"),
    _names("vllm.platforms:current_platform", "device_name device_type get_device_total_memory", "know the device"),
    _names("vllm.config.model", "try_match_architecture_defaults", _KNOW),
    _names(MODELS, "registry", _KNOW),
    _names(f"{MODELS}:ModelRegistry", "_normalize_arch resolve_model_cls", _KNOW),
    _names(f"{MODELS}.registry:_ModelInfo", "from_model_cls", _KNOW),
    # ── state_layers.py, trial.py, rotary_on_cpu.py ──
    _names("vllm.v1.core", "kv_cache_utils", _STATE),
    _names(
        _KV_UTILS,
        "get_kv_cache_groups _pool_bytes_per_block _max_memory_usage_bytes_from_groups "
        "get_max_concurrency_for_kv_cache_config",
        _STATE,
    ),
    _names(f"{MODELS}.interfaces:IsHybrid", "get_mamba_state_shape_from_config", _STATE),
    _names("vllm.platforms.interface", "get_mamba_specs_from_config", _STATE, Kind.FIELD),  # only one family has it
    _names("vllm.config.model:ModelConfig", "is_hybrid is_attention_free get_total_num_hidden_layers", _STATE),
    _names(
        "vllm.model_executor.layers.fused_moe.runner.moe_runner_interface",
        "MoERunnerInterface",
        "try a model with experts",
    ),
    _names("vllm.v1.kv_cache_interface", "MambaSpec", "keep states in the prefix cache on a CPU"),
    _names(
        "vllm.v1.kv_cache_interface:MambaSpec",
        "num_prefill_checkpoint_blocks prefill_checkpoint_alignment",
        "keep states in the prefix cache on a CPU",
        Kind.FIELD,
    ),
    _names("vllm.model_executor.layers.rotary_embedding.base", "RotaryEmbedding", "rotate queries by head"),
    _names("vllm.model_executor.layers.rotary_embedding.base:RotaryEmbedding", "forward_cpu", "rotate queries by head"),
)
