"""The engines, by the name that THAW_LLM_ENGINE gives them.

A container knows its engine before it knows its function: the heavy import begins with the container.  So the engine
belongs to the image of the container, which sets the variable.  Without containers the host's invoker passes it on.
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
    """Imports the library's own module, and nothing heavy yet.  Raises SettingError for a name nobody registered."""
    found = ENGINES.find(name)
    if found is None:
        raise SettingError(f"{VARIABLE}={name!r} is not an engine", hint=f"set it to one of: {ENGINES.known()}")
    return found


@cache
def engine_of_process() -> EngineLibrary:
    """The engine that the environment names.  Ends a process whose environment names none that there is."""
    try:
        return find_engine(os.environ.get(VARIABLE) or DEFAULT)
    except ThawError as e:
        raise SystemExit(f"{e.message}; {e.hint}") from e
