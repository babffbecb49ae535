"""How a process gets vLLM: the entry of the engine registry.  It imports nothing of vLLM until a process loads it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from thaw_runtime.engine.library import EngineLibrary
from thaw_runtime.engine.vllm import env

if TYPE_CHECKING:
    from thaw_runtime.engine.protocol import MakeEngine


def _load() -> MakeEngine:
    from thaw_runtime.engine.vllm.engine import VllmEngine

    return VllmEngine


def _warm_up() -> None:
    from thaw_runtime.engine.vllm.warm import warm_up

    warm_up()


def _describe() -> str:
    from thaw_runtime.engine.vllm.kernels import kernels

    return kernels().line()


LIBRARY: Final = EngineLibrary(_load, env.prepare, _warm_up, env.KEPT, _describe)
