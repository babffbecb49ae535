"""What a zygote does before it forks: every import a start would otherwise pay for, and nothing else."""

from __future__ import annotations

import importlib

MODULES = (
    "tokenizers", "jinja2", "thaw_runtime.proxy", "thaw_runtime.vllm_engine",
    "vllm.model_executor.layers.quantization.online.base", "vllm.distributed.ec_transfer.ec_connector.metrics",
    "vllm.distributed.elastic_ep.elastic_execute", "vllm.distributed.kv_transfer.kv_connector.v1.metrics",
    "vllm.v1.attention.backends.cpu_attn", "vllm.v1.core.sched.scheduler", "vllm.v1.pool.flash_maxsim",
)  # fmt: skip
ARCHITECTURES = (
    "LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "MistralForCausalLM", "OPTForCausalLM",
    "GPT2LMHeadModel", "GemmaForCausalLM", "Gemma2ForCausalLM",
)  # fmt: skip


def warm_up() -> None:
    for module in MODULES:
        importlib.import_module(module)
    from thaw_runtime.vllm_engine import preload

    preload(ARCHITECTURES)
