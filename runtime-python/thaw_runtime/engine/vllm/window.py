"""A full worker's model in a pipeline: the skeleton of the whole model, of which a window of layers computes.

::

    layer 0 ──────── a ══════ b ──────── n        a ══ b  this stage's layers: fetched first, they compute
          │  later   │ window │  later   │        ────    arrive while the pipeline answers, compute nothing

The modules, attention layers and KV cache are those of a whole model from the start.  To become a whole worker, the
stage fills the remaining layers (background_load.py) and moves the window; it builds nothing.  Memory that no thread
has touched costs nothing.  A low-memory worker has the modules of its stage only.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence, Set
from contextlib import contextmanager
from typing import Final

import torch
from vllm.distributed import parallel_state
from vllm.model_executor.models.utils import PPMissingLayer

from thaw.checkpoints.checkpoint import layer_of
from thaw.errors import ModelCorrupt
from thaw.model import TensorInfo
from thaw_runtime.engine.vllm import transformers_window
from thaw_runtime.engine.vllm.stage import StageGroup
from thaw_runtime.pipeline.stage_parts import StagePart

PARTITION: Final = "VLLM_PP_LAYER_PARTITION"


@contextmanager
def whole_skeleton() -> Iterator[None]:
    """While the block runs, vLLM makes models with all layers: the pipeline group says that there is one stage."""
    group, partition = parallel_state._PP, os.environ.pop(PARTITION, None)
    parallel_state._PP = StageGroup(0, 1)
    try:
        yield
    finally:
        parallel_state._PP = group
        if partition is not None:
            os.environ[PARTITION] = partition


def set_window(model: torch.nn.Module, layers: tuple[int, int]) -> None:
    """From the next batch on, layers ``[a, b)`` compute."""
    for module in model.modules():
        if hasattr(module, "start_layer") and hasattr(module, "end_layer"):
            module.start_layer, module.end_layer = layers
    transformers_window.set_window(model, layers, parallel_state.get_pp_group())


def drop_foreign(model: torch.nn.Module, part: StagePart, own: Sequence[TensorInfo]) -> None:
    """Remove the modules outside the layers that this low-memory stage never calls, because they hold memory.

    Some families make embedding, head and final norm in every stage.
    """
    for path, module in list(model.named_modules()):
        outer = layer_of(path + ".") is None and next(module.parameters(recurse=False), None) is not None
        if outer and not part.needs_module(path, own):
            parent, _, name = path.rpartition(".")
            setattr(model.get_submodule(parent), name, PPMissingLayer())
    if not part.first:
        transformers_window.enter_later(model, PPMissingLayer)


def check_filled(parameters: Set[str], filled: Set[str] | None) -> None:
    """Raises ModelCorrupt for a parameter that no tensor filled: it would hold the old bytes of its memory.

    ``filled`` comes from the model's loader; it is None for loaders that do not report the names.
    """
    missing = sorted(parameters - filled) if filled is not None else []
    if missing:
        raise ModelCorrupt(f"the checkpoint lacks {len(missing)} of the model's tensors, first {missing[0]}")
