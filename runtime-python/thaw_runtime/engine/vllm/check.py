"""Checks without weights whether a start would succeed: makes the configuration, builds the model, and tries it.

On a CPU, memory that nobody writes to costs nothing, so a large model is built as quickly as a small one.  The empty
model is compared with the checkpoint's tensors (fitting.py).  The smallest quantised layer of each kind is filled with
zeros, prepared and computed, because only this shows whether this device's kernels can compute it.  Then the engine is
started around the empty model, as one worker and as the stages of a pipeline (trial.py).  On a GPU an empty model takes
the memory of a full one, which others need, so there the configuration alone is judged: vLLM compares the quantisation
with the device's capability in it.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import torch
import vllm
from vllm.config import set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.platforms import current_platform
from vllm.utils.torch_utils import set_default_torch_dtype

from relay.protocol.messages import LlmInit
from thaw.errors import DeveloperError, ModelUnsupported, PlatformError, ThawError
from thaw_runtime.engine.kv_memory import DTYPE_BYTES, StageMemory, geometry, held_bytes, layer_count, plan_stage
from thaw_runtime.engine.protocol import Checked
from thaw_runtime.engine.stage_memory import slots_bytes
from thaw_runtime.engine.vllm import text_side, trial
from thaw_runtime.engine.vllm.adapters import adapted_modules
from thaw_runtime.engine.vllm.configuration import (
    batch_limits,
    engine_config,
    forget_surroundings,
    is_embedding,
    keeps_kv,
)
from thaw_runtime.engine.vllm.embeddings import check_tasks
from thaw_runtime.engine.vllm.errors import translated
from thaw_runtime.engine.vllm.fitting import check_tensors
from thaw_runtime.engine.vllm.state_layers import keeps_state, state_of
from thaw_runtime.engine.vllm.world_of_one import world_of_one
from thaw_runtime.pipeline.stage_parts import StagePart
from thaw_runtime.shown import shown
from thaw_runtime.weights.readable_segment import Segment
from thaw_runtime.weights.sidecars import materialised, model_config, model_tensors, reads_more_than_text

_MOST_TRIED: Final = 128 << 20
"""The largest layer, in bytes, that is computed: it fits into the memory bound of a check."""
_KERNEL: Final = re.compile(r"_C(?:::|' object has no attribute ')(\w+)")
"""Matches torch's name of a kernel that vLLM's library for this processor does not have."""
_TEXT_ALONE: Final = "the model also reads pictures or sound; its language model is served, which answers text alone"
_OTHER_DEVICE: Final = "set another engine.dtype, or run the model on another device or with a newer engine"
_NEXT_STEP: Final = "correct the model's config.json or the engine settings of the function"


def check(init: LlmInit, segment: Segment) -> Checked:
    """See :meth:`thaw_runtime.engine.protocol.Engine.check`."""
    forget_surroundings()
    method = _quantisation(init, segment)
    with materialised(segment) as directory, tempfile.TemporaryDirectory() as meeting:
        config, began_to_build = None, False
        try:
            config = engine_config(init, segment, StagePart.of(init), str(directory))
            _check_memory(init, segment, config, None)
            most_stages = 0
            notes: list[str] = []
            read = text_side.reading(directory, config)  # before the model takes its part of the check's memory
            if began_to_build := current_platform.is_cpu():
                _check_memory(init, segment, config, _build(config, segment, meeting))
                most_stages, notes = _try_stages(init, segment, config, str(directory))
        except ThawError:
            raise
        except Exception as e:  # the edge to vLLM
            said = translated(e)
            if not isinstance(said, DeveloperError):
                raise PlatformError("the model, built empty, takes more memory than a check may") from e
            if method and (began_to_build or "quantization" in str(e)):
                raise _unsupported_quantisation(method, e) from e
            said.hint = said.hint or _NEXT_STEP
            raise said from e
    length, asked = config.model_config.max_model_len, init.config.engine.max_model_len
    if length < asked:
        notes.insert(0, _shorter(length, asked))
    if reads_more_than_text(segment):
        notes.insert(0, _TEXT_ALONE)
    return Checked(f"vLLM {vllm.__version__}", length, tuple(notes), is_embedding(config), most_stages, read)


def _quantisation(init: LlmInit, segment: Segment) -> str:
    """Return the method by which the weights are, or shall be, quantised; empty without quantisation."""
    found = model_config(segment).get("quantization_config")
    own = found.get("quant_method") if isinstance(found, dict) else None
    return str(init.config.engine.args.get("quantization") or own or "")


def _shorter(length: int, asked: int) -> str:
    return f"the model's context is {length} tokens, so engine.max_model_len is {length} and not {asked}"


def _check_memory(init: LlmInit, segment: Segment, config: Any, built_bytes: int | None) -> None:
    """Check that one worker can hold the whole model.  In a pipeline each stage has the same share of the model and of
    the memory, so the check covers it, too.  Raises MemoryTooSmall.

    config.json may be wrong about the bytes per stored number.  So ``built_bytes``, the size of the weights in the
    model that was built, counts if it is smaller.  Before the model is built, weights count as if they were stored in
    four bytes."""
    if not init.reserve_bytes:
        return
    plain, limits = model_config(segment), batch_limits(init, config)
    stored_bytes = init.stages[0].weight_bytes
    if built_bytes is None:
        weights = stored_bytes * DTYPE_BYTES[limits.dtype] // 4
    else:
        weights = min(built_bytes, held_bytes(stored_bytes, plain, limits.dtype))
    shape = geometry(
        plain,
        layer_count(plain),
        last_stage=not is_embedding(config),
        keeps_kv=keeps_kv(config),
        state=state_of(config),
    )
    weights += slots_bytes(init, shape, limits.dtype, on_cpu=current_platform.is_cpu())
    plan_stage(0, [StageMemory(init.reserve_bytes, weights, shape)], limits)


def _build(config: Any, segment: Segment, meeting: str) -> int:
    """Build the model without weights; return the bytes that they take.  ``meeting`` is an empty directory."""
    method, wanted = f"file://{Path(meeting) / 'world'}", config.model_config
    with world_of_one(), set_current_vllm_config(config):
        parallel_state.init_distributed_environment(1, 0, method, 0, "gloo")
        parallel_state.ensure_model_parallel_initialized(1, 1, 1, 1)
        with set_default_torch_dtype(wanted.dtype), torch.device("cpu"):
            trial.shorten(wanted.hf_config, wanted.hf_text_config)
            model = initialize_model(vllm_config=config)
            if config.lora_config is not None:
                adapted_modules(model)
            if is_embedding(config):
                check_tasks(model.pooler.get_supported_tasks())
            n_bytes = _n_bytes(model)
            if tensors := model_tensors(segment):
                check_tensors(model, tensors, quantised=wanted.quantization is not None)
            if wanted.quantization is not None:
                for layer in _smallest_of_each_kind(model):
                    _try(layer)
    config.compilation_config.static_forward_context.clear()  # it would keep layers, whose memory the trials need
    return n_bytes


def _try_stages(init: LlmInit, segment: Segment, config: Any, directory: str) -> tuple[int, list[str]]:
    """Try the model as one worker and in stages.  Return the most stages that it can have, 0 if their number has no
    limit here, and a note about the limit.  Raises ModelUnsupported for a model that cannot compute at all, or not in
    the number of stages that the function asks for."""
    _try_each(init, segment, 1, directory)
    scaling = init.config.scaling
    most = scaling.stages or scaling.max_stages
    if most == 1 or is_embedding(config) or init.config.adapter_slots or not model_tensors(segment):
        return 0, []
    try:
        if keeps_state(config):
            raise ModelUnsupported("its layers keep a state, and a pipeline passes on keys and values alone")
        n_stages = min(trial.STAGES, most, config.model_config.get_total_num_hidden_layers())
        _try_each(init, segment, n_stages, directory)
    except DeveloperError as e:
        if scaling.stages is not None:
            raise ModelUnsupported(
                f"the model cannot run in {scaling.stages} stages: {e.message}",
                hint="remove scaling.stages from the function's config",
            ) from e
        return 1, [f"the model runs in one stage: {e.message}"]
    return 0, []


def _try_each(init: LlmInit, segment: Segment, n_stages: int, directory: str) -> None:
    """Raises ModelUnsupported with the name of the stage that cannot compute, and the reason."""
    for one in trial.trials(init, segment, n_stages):
        try:
            trial.run(one, segment, directory)
        except ModelUnsupported as e:
            stage = "" if n_stages == 1 else f"stage {one.stage + 1} of {n_stages} of "
            missing = _KERNEL.search(e.message)
            reason = f"it has no kernel {missing[1]:.60} for it on {_device()}" if missing else e.message
            raise ModelUnsupported(f"the engine cannot compute {stage}this model: {reason}", hint=_OTHER_DEVICE) from e


def _smallest_of_each_kind(model: torch.nn.Module) -> Iterator[LinearBase]:
    kinds: dict[tuple[object, ...], LinearBase] = {}
    for layer in model.modules():
        if isinstance(layer, LinearBase) and not isinstance(layer.quant_method, UnquantizedLinearMethod):
            kind = (type(layer.quant_method), *((name, p.dtype) for name, p in layer.named_parameters()))
            if kind not in kinds or _n_bytes(layer) < _n_bytes(kinds[kind]):
                kinds[kind] = layer
    return (layer for layer in kinds.values() if _n_bytes(layer) <= _MOST_TRIED)


def _n_bytes(layer: torch.nn.Module) -> int:
    return sum(p.numel() * p.element_size() for p in layer.parameters())


def _try(layer: LinearBase) -> None:
    """Raises whatever the kernels raise when the layer cannot be prepared or computed on this device."""
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.zero_()
        layer.quant_method.process_weights_after_loading(layer)
        layer.quant_method.apply(layer, torch.zeros(2, layer.input_size))


def _unsupported_quantisation(method: str, error: Exception) -> ModelUnsupported:
    missing = _KERNEL.search(str(error))
    reason = f"it has no kernel {missing[1]:.60} for it" if missing else translated(error).message.rstrip(". ")
    return ModelUnsupported(
        f"the engine cannot compute {shown(method, 40)} weights on {_device()}: {reason}",
        hint="push the model without quantisation, or quantised by another method (docs/models.md)",
    )


def _device() -> str:
    return "a CPU" if current_platform.is_cpu() else str(current_platform.device_name)
