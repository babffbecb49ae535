"""LoRA adapters in vLLM's engine: they come and go while the engine computes.

vLLM reads an adapter from a directory.  Here that is a private one that lives for the time of the load.  The weights in
it are a link to the memory in which they came, so they are not copied before vLLM copies them into its slots.  The
caller that loads an adapter also says which one to replace, so vLLM's own eviction is not used.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Collection, Sequence
from itertools import count
from pathlib import Path
from typing import Any, Final

import torch
from vllm.lora.request import LoRARequest
from vllm.model_executor.layers.fused_moe import MoERunner
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.models import supports_lora
from vllm.platforms import current_platform

from thaw.checkpoints import adapter, checkpoint
from thaw.checkpoints.checkpoint import ADAPTER_CONFIG_NAME, ADAPTER_WEIGHTS_NAME
from thaw.config import LlmConfig
from thaw.errors import ErrorInfo, InstanceBusy, InstanceGone, ModelUnsupported, ThawError
from thaw.logs import print_traceback
from thaw.model import TensorInfo
from thaw_runtime.engine.protocol import AdapterFiles
from thaw_runtime.engine.vllm.errors import unusable_adapter
from thaw_runtime.engine.vllm.lora_on_cpu import GROUPED
from thaw_runtime.shown import shown

_PATH: Final = "adapter"
"""The path in a request. vLLM reads it only for an adapter that it does not have, which does not happen: every adapter
is loaded before the first request that names it."""


def lora_args(config: LlmConfig) -> dict[str, Any]:
    """vLLM's arguments for an engine of this function.  Each running request may name a different adapter."""
    slots = config.adapter_slots
    if not slots:
        return {}
    rank = config.engine.max_lora_rank
    return {"enable_lora": True, "max_loras": slots, "max_cpu_loras": slots, "max_lora_rank": rank}


def prepare(config: Any, model: torch.nn.Module) -> None:
    """Must be called before vLLM makes the places for adapters in ``model``.  ``config`` is its VllmConfig.  Raises
    ModelUnsupported."""
    config.lora_config.target_modules = adapted_modules(model)
    if current_platform.is_cpu():
        current_platform.get_punica_wrapper = lambda: GROUPED


def adapted_modules(model: torch.nn.Module) -> list[str]:
    """Return the last parts of the names of the linear layers, which adapters may change.  Raises ModelUnsupported for
    a model that takes no adapters."""
    if not supports_lora(model):
        raise _takes_none(model, "vLLM has no adapters for it")
    modules = dict(model.named_modules())
    if any(isinstance(m, MoERunner) for m in modules.values()):
        raise _takes_none(model, "it has experts, whose adapters were not tried")
    return sorted({name.rpartition(".")[2] for name, m in modules.items() if isinstance(m, LinearBase)})


def _takes_none(model: torch.nn.Module, why: str) -> ModelUnsupported:
    return ModelUnsupported(
        f"{shown(type(model).__name__, 60)} takes no adapters: {why}",
        hint="merge the adapter into its base model and push the result as a model of its own",
    )


class Adapters:
    """The adapters of one engine.  All methods are called on the engine thread."""

    def __init__(self, worker: Any, config: LlmConfig, base: Sequence[TensorInfo]) -> None:
        """``worker`` is vLLM's worker, which has places for some adapters.  When they are full, it would evict any
        adapter, even one in use.  ``base`` holds the tensors of the model."""
        self._worker, self._n_slots, self._max_rank = worker, config.adapter_slots, config.engine.max_lora_rank
        self._base = tuple(base) if self._n_slots else ()
        self._known: dict[str, LoRARequest] = {}
        self._numbers = count(1)

    def request_of(self, name: str) -> LoRARequest | None:
        """Return vLLM's request field for adapter ``name``, or None for the base model.  Raises InstanceGone when the
        engine does not have the adapter."""
        if not name:
            return None
        if (found := self._known.get(name)) is None:
            raise InstanceGone(f"the engine does not have the adapter {shown(name, 200)}")
        return found

    def try_load(self, files: AdapterFiles, in_use: Collection[str]) -> ErrorInfo | None:
        """Load an adapter, or return the error.  An adapter that is ``in_use`` is not replaced."""
        try:
            self._load(files, in_use)
        except ThawError as e:
            return e.info()
        except Exception as e:  # noqa: BLE001  the edge to vLLM: an adapter that it cannot use fails alone
            print_traceback()
            return unusable_adapter(files.name, e).info()
        return None

    def _load(self, files: AdapterFiles, in_use: Collection[str]) -> None:
        replaces = "" if files.replaces == files.name else files.replaces
        if replaces and replaces in in_use:
            raise InstanceBusy(f"the adapter {shown(replaces, 200)} is in use")
        is_there = files.name in self._known
        if not is_there and replaces not in self._known and len(self._known) >= self._n_slots:
            raise InstanceBusy(f"all {self._n_slots} places for adapters are taken")
        replaced = self._known.pop(replaces, None)
        if replaced is not None:
            self._worker.remove_lora(replaced.lora_int_id)
        if not is_there:
            self._known[files.name] = self._loaded(files)

    def _check(self, files: AdapterFiles) -> None:
        """Check the shapes, because vLLM would accept tensors that are too small and answer wrongly.  Raises
        ModelUnsupported."""
        fd, n_bytes = files.weights_fd, os.fstat(files.weights_fd).st_size
        length = checkpoint.header_bytes(ADAPTER_WEIGHTS_NAME, os.pread(fd, checkpoint.LENGTH_BYTES, 0), n_bytes)
        header = os.pread(fd, length, checkpoint.LENGTH_BYTES)
        tensors = checkpoint.parse_header(ADAPTER_WEIGHTS_NAME, header, n_bytes)
        adapter.check(shown(files.name, 200), tensors, "the model of this instance", self._base, self._max_rank)

    def _loaded(self, files: AdapterFiles) -> LoRARequest:
        self._check(files)
        directory = Path(tempfile.mkdtemp(prefix="adapter-"))  # see use_own_tmp in thaw_runtime/engine/main.py
        try:
            (directory / ADAPTER_CONFIG_NAME).write_bytes(files.config)
            os.symlink(f"/proc/self/fd/{files.weights_fd}", directory / ADAPTER_WEIGHTS_NAME)
            number = next(self._numbers)
            try:
                self._worker.add_lora(LoRARequest(files.name, number, str(directory)))
            except Exception:
                self._worker.remove_lora(number)  # it may have got a slot
                raise
        finally:
            shutil.rmtree(directory, ignore_errors=True)
        return LoRARequest(files.name, number, _PATH)
