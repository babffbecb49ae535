"""How many of oneDNN's kernels each layer of a model keeps.

oneDNN makes a kernel for each number of rows.  Its own cache is bounded (ONEDNN_PRIMITIVE_CACHE_CAPACITY, env.py), but
each layer that vLLM prepares keeps the kernels of the last 32 sizes of a batch as well, and the layers share them.  A
layer keeps fewer here, so that oneDNN's cache alone decides how much memory the kernels take (kv_memory.py).
"""

from __future__ import annotations

from typing import Any, Final

SIZES: Final = 16
"""The sizes of a batch whose kernels a layer keeps.  Five kernels of each, in models of the known families, are fewer
than oneDNN's cache holds."""


def install(layers: Any) -> None:
    """Let each layer that vLLM prepares from now on keep the kernels of ``SIZES`` sizes of a batch.

    ``layers``: the module vllm.model_executor.layers.utils.  A build for some processors has no such kernels.
    """
    try:
        create = layers.ops.create_onednn_mm
    except AttributeError:
        return

    def create_with_few(weight: Any, primitive_cache_size: int = SIZES) -> Any:
        return create(weight, min(SIZES, primitive_cache_size))

    layers.ops.create_onednn_mm = create_with_few
