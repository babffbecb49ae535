"""Which functions with adapters share the instances of a pool (thaw/pools.py)."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import redis

from relay.state import keys, redis_link
from thaw.ids import ActionName, Namespace


def members(client: redis.Redis, namespace: Namespace) -> dict[ActionName, tuple[ActionName, ...]]:
    """Return the functions of each pool, in the order of their names.  Raises Unavailable."""
    with redis_link.translated("read which functions share instances"):
        rows: Any = client.hgetall(keys.pools(namespace))
    found: dict[ActionName, list[ActionName]] = defaultdict(list)
    for function, pool in sorted((redis_link.text(f), redis_link.text(p)) for f, p in rows.items()):
        found[ActionName(pool)].append(ActionName(function))
    return {pool: tuple(functions) for pool, functions in found.items()}
