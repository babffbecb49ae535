"""The prefixes of models that single namespaces may run, beside the prefixes in THAW_MODELS for all namespaces."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import redis

from relay.protocol.messages import ModelsAllowedChanged
from relay.state import bus, keys, redis_link
from thaw import wire
from thaw.action import Action
from thaw.ids import Namespace
from thaw.model_uri import ModelPolicy


class AllowedModels:
    def __init__(self, client: redis.Redis) -> None:
        self._redis = client

    def of(self, namespace: Namespace) -> tuple[str, ...]:
        with redis_link.translated("read which models are allowed"):
            row: Any = self._redis.hget(keys.ALLOWED_MODELS, namespace)
        return () if row is None else wire.loads(tuple[str, ...], row)

    def all(self) -> Mapping[Namespace, tuple[str, ...]]:
        with redis_link.translated("read which models are allowed"):
            rows: Any = self._redis.hgetall(keys.ALLOWED_MODELS)
        return {Namespace(redis_link.text(name)): wire.loads(tuple[str, ...], row) for name, row in rows.items()}

    def add(self, namespace: Namespace, prefixes: Sequence[str]) -> tuple[str, ...]:
        """Return what the namespace has now."""
        return self._change(namespace, lambda had: (*had, *(p for p in dict.fromkeys(prefixes) if p not in had)))

    def remove(self, namespace: Namespace, prefixes: Sequence[str]) -> tuple[str, ...]:
        """Return what the namespace has now."""
        return self._change(namespace, lambda had: tuple(p for p in had if p not in prefixes))

    def _change(self, namespace: Namespace, change: Callable[[tuple[str, ...]], tuple[str, ...]]) -> tuple[str, ...]:
        """Read, write and tell the schedulers as one step.  So of two changes at once, neither is lost, and a gateway
        that ends right after a change has announced it."""

        def write(pipe: Any) -> tuple[str, ...]:
            row = pipe.hget(keys.ALLOWED_MODELS, namespace)
            found = change(() if row is None else wire.loads(tuple[str, ...], row))
            pipe.multi()
            pipe.hset(keys.ALLOWED_MODELS, namespace, wire.dumps(found))
            bus.append(pipe, ModelsAllowedChanged(namespace))
            return found

        with redis_link.translated("write which models are allowed"):
            client: Any = self._redis  # redis-py's types know no result of the callable
            changed: tuple[str, ...] = client.transaction(write, keys.ALLOWED_MODELS, value_from_callable=True)
        return changed


class ModelLeave:
    """Whether an action's model may be run now: by the setting for all, or by its namespace's own prefixes."""

    def __init__(self, policy: ModelPolicy, allowed: AllowedModels) -> None:
        self.policy, self.allowed = policy, allowed

    def check(self, action: Action) -> None:
        """Raises Forbidden, BadRequest, and PlatformError when the state server does not answer."""
        for uri in _uris(action):
            self.check_uri(action.namespace, uri)

    def check_uri(self, namespace: Namespace, uri: str) -> None:
        """As :meth:`check`, for a model that no action names yet."""
        self.policy.check(namespace, uri, self.allowed.of(namespace))

    def check_among(self, action: Action, more: Sequence[str]) -> None:
        """As :meth:`check`, with the prefixes that were read before.  Raises Forbidden, BadRequest."""
        for uri in _uris(action):
            self.policy.check(action.namespace, uri, more)


def _uris(action: Action) -> Iterator[str]:
    if action.config is not None:
        yield action.config.model.uri
        if action.config.model.adapter:
            yield action.config.model.adapter
