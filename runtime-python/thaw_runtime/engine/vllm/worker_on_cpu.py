"""vLLM's CPU worker with a KV cache that is allocated lazily.

Importing vLLM's CPU worker replaces torch's CUDA streams, events and memory calls by stand-ins that do nothing, so no
process that computes on a GPU may import this module.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from vllm.model_executor.layers import utils
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
from vllm.utils.cpu_resource_utils import get_visible_memory_node
from vllm.v1.kv_cache_interface import MambaSpec
from vllm.v1.worker.cpu_worker import CPUWorker

from thaw_runtime.engine.vllm import kept_kernels, linear_on_cpu, rotary_on_cpu
from thaw_runtime.engine.vllm.kv_allocation import ZeroOnDemand
from thaw_runtime.engine.vllm.replaced import replaced
from thaw_runtime.engine.vllm.stage_worker import StageWorker


class LazyKvCpuWorker(StageWorker, CPUWorker):
    """vLLM's CPU worker.  It allocates its KV cache without touching it, binds no memory to a lone NUMA node, keeps
    a bounded number of kernels, rotates queries by head, and computes prompts fast also where the processor has no
    instructions for bfloat16."""

    def __init__(self, *args: Any, **more: Any) -> None:
        linear_on_cpu.install(utils)
        kept_kernels.install(utils)
        rotary_on_cpu.install(RotaryEmbedding)
        # To bind memory, the kernel examines all pages and waits for the other cores, which takes 4 ms to 200 ms.
        unbound = replaced(torch.ops._C, "init_cpu_memory_env", lambda nodes: None)
        with unbound if len(get_visible_memory_node()) == 1 else nullcontext():
            super().__init__(*args, **more)

    def get_kv_cache_spec(self) -> dict[str, Any]:
        """vLLM's kernel of Mamba 2 on a CPU gives the last state of a prompt, and vLLM takes it for the states at the
        ends of blocks (*prefill checkpoints*), which fails for a prompt of several blocks.  Without checkpoints the
        scheduler ends a step at each block that the prefix cache shall keep, as it does for other kinds of states."""
        specs: dict[str, Any] = super().get_kv_cache_spec()
        without = {"num_prefill_checkpoint_blocks": 0, "prefill_checkpoint_alignment": None}
        return {n: replace(s, **without) if isinstance(s, MambaSpec) else s for n, s in specs.items()}

    def _maybe_get_memory_pool_context(self, tag: str) -> AbstractContextManager[Any]:
        return ZeroOnDemand() if tag == "kv_cache" else nullcontext()
