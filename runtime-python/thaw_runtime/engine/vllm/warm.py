"""The work of a zygote (the process that forks stem cells) before it forks: every import that a start would otherwise
pay for, and one configuration."""

from __future__ import annotations

import importlib
import json
import os
import tempfile
from pathlib import Path

MODULES = (
    "tokenizers",
    "jinja2",
    "thaw_runtime.llm.proxy",
    "thaw_runtime.engine.vllm.engine",
    "vllm.model_executor.layers.quantization.online.base",
    "vllm.distributed.ec_transfer.ec_connector.metrics",
    "vllm.distributed.elastic_ep.elastic_execute",
    "vllm.distributed.kv_transfer.kv_connector.v1.metrics",
    "vllm.v1.core.sched.scheduler",
    "vllm.v1.pool.flash_maxsim",
)
ATTENTION = {
    "cpu": ("vllm.v1.attention.backends.cpu_attn",),
    "cuda": ("vllm.v1.attention.backends.flash_attn", "vllm.v1.attention.backends.triton_attn"),
}
"""Modules by device.  vLLM imports the one that it chooses for a model."""
ARCHITECTURES = (
    "LlamaForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "MistralForCausalLM",
    "OPTForCausalLM",
    "GPT2LMHeadModel",
    "GemmaForCausalLM",
    "Gemma2ForCausalLM",
)
NO_MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "torch_dtype": "float32",
}


def warm_up() -> None:
    for module in MODULES:
        importlib.import_module(module)
    from vllm.platforms import current_platform

    from thaw_runtime.engine.vllm.configuration import preload

    for module in ATTENTION.get(current_platform.device_type, ()):
        importlib.import_module(module)

    before = dict(os.environ)
    with tempfile.TemporaryDirectory() as directory:
        Path(directory, "config.json").write_text(json.dumps(NO_MODEL))
        preload(ARCHITECTURES, directory)
    for name in os.environ.keys() - before.keys():
        del os.environ[name]  # the configuration sets variables for the processes of an engine; a zygote has no engine
    os.environ.update(before)
