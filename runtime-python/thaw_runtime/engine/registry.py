"""The engines, by the name that THAW_LLM_ENGINE gives them.

A container knows its engine before it knows its function, because the heavy import begins with the container.  So the
container's image determines the engine, and sets the variable.  Without containers, the host's invoker passes its own
variable on.
"""

from __future__ import annotations

import os
from functools import cache
from typing import Final

from thaw import extensions
from thaw.errors import ThawError
from thaw.extensions import Registry
from thaw.settings import SettingError
from thaw_runtime.engine.library import EngineLibrary

VARIABLE: Final = "THAW_LLM_ENGINE"
DEFAULT: Final = "vllm"

ENGINES: Final = Registry[EngineLibrary](
    extensions.ENGINES,
    {
        "vllm": "thaw_runtime.engine.vllm.library:LIBRARY",
    },
)


def find_engine(name: str) -> EngineLibrary:
    """Import the engine's library module, which imports nothing heavy yet.  Raises SettingError for an unknown name."""
    found = ENGINES.find(name)
    if found is None:
        raise SettingError(f"{VARIABLE}={name!r} is not an engine", hint=f"set it to one of: {ENGINES.known()}")
    return found


@cache
def engine_of_process() -> EngineLibrary:
    """The engine that the environment names.  Ends the process if the environment names an unknown engine."""
    try:
        return find_engine(os.environ.get(VARIABLE) or DEFAULT)
    except ThawError as e:
        raise SystemExit(f"{e.message}; {e.hint}") from e
