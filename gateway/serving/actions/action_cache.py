"""Deployed actions as this gateway knows them: read once, forgotten when an event says they changed."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence

import redis

from gateway.serving.actions.bounded_cache import BoundedCache
from relay.protocol.messages import ActionChanged
from relay.state import bus, redis_link, starts
from relay.state.action_lists import without_code
from relay.state.records import Records
from thaw import pools
from thaw.action import Action
from thaw.errors import NotFound
from thaw.ids import ActionName, Namespace

Names = list[ActionName]


class Actions:
    def __init__(self, client: redis.Redis, records: Records) -> None:
        self._redis, self._records = client, records
        self._lock = threading.Lock()
        self._known = BoundedCache[ActionName, Action]()
        self._by_model: dict[tuple[Namespace, str], ActionName] = {}

    def get(self, name: ActionName) -> Action:
        """Without its code, of which a tenant may have more than this process has memory.  Raises NotFound."""
        namespace, changes = namespace_of(name), self._known.changes
        known = self._known.get(namespace, name)
        if known is not None:
            return known
        action = without_code(self._records.action(namespace, name))
        self._known.keep(namespace, name, action, changes)
        return action

    def by_model(self, namespace: Namespace, model: str) -> Action:
        """The LLM action that an OpenAI client calls ``model``: by its name, else by its served name."""
        with self._lock:
            alias = self._by_model.get((namespace, model))
        try:
            return self._llm(alias or ActionName(f"{namespace}/{model.removeprefix(f'{namespace}/')}"))
        except NotFound:
            pass
        for action in self.list(namespace):
            if action.config is not None and action.config.model.served_name == model:
                with self._lock:
                    self._by_model[(namespace, model)] = action.name
                return self.get(action.name)  # a list carries heads alone
        raise NotFound(f"The model `{model}` does not exist.", hint="GET /v1/models lists yours")

    def list(self, namespace: Namespace, within: str = "") -> list[Action]:
        """The heads (relay/state/action_lists.py), newest first, from the state server; without pools, which are not
        deployed by users.  ``within``: the beginning of the names."""
        return [a for a in self._records.actions(namespace, within) if not pools.is_pool(a)]

    def names(self, namespace: Namespace, within: str = "") -> Names:
        """As list(), names alone."""
        return [name for name in self._records.action_names(namespace, within) if not pools.is_pool_name(name)]

    def some(self, namespace: Namespace, names: Sequence[ActionName]) -> Iterator[Action]:
        """The heads of these, one at a time."""
        return self._records.some_actions(namespace, names)

    def put(self, action: Action, *, last: str | None, old: Action | None = None, row: str = "") -> None:
        """See :meth:`Records.put_action`.  Raises Conflict."""
        self._records.put_action(action, last=last, old=old, row=row)
        self._changed(action.name)
        if action.served_by != action.name:
            self._changed(action.served_by)
        if old is not None and old.served_by != action.served_by:
            self._tell_end_of_pool(old)

    def delete(self, name: ActionName, version: str = "") -> Action:
        """``version``: delete no other.  Raises NotFound, Conflict."""
        action = self._records.delete_action(namespace_of(name), name, version)
        self._changed(name, deleted=True)
        self._tell_end_of_pool(action)
        return action

    def _tell_end_of_pool(self, gone: Action) -> None:
        """Announce the end of the pool that ``gone`` has left, if no other function has it."""
        pool = gone.served_by
        if pool != gone.name and not self._records.action_bytes(gone.namespace, pool):
            self._changed(pool, deleted=True)

    def _changed(self, name: ActionName, *, deleted: bool = False) -> None:
        self.forget(name)
        with redis_link.translated("say that an action changed"):
            pipe = self._redis.pipeline(transaction=True)
            starts.forget(pipe, name, deleted=deleted)
            bus.append(pipe, ActionChanged(name, deleted=deleted))
            pipe.execute()

    def forget(self, name: ActionName | None = None) -> None:
        with self._lock:
            self._by_model.clear()
        self._known.clear() if name is None else self._known.forget(namespace_of(name), name)

    def _llm(self, name: ActionName) -> Action:
        action = self.get(name)
        if not action.is_llm or pools.is_pool(action):
            raise NotFound(f"{name} is not an LLM")
        return action


def namespace_of(name: ActionName) -> Namespace:
    return Namespace(name.partition("/")[0])


def simple_name(name: ActionName) -> str:
    return name.rpartition("/")[2]
