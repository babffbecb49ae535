"""A trial of an empty model: one stage is started without its weights, and computes a short prompt and a token.

Only this shows that a stage can compute: that vLLM's own class takes part in a pipeline, that its tensors can be sent,
that this processor has the kernels, and that they take the engine's type.  Each stage is tried in a fork, so that none
sees what another one left behind, and a fork that crashes is an answer, too.

No weight is read.  Linear layers give zeros of the right shape.  Experts and layers with a method of their own compute
with zeros, the first ones until ``_MOST_PREPARED`` bytes are prepared; the others, which are like them, give zeros.
"""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from typing import Any, Final, NoReturn

import torch
from vllm.model_executor.layers.fused_moe.runner.moe_runner_interface import MoERunnerInterface
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.utils import process_weights_after_loading
from vllm.utils.torch_utils import set_default_torch_dtype
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.engine.core import EngineCore

from relay.protocol.messages import LlmInit, StageShape
from thaw import partition
from thaw.checkpoints.checkpoint import parts_of
from thaw.errors import DeveloperError, ModelUnsupported, PlatformError, ThawError
from thaw.logs import print_traceback
from thaw.plan import StageRole
from thaw_runtime.engine.kv_memory import layer_count
from thaw_runtime.engine.vllm import transformers_window
from thaw_runtime.engine.vllm.configuration import engine_config
from thaw_runtime.engine.vllm.current_start import starting_from
from thaw_runtime.engine.vllm.errors import translated
from thaw_runtime.engine.vllm.executors import SegmentExecutor, StageExecutor, rehearse_whole
from thaw_runtime.engine.vllm.loader import SegmentLoader
from thaw_runtime.engine.vllm.scheduler import FollowerCore
from thaw_runtime.engine.vllm.stage import Tensors, to_host
from thaw_runtime.engine.vllm.state_layers import request_bytes
from thaw_runtime.engine.vllm.translation import vllm_request
from thaw_runtime.pipeline.stage_parts import StagePart
from thaw_runtime.process.start_trace import StartTrace
from thaw_runtime.weights.readable_segment import Segment
from thaw_runtime.weights.sidecars import model_config, model_tensors

STAGES: Final = 3
"""The stages of the pipeline that is tried: one that is first, one between, one that is last.  Any other number of
stages has only stages of these kinds."""
_LONGEST_BUILT: Final = 128 * 1024
"""The longest context, in tokens, for which the model is built: its tables of positions are the only memory that is
written to."""
_LENGTH: Final = 256
"""The context of a trial, in tokens."""
_REQUESTS: Final = 2
_MOST_PREPARED: Final = 96 << 20
"""All layers together.  A kernel's own form of the weights takes as much again, within the memory of a check."""
_MOST_ZEROED: Final = 1 << 20
_MOST_SAID: Final = 32_000
_DEADLINE_S: Final = 60
_LOAD_FORMAT: Final = "thaw_trial"
_OF_THE_HOST: Final = (-signal.SIGKILL, -signal.SIGALRM)
"""Ends of a fork that say nothing about the model: the host had too little memory, or was too slow."""


def shorten(*configs: Any) -> None:
    """Let a model be built with short tables of positions."""
    for config in configs:
        if (getattr(config, "max_position_embeddings", None) or 0) > _LONGEST_BUILT:
            config.update({"max_position_embeddings": _LONGEST_BUILT})


def trials(init: LlmInit, segment: Segment, n_stages: int) -> list[LlmInit]:
    """Return the plan of each stage that a trial of ``n_stages`` computes.  A first stage that can become the whole
    model is one more."""
    engine = replace(init.config.engine, max_model_len=min(_LENGTH, init.config.engine.max_model_len))
    scaling = replace(init.config.scaling, max_batch=_REQUESTS)
    init = replace(init, config=replace(init.config, engine=engine, scaling=scaling))
    if n_stages == 1:
        return [init]
    parts = parts_of(model_tensors(segment), layer_count(model_config(segment)))
    bounds = partition.split(parts, n_stages)
    low = tuple(StageShape(b, init.reserve_bytes, 0, StageRole.LOW) for b in bounds)
    full = (replace(low[0], role=StageRole.FULL), *low[1:])
    return [
        replace(init, stage=k, n_stages=n_stages, layers=bounds[k], role=shapes[k].role, stages=shapes)
        for k, shapes in [(0, full), *((k, low) for k in range(n_stages))]
    ]


