"""vLLM's model loader for weights that arrive in a segment, registered with ``register_model_loader``."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader import utils as model_loader_utils
from vllm.model_executor.model_loader.base_loader import BaseModelLoader
from vllm.model_executor.model_loader.utils import process_weights_after_loading
from vllm.platforms import current_platform
from vllm.utils.torch_utils import set_default_torch_dtype

from relay.thread_account import BlockedTime
from thaw.tracing.trace import Phase
from thaw_runtime.engine.vllm import adapters
from thaw_runtime.engine.vllm.background_load import BackgroundLoad
from thaw_runtime.engine.vllm.current_start import current_start
from thaw_runtime.engine.vllm.fitting import of_filled_kinds
from thaw_runtime.engine.vllm.logits_noise import add_noise
from thaw_runtime.engine.vllm.packing import LayerPacker, Rehearsal
from thaw_runtime.engine.vllm.replaced import replaced
from thaw_runtime.engine.vllm.settings import engine_settings
from thaw_runtime.engine.vllm.window import check_filled, drop_foreign, set_window, whole_skeleton
from thaw_runtime.process.thread_accounts import OtherThreads

LOAD_FORMAT = "thaw_segment"


@register_model_loader(LOAD_FORMAT)
class SegmentLoader(BaseModelLoader):
    """Copies (and fuses) each tensor into the model's parameters while the next ones arrive.

    On a CPU, vLLM first builds the engine around the empty model: ``load_model`` returns at once, and load_postponed()
    brings the weights.  Then only the packing of one layer is left to do after the last byte.  On a GPU, for quantised
    weights, whose methods replace parameters, and for a model that takes adapters, whose layers vLLM wraps, the weights
    come before the rest is built, as in vLLM.
    """

    def download_model(self, model_config: Any) -> None:
        """Does nothing, because fetchd brings the bytes."""

    def create_model(self, vllm_config: Any, model_config: Any, prefix: str = "") -> torch.nn.Module:
        start, full = current_start(), _is_full(model_config)
        start.turn_to(Phase.MODEL_BEGIN)
        # vLLM notes every parameter of a new model, to be able to load a second set of weights.  That takes a third of
        # the time in which the model is built.
        noting = replaced(model_loader_utils, "record_metadata_for_reloading", lambda model: None)
        once = noting if model_config.quantization is None else nullcontext()
        with once, whole_skeleton() if full else nullcontext():
            model: torch.nn.Module = super().create_model(vllm_config, model_config, prefix)
        if vllm_config.lora_config is not None:
            adapters.prepare(vllm_config, model)
        if full:
            set_window(model, start.part.window)
        else:
            drop_foreign(model, start.part, start.tensors)
        if (seed := engine_settings().logits_noise) is not None and hasattr(model, "compute_logits"):
            add_noise(model, seed)
        return model

    def load_weights(self, model: torch.nn.Module, model_config: Any) -> None:
        _take_weights(model, model_config, None, None)

    def load_model(self, vllm_config: Any, model_config: Any, prefix: str = "") -> torch.nn.Module:
        is_replaced = model_config.quantization is not None or vllm_config.lora_config is not None
        if not current_platform.is_cpu() or is_replaced:
            return super().load_model(vllm_config, model_config, prefix)
        with set_default_torch_dtype(model_config.dtype), torch.device("cpu"):
            model = self.create_model(vllm_config, model_config, prefix)
        current_start().load = partial(_load_layer_by_layer, model, model_config)
        return model.eval()


def _load_layer_by_layer(model: torch.nn.Module, model_config: Any, rehearse: Callable[[], None]) -> None:
    start = current_start()
    computes = partial(start.part.computes, own=start.tensors) if _is_full(model_config) else None
    packer = LayerPacker(model, [t.name for t in start.tensors], OtherThreads(), computes)
    end = max((start.segment.locate(t.file, t.offset) + t.n_bytes for t in start.tensors), default=0)
    device = torch.device("cpu")
    with set_default_torch_dtype(model_config.dtype), device:
        _take_weights(model, model_config, packer, Rehearsal(start.segment, end, packer, rehearse))
        process_weights_after_loading(model, model_config, device)
    packer.restore()


def _is_full(model_config: Any) -> bool:
    """False for quantised weights: processing gives them other shapes, so the whole skeleton cannot wait for them."""
    return current_start().part.full and model_config.quantization is None


def _take_weights(
    model: torch.nn.Module, model_config: Any, packer: LayerPacker | None, rehearsal: Rehearsal | None
) -> None:
    start = current_start()
    start.phases.close()
    waited = BlockedTime()
    with start.trace.phase(Phase.LOAD_BEGIN) as notes, warnings.catch_warnings():
        # the views are read-only on purpose; nothing writes through them
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        parameters = {name for name, _ in model.named_parameters()}
        loaded = model.load_weights(start.arriving(waited, packer, rehearsal))
        notes.n_bytes = sum(t.n_bytes for t in start.tensors)
        notes.attrs |= {"wait_s": round(waited.seconds, 4), "waits_for": "fetch"}
        if packer is not None and rehearsal is not None:
            notes.attrs["threads_wait_s"] = round(packer.kernels.seconds, 4)
            notes.attrs["rehearsal_s"] = round(rehearsal.took_s, 4)
    start.trace.mark(Phase.ENGINE_BEGIN)
    if _is_full(model_config):
        later = {name for name in parameters if not start.part.computes(name.rpartition(".")[0], start.tensors)}
        tensors, deferred = start.part.rest(start.offered), packer.deferred if packer else ()
        complete = partial(check_filled, later)
        start.background = BackgroundLoad(model, start.segment, tensors, deferred, start.check, complete)
        parameters -= later
    if model_config.quantization is not None and loaded is not None:
        parameters = set(of_filled_kinds(model, parameters - loaded))
    check_filled(parameters, loaded)
