"""vLLM's configuration for one start (arguments, architecture, memory), and a zygote's preparation for all starts."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from vllm.engine.arg_utils import EngineArgs
from vllm.platforms import current_platform
from vllm.plugins import load_general_plugins
from vllm.utils import cpu_resource_utils, mem_utils, numa_utils, platform_utils
from vllm.v1.sample import logits_processor

from relay.protocol.messages import LlmInit
from thaw.checkpoints.pooling import pooling_of
from thaw.errors import InitFailed, ModelUnsupported
from thaw_runtime.engine.kv_memory import CPU, GPU, BatchLimits, MemoryPlan, plan_stage
from thaw_runtime.engine.stage_memory import stage_memories
from thaw_runtime.engine.vllm import embeddings
from thaw_runtime.engine.vllm.adapters import lora_args
from thaw_runtime.engine.vllm.architectures import inspect_here, register_architecture
from thaw_runtime.engine.vllm.executors import StageExecutor
from thaw_runtime.engine.vllm.loader import LOAD_FORMAT
from thaw_runtime.engine.vllm.scheduler import StageScheduler
from thaw_runtime.engine.vllm.state_layers import keeps_state, state_of
from thaw_runtime.engine.vllm.window import PARTITION
from thaw_runtime.engine.vllm.worker import WORKER
from thaw_runtime.pipeline.stage_parts import StagePart
from thaw_runtime.weights.readable_segment import Segment
from thaw_runtime.weights.sidecars import model_config, read_sidecar

MAX_BATCHED_TOKENS = 2048  # vLLM's own default for a server on a CPU
PIPELINED_BATCHED_TOKENS = 512
"""Tokens of a batch in a pipeline: a prompt of 2,048 tokens is four batches, and four stages compute them at once."""
_LOOKS_AT_THE_MACHINE = (cpu_resource_utils, mem_utils, numa_utils, platform_utils)
ALLOWED_ARGS = frozenset(
    {
        "block_size",
        "max_num_batched_tokens",
        "max_num_seqs",
        "enable_prefix_caching",
        "enable_chunked_prefill",
        "seed",
        "quantization",
        "kv_cache_dtype",
        "hf_overrides",
    }
)


def engine_config(init: LlmInit, segment: Segment, part: StagePart, directory: str) -> Any:
    """A VllmConfig of the model whose sidecars are in ``directory``.  Raises InitFailed, ModelUnsupported."""
    inspect_here()
    name = register_architecture(model_config(segment))
    pools = embeddings.found(init, segment, name)
    engine = init.config.engine
    unknown = sorted(set(engine.args) - ALLOWED_ARGS)
    if unknown:
        allowed = ", ".join(sorted(ALLOWED_ARGS))
        raise InitFailed(f"engine.args.{unknown[0]} cannot be set here", hint=f"allowed: {allowed}")
    seqs = init.config.scaling.max_batch
    most = MAX_BATCHED_TOKENS if part.whole else PIPELINED_BATCHED_TOKENS
    args: dict[str, Any] = {
        "max_num_seqs": seqs,
        "max_num_batched_tokens": max(seqs, min(most, seqs * engine.max_model_len)),
        **engine.args,
    }
    if not part.whole:
        args |= _stage_args(part, args["max_num_seqs"])
    args |= {"dtype": engine.dtype, "max_model_len": engine.max_model_len, **lora_args(init.config)}

    def configured(length: int) -> Any:
        own = {} if pools is None else pools.args(engine.args, MAX_BATCHED_TOKENS, length)
        return _configured(directory, **{**args, "max_model_len": length, **own})

    config = _of_length(configured, directory, args, engine.max_model_len)
    if pools is not None:
        pools.check(config.model_config)
    elif is_embedding(config):  # vLLM takes a decoder without a head, like Qwen3Model, for an embedding model
        pooling_of(partial(read_sidecar, segment))
    if keeps_state(config) and not part.whole:
        raise ModelUnsupported(
            f"{config.model_config.architecture} has layers that keep a state, and runs in one stage",
            hint="remove scaling.stages from the function's config, or set scaling.max_stages to 1",
        )
    return config


def _of_length(configured: Callable[[int], Any], directory: str, args: Mapping[str, Any], asked: int) -> Any:
    """Return the configuration with ``asked`` tokens of context, or with the model's own length if that is shorter."""
    try:
        return configured(asked)
    except ValueError as e:
        if "max_model_len" not in str(e):
            raise
        length = _longest(directory, args)
        if length is None or length >= asked:
            raise
    return configured(length)


def _longest(directory: str, args: Mapping[str, Any]) -> int | None:
    """Return the length of the model's context as vLLM derives it, or None when the configuration fails for another
    reason."""
    try:
        config = EngineArgs(**_arguments(directory, {**args, "max_model_len": None})).create_model_config()
    except Exception:  # noqa: BLE001  the caller raises the error of the configuration that was asked for
        return None
    return int(config.max_model_len)


