"""A torch.distributed world of one process, without the threads of a world of many.

vLLM makes a dozen groups, each with gloo, whose event loops check every 10 ms whether they shall end.  That is more
than a thousand wake-ups a second in an engine that has nothing to do (bench/warm.py).  A process of Thaw is alone in
its world (docs/pipeline.md), so every collective returns what it was given.  torch's *fake* groups do that without
threads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch.distributed
import torch.testing._internal.distributed.fake_pg  # registers the backend


@contextmanager
def world_of_one() -> Iterator[None]:
    """While the block runs, groups that would use gloo get no event loop.  Other backends are left alone."""
    made = torch.distributed.init_process_group, torch.distributed.new_group
    torch.distributed.init_process_group, torch.distributed.new_group = map(_without_gloo, made)
    try:
        yield
    finally:
        torch.distributed.init_process_group, torch.distributed.new_group = made


def _without_gloo(make: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(make)
    def making(*args: Any, **options: Any) -> Any:
        if options.get("backend") == torch.distributed.Backend.GLOO:
            options["backend"] = torch.distributed.Backend.FAKE
        return make(*args, **options)

    return making
