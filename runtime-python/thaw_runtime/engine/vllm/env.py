"""Environment of an engine process.  It is set before vLLM is imported, because vLLM reads some of it only then."""

from __future__ import annotations

import os
from typing import Final

from thaw_runtime.engine.kv_memory import KERNELS
from thaw_runtime.engine.vllm import cpu_ceiling
from thaw_runtime.engine.vllm.settings import CPU_CEILING, LOGITS_NOISE, engine_settings

FIXED = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # otherwise vLLM replaces the executor by one with worker processes
    "VLLM_CONFIGURE_LOGGING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_PLUGINS": "",
    "TORCHDYNAMO_DISABLE": "1",  # the first request with logprobs would start a C++ compiler and stall for 14 s
    "VLLM_USE_V2_MODEL_RUNNER": "0",  # the second runner, a GPU's default, sends tokens between stages by NCCL
    "VLLM_USE_FLASHINFER_SAMPLER": "0",  # on a GPU it would compile its kernels in the first start on a host
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": str(KERNELS),  # otherwise prompts of many lengths add 300 MB to the engine
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
KEPT: Final = (*FIXED, CPU_CEILING, LOGITS_NOISE, *cpu_ceiling.VARIABLES)
"""What a container keeps that is forked from a stem cell."""


def prepare(n_threads: int = 1) -> None:
    """``n_threads`` applies until the start says how many threads the worker's share of the device allows."""
    os.environ.update(FIXED)
    cpu_ceiling.limit_environment(engine_settings().cpu_ceiling, os.environ)
    os.environ.setdefault("OMP_NUM_THREADS", str(n_threads))
    # A thread that spins at a barrier takes the core from fetchd, or from the thread for which it waits.  With spinning
    # threads a first token took 1.1 s instead of 0.05 s on a busy host of two cores.  Without them, an idle host needs
    # 15 ms more for a prefill.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)  # it would override the size that Thaw computes