def run(init: LlmInit, segment: Segment, directory: str) -> None:
    """Compute the stage of ``init`` in a fork.  Raises ModelUnsupported with what the engine says, or for a fork that
    crashed, and PlatformError if the host had too little memory or was too slow."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.close(reading)
        _end_with_answer(init, segment, directory, writing)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        said = pipe.read()
    _, status = os.waitpid(child, 0)
    if said:
        code, _, message = said.decode(errors="replace").partition("\n")
        if code == PlatformError.__name__:
            raise PlatformError(message)
        raise ModelUnsupported(message)
    if status:
        exit_code = os.waitstatus_to_exitcode(status)
        if exit_code in _OF_THE_HOST:
            raise PlatformError(f"the trial of stage {init.stage + 1} of {init.n_stages} was ended ({exit_code})")
        raise ModelUnsupported(f"the engine crashed ({exit_code})")


def _end_with_answer(init: LlmInit, segment: Segment, directory: str, writing: int) -> NoReturn:
    signal.alarm(_DEADLINE_S)
    try:
        _compute(init, segment, directory)
    except ThawError as e:
        said = e
    except Exception as e:  # noqa: BLE001  the edge to vLLM
        print_traceback()
        said = translated(e)
    else:
        os._exit(0)
    code = (ModelUnsupported if isinstance(said, DeveloperError) else PlatformError).__name__
    os.write(writing, f"{code}\n{said.message}".encode()[:_MOST_SAID])
    os._exit(0)


def _compute(init: LlmInit, segment: Segment, directory: str) -> None:
    """Start the stage and compute.  ``translated`` makes one of Thaw's errors of what this raises."""
    part = StagePart.of(init)
    config = engine_config(init, segment, part, directory)
    config.load_config.load_format = _LOAD_FORMAT
    shorten(config.model_config.hf_config, config.model_config.hf_text_config)
    with starting_from(segment, StartTrace(), part, None):
        if not part.whole:
            stage: Any = FollowerCore(config, _OneStage, log_stats=False).model_executor
            with transformers_window.weightless_steps(stage.runner.model if part.full else None) as steps:
                stage.rehearse()
            if steps:
                raise ModelUnsupported(
                    f"its decoder has a step without weights ({min(steps)}), which every stage would do"
                )
            return
        core: Any = EngineCore(config, _WholeModel, log_stats=False)
        rehearse_whole(core, lambda request: core.add_request(vllm_request(request, None, core.request_block_hasher)))


class _WholeModel(SegmentExecutor):
    def determine_available_memory(self) -> Any:
        return [_REQUESTS * request_bytes(self.vllm_config, self.driver_worker.worker.get_kv_cache_spec())]


class _OneStage(_WholeModel, StageExecutor):
    """A stage without others: what it receives is zeros, and what it computes is made a message that goes nowhere."""

    def compute(self, output: SchedulerOutput, received: Tensors) -> Tensors:
        computed = super().compute(output, received)
        to_host(computed, output.total_num_scheduled_tokens)
        return computed


@register_model_loader(_LOAD_FORMAT)
class EmptyLoader(SegmentLoader):
    """Builds the model of a start and loads nothing into it."""

    def load_model(self, vllm_config: Any, model_config: Any, prefix: str = "") -> torch.nn.Module:
        with set_default_torch_dtype(model_config.dtype), torch.device("cpu"), torch.no_grad():
            model = self.create_model(vllm_config, model_config, prefix)
            for parameter in model.parameters():
                if parameter.numel() * parameter.element_size() <= _MOST_ZEROED:
                    parameter.zero_()
            left = _MOST_PREPARED
            for module in model.modules():
                left -= _prepare(module, left)
            process_weights_after_loading(model, model_config, torch.device("cpu"))
        return model.eval()


def _prepare(module: Any, left: int) -> int:
    """Let a layer compute without its weights.  Return the bytes that it computes with, at most ``left``."""
    n_bytes = _n_bytes(module)
    if isinstance(module, MoERunnerInterface):
        if n_bytes > left:
            module.forward = _zeros_like_the_input
            module.routed_experts.quant_method = None  # vLLM passes over them
        return 0  # its experts are a layer of their own
    if getattr(module, "quant_method", None) is None:
        return 0
    if n_bytes > left or isinstance(module.quant_method, UnquantizedLinearMethod | UnquantizedEmbeddingMethod):
        module.quant_method = _ZeroMethod(module.quant_method)
        return 0
    for parameter in module.parameters():
        parameter.zero_()
    return n_bytes


class _ZeroMethod:
    """Stands for the method of a layer, and gives zeros as wide as its output.  vLLM prepares no weights for it."""

    def __init__(self, method: Any) -> None:
        self._method = method

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        sizes = (getattr(layer, name, None) for name in ("output_size_per_partition", "output_size"))
        width = next((size for size in sizes if size is not None), None)
        return x.new_zeros(*x.shape[:-1], layer.weight.shape[0] if width is None else width)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._method, name)


def _n_bytes(module: torch.nn.Module) -> int:
    return sum(p.numel() * p.element_size() for p in module.parameters())


def _zeros_like_the_input(hidden_states: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    return torch.zeros_like(hidden_states)
