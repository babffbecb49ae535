"""The newest instructions that an engine may use on an x86 processor (THAW_CPU_CEILING).

Torch, oneDNN, MKL and vLLM each choose their kernels by what the processor has, so two processors round differently.
Below one ceiling they choose the same kernels.  It also makes a new processor compute what an old one would, which is
how the tests of the old ones run.  There is no ceiling above AMX, and no processor can be given what it lacks.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from types import MappingProxyType
from typing import Any, Final

ENVIRONMENT: Final[Mapping[str, Mapping[str, str]]] = {
    "avx2": {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"},
    "avx512": {
        "ATEN_CPU_CAPABILITY": "avx512",
        "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_VNNI",
        "MKL_ENABLE_INSTRUCTIONS": "AVX512",
    },
    "avx512_bf16": {"ATEN_CPU_CAPABILITY": "avx512", "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"},
}
"""The libraries' own ceilings.  They read these variables when they first compute."""
VARIABLES: Final = tuple(dict.fromkeys(name for settings in ENVIRONMENT.values() for name in settings))

_ABOVE: Final[Mapping[str, tuple[str, ...]]] = {
    "avx2": ("avx512", "avx10", "amx"),
    "avx512": ("avx512_bf16", "avx512_fp16", "avx10", "amx"),
    "avx512_bf16": ("avx512_fp16", "avx10", "amx"),
}
"""The beginnings of the names that torch gives to what lies above a ceiling."""


def limit_environment(ceiling: str, environ: MutableMapping[str, str]) -> None:
    environ.update(ENVIRONMENT.get(ceiling, {}))


def limit_torch(ceiling: str) -> None:
    """Hide from vLLM what the processor has above the ceiling: vLLM asks torch, which asks the processor only once."""
    if ceiling:
        import torch

        seen = below(ceiling, torch.cpu.get_capabilities())
        torch.cpu.get_capabilities = lambda: seen


def below(ceiling: str, capabilities: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the capabilities with everything above the ceiling said to be missing."""
    above = _ABOVE.get(ceiling, ())
    seen = {k: not k.startswith(above) if has is True else has for k, has in capabilities.items()}
    return MappingProxyType(seen)
