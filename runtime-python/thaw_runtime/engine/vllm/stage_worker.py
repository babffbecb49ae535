"""What a stage changes in vLLM's worker, on every device: its place in a pipeline."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vllm.distributed import parallel_state
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec

from thaw_runtime.engine.vllm.current_start import current_start
from thaw_runtime.engine.vllm.stage import StageGroup, as_kind
from thaw_runtime.engine.vllm.world_of_one import world_of_one


class StageWorker:
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
