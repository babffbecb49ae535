"""Read from vLLM's scheduler which KV blocks requests hold, and which ones the prefix cache offers.

This file uses fields of vLLM's scheduler, but imports no vLLM, so its tests need none.
"""

from __future__ import annotations

from typing import Any

from thaw_runtime.pipeline.block_copies import HeldBlock


def held_blocks(scheduler: Any) -> list[list[HeldBlock]]:
    """Return for each KV cache group the blocks in which running requests have tokens, batches in flight included."""
    manager = scheduler.kv_cache_manager
    groups = scheduler.kv_cache_config.kv_cache_groups
    held: list[list[HeldBlock]] = [[] for _ in groups]
    for request in scheduler.running:
        for g, blocks in enumerate(manager.get_blocks(request.request_id).blocks):
            size = groups[g].kv_cache_spec.block_size
            for i, block in enumerate(blocks[: -(-request.num_computed_tokens // size)]):
                owner = (request.request_id, request.num_preemptions, i)
                n_tokens = min(size, request.num_computed_tokens - i * size)
                if not block.is_null:
                    held[g].append(HeldBlock(block.block_id, owner, n_tokens, n_tokens == size, block.block_hash))
    return held


def cached_blocks(scheduler: Any) -> list[tuple[int, bytes]]:
    """Return the blocks that a later request may find in the prefix cache, with the digests of their tokens."""
    blocks = scheduler.kv_cache_manager.block_pool.blocks
    return [(block.block_id, block.block_hash) for block in blocks if block.block_hash is not None]
