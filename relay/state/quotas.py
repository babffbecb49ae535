"""The quotas that an operator has set for single namespaces."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import redis

from relay.protocol.messages import QuotasChanged
from relay.state import bus, keys, redis_link
from thaw import wire
from thaw.ids import Namespace
from thaw.quotas import OwnQuotas


class NamespaceQuotas:
    def __init__(self, client: redis.Redis) -> None:
        self._redis = client

    def of(self, namespace: Namespace) -> OwnQuotas:
        with redis_link.translated("read a namespace's quotas"):
            row: Any = self._redis.hget(keys.QUOTAS, namespace)
        return OwnQuotas() if row is None else wire.loads(OwnQuotas, row)

    def all(self) -> Mapping[Namespace, OwnQuotas]:
        with redis_link.translated("read the namespaces' quotas"):
            rows: Any = self._redis.hgetall(keys.QUOTAS)
        return {Namespace(redis_link.text(name)): wire.loads(OwnQuotas, row) for name, row in rows.items()}

    def change(self, namespace: Namespace, changes: Mapping[str, Any]) -> OwnQuotas:
        """Set some of a namespace's quotas; None means the default again.  Read, write and tell as one step: of two
        changes at once, neither is lost."""

        def write(pipe: Any) -> OwnQuotas:
            row = pipe.hget(keys.QUOTAS, namespace)
            found = replace(OwnQuotas() if row is None else wire.loads(OwnQuotas, row), **changes)
            pipe.multi()
            pipe.hset(keys.QUOTAS, namespace, wire.dumps(found))
            bus.append(pipe, QuotasChanged(namespace))
            return found

        with redis_link.translated("write a namespace's quotas"):
            client: Any = self._redis  # redis-py's types know no result of the callable
            changed: OwnQuotas = client.transaction(write, keys.QUOTAS, value_from_callable=True)
        return changed
