"""How a process gets an engine.  The engine registry holds one EngineLibrary for each engine.

A container imports this module before it spawns its engine's process, so this module imports nothing slow.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from thaw_runtime.engine.protocol import MakeEngine


def _nothing() -> None:
    return None


def _silent() -> str:
    return "an engine that says nothing of itself"


@dataclass(frozen=True, slots=True)
class EngineLibrary:
    """``load`` does the heavy import.  The other fields are for an engine that needs them.  ``prepare`` sets the
    environment before ``load``, also in the process that spawns the engine's.  ``warm_up`` imports further modules
    that a stem cell should have.  A container that is forked from a stem cell keeps the variables that ``environment``
    names.  ``describe`` says in a line what the engine computes with on this processor or device, within seconds.
    """

    load: Callable[[], MakeEngine]
    prepare: Callable[[], None] = _nothing
    warm_up: Callable[[], None] = _nothing
    environment: tuple[str, ...] = ()
    describe: Callable[[], str] = _silent
