"""Imports vLLM, when this module is imported, without Inductor, torch's compiler, and below the processor's ceiling.

vLLM changes some functions of Inductor when it is imported (vllm.env_override), and imports nearly all of Inductor for
that, which takes a sixth of an engine's imports.  It leaves them as they are where Inductor cannot be imported.  Thaw
compiles no model (env.py), so nothing needs the changes; code that needs Inductor itself finds it later.

vLLM also chooses the library of its kernels now, by what torch says of the processor (cpu_ceiling.py).
"""

from __future__ import annotations

import importlib
import sys
from typing import Final

from thaw_runtime.engine.vllm.cpu_ceiling import limit_torch
from thaw_runtime.engine.vllm.settings import engine_settings

_COMPILER: Final = "torch._inductor"


def _import_vllm() -> None:
    if "vllm" in sys.modules or _COMPILER in sys.modules:
        return
    limit_torch(engine_settings().cpu_ceiling)
    sys.modules[_COMPILER] = None  # type: ignore[assignment]  # an import of it raises ModuleNotFoundError
    try:
        importlib.import_module("vllm")
    except ImportError:
        pass  # there is no vLLM, or one that cannot do without Inductor; who imports it next finds out which
    finally:
        del sys.modules[_COMPILER]


_import_vllm()
