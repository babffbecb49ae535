"""The quota of instances that a namespace's actions keep while nobody calls (``min_instances``).

Nothing evicts them, so without a quota one namespace would have all hosts.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace

import redis

from gateway.serving.actions.action_cache import Actions
from gateway.serving.actions.quotas import QuotaBook
from gateway.serving.routing.routes import version_key
from gateway.serving.scaling.limits import least_of, rescaled
from relay.state.records import Records
from relay.state.rewriting import rewrite_action
from thaw.action import Action
from thaw.errors import Conflict, Forbidden, NotFound
from thaw.ids import ActionName, Namespace
from thaw.pools import is_pool
from thaw.quotas import who_raises
from thaw.standing import RESOURCE_MARK


class KeptInstances:
    def __init__(self, client: redis.Redis, records: Records, actions: Actions, quotas: QuotaBook) -> None:
        self._client, self._records, self._actions, self._quotas = client, records, actions, quotas

    def count(self, namespace: Namespace) -> int:
        """How many instances the namespace's actions keep.  Functions of one pool keep the same ones.  Raises
        PlatformError."""
        return sum(self._least(namespace).values())

    def check(self, action: Action, old: Action | None) -> int:
        """Return how many instances more the namespace keeps with the action than with ``old``, which it replaces;
        instances that are kept already are never refused.  Raises Forbidden when the namespace would keep too many."""
        added, kept = self._added(action, old)
        self._check(action.namespace, added, kept)
        return added

    def check_written(self, action: Action, old: Action | None, added: int) -> None:
        """Check the action once more when it is written: of several that are written at once, each sees the others
        then.  ``added``: what check() returned.  Raises Forbidden, and the action keeps as many as before, and has the
        annotations of ``old``, so that a client which notes its writes in them does not find this one.  A mark of
        ``old`` stands for no config any more where another one was written with this one, which stays.  A new action
        goes again."""
        added_now, kept = self._added(action, old)
        added = max(added, added_now)
        try:
            self._check(action.namespace, added, kept)
        except Forbidden:
            if old is None:
                self._take_back(action)
            else:
                self._rescale(action, old, max(0, least_of(action) - added))
            raise

    def _added(self, action: Action, old: Action | None) -> tuple[int, int]:
        """Return how many more are kept with the action, and how many are kept then."""
        least = least_of(action)
        if not least or (old is not None and old.served_by == action.served_by and least <= least_of(old)):
            return 0, 0  # without a look at the others
        others = self._least(action.namespace, but=action.name)
        kept = sum((others | {action.served_by: least}).values())
        before = others if old is None else others | {old.served_by: least_of(old)}
        return max(0, kept - sum(before.values())), kept

    def _least(self, namespace: Namespace, but: ActionName | None = None) -> dict[ActionName, int]:
        """How many are kept, by whose instances they are."""
        actions = self._records.each_action(namespace)
        return {a.served_by: least_of(a) for a in actions if a.name != but and not is_pool(a)}

    def _check(self, namespace: Namespace, added: int, kept: int) -> None:
        allowed = self._quotas.of(namespace).kept
        if added and kept > allowed:
            raise Forbidden(
                f"The namespace's actions would keep too many instances (count: {kept}, allowed: {allowed}). "
                f"{who_raises('kept', namespace)}.",
                hint="keep fewer: thaw action scale NAME --min N; with an adapter, min_instances in the config",
            )

    def _take_back(self, action: Action) -> None:
        with suppress(NotFound):
            if self._records.action(action.namespace, action.name).version == action.version:
                self._actions.delete(action.name)

    def _rescale(self, action: Action, old: Action, least: int) -> None:
        """An action with an adapter needs another pool, which comes with another version."""
        before = old.annotations if action.version == old.version else _without_spec(old.annotations)

        def less(written: Action) -> Action:
            annotations = _with_old(written.annotations, action.annotations, old.annotations, before)
            return replace(rescaled(written, {"min_instances": least}), annotations=annotations)

        if not action.adapter:
            with suppress(NotFound):  # deleted meanwhile
                rewrite_action(self._client, action.namespace, action.name, less)
            return
        major, minor, patch = version_key(action.version)
        new = replace(less(action), version=f"{major}.{minor}.{patch + 1}")
        with suppress(Conflict):  # somebody has written a later one, which is checked in its turn
            self._actions.put(new, last=action.version, old=action)


def _with_old(
    is_: Mapping[str, object], wrote: Mapping[str, object], old: Mapping[str, object], before: Mapping[str, object]
) -> dict[str, object]:
    """Return ``is_`` with ``before`` in place of the entries that were written over ``old`` and not changed since."""
    undone = {key for key in wrote if wrote[key] != old.get(key) and is_.get(key) == wrote[key]}
    return {**{k: v for k, v in is_.items() if k not in undone}, **{k: before[k] for k in undone & before.keys()}}


def _without_spec(annotations: Mapping[str, object]) -> Mapping[str, object]:
    """The config that was written stays, so a resource's mark must not stand for the config of before."""
    mark = annotations.get(RESOURCE_MARK)
    if not isinstance(mark, dict):
        return annotations
    return {**annotations, RESOURCE_MARK: {k: v for k, v in mark.items() if k != "spec"}}
