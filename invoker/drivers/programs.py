"""What runs in a container of each kind: arguments of its Python, whichever driver starts it."""

from __future__ import annotations

from typing import Final

from thaw.action import KIND_LLM, KIND_PYTHON

PROGRAMS: Final = {
    KIND_PYTHON: ("-m", "thaw_runtime.action.proxy"),
    KIND_LLM: ("-m", "thaw_runtime.llm.main"),
}