def _configured(directory: str, **args: Any) -> Any:
    return EngineArgs(**_arguments(directory, args)).create_engine_config()


def _arguments(directory: str, args: Mapping[str, Any]) -> dict[str, Any]:
    fixed = {
        "model": directory,
        "load_format": LOAD_FORMAT,
        "skip_tokenizer_init": True,
        "enforce_eager": True,
        "async_scheduling": False,  # the next batch would be scheduled before the tokens of this one are known
        "trust_remote_code": False,
        "kv_cache_memory_bytes": 1,
        "disable_log_stats": True,
        "worker_cls": WORKER,
    }
    return {**fixed, "distributed_executor_backend": "uni", **args}


def _stage_args(part: StagePart, batch: int) -> dict[str, Any]:
    """A group has one batch in flight for each stage, and each batch has up to ``batch`` requests."""
    os.environ[PARTITION] = ",".join(map(str, part.layer_counts))
    return {
        "pipeline_parallel_size": part.n_stages,
        "distributed_executor_backend": StageExecutor,
        "scheduler_cls": StageScheduler,
        "max_num_seqs": part.n_stages * batch,
    }


def plan_memory(init: LlmInit, segment: Segment, config: Any) -> MemoryPlan:
    """Return how this stage's reserve is divided, and tell ``config``.  Raises MemoryTooSmall."""
    limits = batch_limits(init, config)
    quantised = config.model_config.quantization is not None
    on_cpu = current_platform.is_cpu()
    stages = stage_memories(
        init,
        segment,
        limits.dtype,
        quantised=quantised,
        on_cpu=on_cpu,
        samples=not is_embedding(config),
        keeps_kv=keeps_kv(config),
        state=state_of(config),
    )
    plan = plan_stage(init.stage, stages, limits)
    set_memory(config, plan, whole=init.n_stages == 1)
    return plan


def set_memory(config: Any, plan: MemoryPlan, *, whole: bool) -> None:
    """Fix the memory of the engine that is built from ``config``, a VllmConfig."""
    cache = config.cache_config
    cache.kv_cache_memory_bytes = plan.kv
    if not whole:  # exactly as many blocks as in the other stages
        cache.num_gpu_blocks_override = plan.kv_blocks
    if not current_platform.is_cpu():
        # vLLM starts only if this share of the device is free.  Other workers may have the rest.
        cache.gpu_memory_utilization = min(1.0, plan.reserve / current_platform.get_device_total_memory())


def is_embedding(config: Any) -> bool:
    """``config`` is a VllmConfig."""
    return bool(config.model_config.runner_type == "pooling")


def keeps_kv(config: Any) -> bool:
    """Return whether the model has a KV cache.  vLLM allocates none for attention in both directions, whose tokens are
    all computed at once.  ``config`` is a VllmConfig."""
    return bool(config.model_config.attn_type != "encoder_only")


def batch_limits(init: LlmInit, config: Any) -> BatchLimits:
    """The limits of a stage's batches; ``config`` is its VllmConfig."""
    return BatchLimits(
        dtype=str(config.model_config.dtype).removeprefix("torch."),
        max_num_batched_tokens=config.scheduler_config.max_num_batched_tokens,
        max_num_seqs=-(-config.scheduler_config.max_num_seqs // init.n_stages),
        max_model_len=config.model_config.max_model_len,
        block_size=config.cache_config.block_size,
        device=CPU if current_platform.is_cpu() else GPU,
    )


# ── a zygote's work, once for all starts ─────────────────────────────────────────────────────────────────────────


def preload(architectures: Sequence[str], no_model: str) -> None:
    """Do what is the same for every model.  Computes no tensor and starts no thread.

    ``no_model`` is a directory with a config.json that belongs to no real model.
    """
    torch.set_num_threads(1)
    inspect_here()
    for name in architectures:
        register_architecture({"architectures": [name]})
    current_platform.register_triton_kernel_overrides()
    # Each call searches every module.  All modules that hold a kernel are imported by now.
    current_platform.register_triton_kernel_overrides = lambda: None
    if current_platform.is_cpu():
        # vLLM runs a program for this list in every start.  It looks up separately which cores a process may use.
        cores = cpu_resource_utils._get_cpu_list()
        cpu_resource_utils._get_cpu_list = lambda: cores
        _configured(no_model, max_model_len=64)  # the first configuration fills caches that later ones use
    # both search all installed distributions for extensions of the engine
    load_general_plugins()
    processors = logits_processor._load_logitsprocs_plugins()
    logits_processor._load_logitsprocs_plugins = lambda: list(processors)


def forget_surroundings() -> None:
    """Let vLLM read the machine and the limits of this process again.

    A stem cell imports and configures under the small limits of a waiting container.  When the stem cell is claimed,
    its limits rise.  vLLM would keep the old ones: it caches the control group's memory limit, for example.
    """
    for module in _LOOKS_AT_THE_MACHINE:
        for found in list(vars(module).values()):
            if callable(clear := getattr(found, "cache_clear", None)):
                clear()
