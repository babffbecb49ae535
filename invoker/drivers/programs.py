"""The program in a container of each kind: the arguments of its Python, the same for every driver."""

from __future__ import annotations

from typing import Final

from thaw.action import KIND_LLM, KIND_PYTHON

PROGRAMS: Final = {
    KIND_PYTHON: ("-m", "thaw_runtime.action.proxy"),
    KIND_LLM: ("-m", "thaw_runtime.llm.main"),
}
