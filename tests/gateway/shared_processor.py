"""A processor that two namespaces have just used, so that its requests take turns."""

from __future__ import annotations

import time
from collections.abc import Callable

from gateway.processor import Processor
from thaw.ids import Namespace

NEVER_S = 1000.0


def shared(n_turns: int = 1, longest_s: float = NEVER_S, now_s: Callable[[], float] = time.monotonic) -> Processor:
    processor = Processor(n_turns, longest_s, now_s, shared_s=NEVER_S)
    for name in ("one", "another"):
        with processor.computing(Namespace(name)):
            pass
    return processor
