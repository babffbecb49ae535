"""Pools: functions that differ in nothing but their adapter share instances, which are those of one more function.

That one is their pool.  It has the base model and all their settings, and its name is a hash of these (thaw/config.py),
so no list of pools is needed, and a pool never changes.  Requests of the functions wait for the pool's instances, and
the scheduler and the hosts see the pool alone (docs/decisions/0043-adapters-share-instances.md).
"""

from __future__ import annotations

import json
from dataclasses import replace

from thaw import wire
from thaw.action import POOL_MARK, POOL_VERSION, Action, Exec, Limits
from thaw.config import ModelConfig
from thaw.ids import ActionName


def pool_of(action: Action) -> Action | None:
    """The pool of a function with an adapter; None for any other."""
    config = action.config
    if config is None or not config.model.pool:
        return None
    base = replace(config, model=ModelConfig(config.model.uri))
    return Action(
        action.served_by,
        action.namespace,
        POOL_VERSION,
        Exec(action.exec.kind, json.dumps(wire.to_plain(base))),
        Limits(config.limits.timeout, config.resources.host_memory_mb, concurrency=config.limits.concurrency),
        config=base,
        keep_alive_s=config.scaling.keep_alive_s,
        max_instances=config.scaling.max_instances,
    )


def is_pool(action: Action) -> bool:
    return is_pool_name(action.name)


def is_pool_name(name: ActionName) -> bool:
    return name.rpartition("/")[2].startswith(POOL_MARK)
