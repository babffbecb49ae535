"""vLLM's GPU worker, for a worker that has a part of the device."""

from __future__ import annotations

from typing import Any

from vllm.v1.worker.gpu_worker import Worker

from thaw_runtime.engine.vllm.stage_worker import StageWorker


class StageGpuWorker(StageWorker, Worker):
    """vLLM's GPU worker.  The size of its KV cache is computed, so no batch runs to measure what is left for it."""

    def determine_available_memory(self: Any) -> int:
        return int(self.cache_config.kv_cache_memory_bytes)
