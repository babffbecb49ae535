"""Models whose layers keep a state (Mamba, gated delta rule, short convolution), alone or beside layers with attention.

vLLM divides the cache of such a model among groups of layers, in blocks of one size: a state takes one block, and a
layer with attention gets so many tokens into its block that it has the bytes of a state.  Only the built model knows
the groups and this size.  So the cache gets what a worker's reserve has left, and vLLM's own functions say here how
much of it a request needs and how many blocks it has.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import prod
from typing import Any

from vllm.model_executor.models import ModelRegistry
from vllm.v1.core import kv_cache_utils

from thaw_runtime.engine.kv_memory import MemoryPlan, State, too_small


def keeps_state(config: Any) -> bool:
    """``config`` is a VllmConfig.  A model of a hybrid family whose layers all have attention keeps none."""
    return bool(config.model_config.is_hybrid or config.model_config.is_attention_free)


def state_of(config: Any) -> State | None:
    """Return what each layer keeps of a sequence, or None for a model that keeps keys and values alone."""
    if not keeps_state(config):
        return None
    wanted = config.model_config
    made, _ = ModelRegistry.resolve_model_cls(wanted.architecture, model_config=wanted)
    if hasattr(made, "get_mamba_specs_from_config"):  # layers of several kinds
        kinds = [spec.shapes for spec in made.get_mamba_specs_from_config(config)]
    else:
        kinds = [made.get_mamba_state_shape_from_config(config)]
    widths = (max(shapes[0]) if len(shapes[0]) == 2 else prod(shapes[0][:2]) for shapes in kinds)
    return State(max(widths), max(sum(map(prod, shapes)) for shapes in kinds))


def request_bytes(config: Any, specs: Mapping[str, Any]) -> int:
    """Return the bytes of the cache that one request of the greatest length needs.  ``specs`` are the caches of all
    layers of the built model; each group of layers has blocks of its own."""
    groups = kv_cache_utils.get_kv_cache_groups(config, dict(specs))
    one_block = kv_cache_utils._pool_bytes_per_block(config, groups)  # the null block, which no request gets
    return int(one_block + kv_cache_utils._max_memory_usage_bytes_from_groups(config, groups))


def check_room(config: Any, specs: Mapping[str, Any], plan: MemoryPlan) -> None:
    """Raises MemoryTooSmall unless one request of ``max_model_len`` tokens fits into ``plan.kv`` bytes."""
    needed = request_bytes(config, specs)
    if needed > plan.kv:
        length = config.model_config.max_model_len
        raise too_small("", plan.reserve, plan.weights, plan.intermediates, needed, length)


def counted(plan: MemoryPlan, config: Any, core: Any) -> MemoryPlan:
    """Return the plan of a model that keeps a state with the blocks of the cache in ``core``, vLLM's EngineCore, and
    the tokens of requests of the greatest length that fit into them.  Another model's plan has them already."""
    if not keeps_state(config):
        return plan
    cache = core.scheduler.kv_cache_config
    n_requests = kv_cache_utils.get_max_concurrency_for_kv_cache_config(config, cache)
    return replace(plan, kv_blocks=cache.num_blocks, kv_tokens=int(n_requests * config.model_config.max_model_len))
