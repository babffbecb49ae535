"""vLLM's workers with a KV cache that is allocated lazily and a place in a pipeline, chosen by ``worker_cls``."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from vllm.distributed import parallel_state
from vllm.platforms import current_platform
from vllm.utils.cpu_resource_utils import get_visible_memory_node
from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec
from vllm.v1.worker.cpu_worker import CPUWorker
from vllm.v1.worker.gpu_worker import Worker

from thaw_runtime.engine.vllm.current_start import current_start
from thaw_runtime.engine.vllm.kv_allocation import ZeroOnDemand
from thaw_runtime.engine.vllm.replaced import replaced
from thaw_runtime.engine.vllm.stage import StageGroup, as_kind
from thaw_runtime.engine.vllm.world_of_one import world_of_one


class _StageWorker:
    """Each process is a torch.distributed world of its own; only the pipeline group says that there are others."""

    @world_of_one()
    def init_device(self: Any) -> None:
        part = current_start().part
        if not part.whole:
            # The worker would wait for the other stages here.  It finds everything initialised and does not.
            parallel_state.init_distributed_environment(
                1, 0, self.distributed_init_method, self.local_rank, current_platform.dist_backend
            )
            parallel_state.ensure_model_parallel_initialized(1, 1, 1, 1)
            parallel_state._PP = StageGroup(part.stage, part.n_stages)
        super().init_device()  # type: ignore[misc]
        # A world of several processes meets at this file.  A process that is ended at once would leave it behind.
        Path(self.distributed_init_method.removeprefix("file://")).unlink(missing_ok=True)

    def get_kv_cache_spec(self: Any) -> dict[str, Any]:
        """In a pipeline, layers with a sliding window keep whole contexts.  A block is the same tokens in all stages,
        and a stage cannot know whether another one has layers with full attention."""
        specs: dict[str, Any] = super().get_kv_cache_spec()  # type: ignore[misc]
        if current_start().part.whole:
            return specs
        return {n: as_kind(FullAttentionSpec, s) if isinstance(s, SlidingWindowSpec) else s for n, s in specs.items()}


class LazyKvCpuWorker(_StageWorker, CPUWorker):
    """vLLM's CPU worker.  It allocates its KV cache without touching it, and binds no memory to a lone NUMA node."""

    def __init__(self, *args: Any, **more: Any) -> None:
        # To bind memory, the kernel examines all pages and waits for the other cores, which takes 4 ms to 200 ms.
        unbound = replaced(torch.ops._C, "init_cpu_memory_env", lambda nodes: None)
        with unbound if len(get_visible_memory_node()) == 1 else nullcontext():
            super().__init__(*args, **more)

    def _maybe_get_memory_pool_context(self, tag: str) -> AbstractContextManager[Any]:
        return ZeroOnDemand() if tag == "kv_cache" else nullcontext()


class StageGpuWorker(_StageWorker, Worker):
    """vLLM's GPU worker."""


CPU_WORKER = f"{__name__}.{LazyKvCpuWorker.__name__}"
GPU_WORKER = f"{__name__}.{StageGpuWorker.__name__}"
