"""The items that an engine thread takes between two steps."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

from thaw.errors import ErrorInfo
from thaw_runtime.engine.protocol import AdapterFiles, ConsolidationEnded, EmbedRequest, EngineRequest
from thaw_runtime.engine.vllm.grammars import Constrained

EndConsolidation = Callable[[ConsolidationEnded], None]
EndLoad = Callable[[ErrorInfo | None], None]


@dataclass(frozen=True, slots=True)
class Unprepared:
    """A request whose grammar cannot be followed."""

    request_id: str
    error: ErrorInfo


@dataclass(frozen=True, slots=True)
class AdapterWanted:
    files: AdapterFiles
    ended: EndLoad

    def end(self, error: ErrorInfo | None) -> None:
        os.close(self.files.weights_fd)
        self.ended(error)


Item = EngineRequest | EmbedRequest | Constrained | Unprepared | AdapterWanted | str | EndConsolidation
"""A str is the id of a request to abort."""


def refuse(items: list[Item], error: ErrorInfo) -> None:
    """Tell the waiting callers that the engine has ended.  The code that tracks open requests reports the end to
    them."""
    for item in items:
        if isinstance(item, AdapterWanted):
            item.end(error)
        elif callable(item):
            item(error)
