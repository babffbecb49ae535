"""What operators say of namespaces, and how many starts of each are in progress."""

from __future__ import annotations

from collections import Counter

from gateway.scheduler.view.entries import GroupView
from thaw.ids import ActionName, Namespace
from thaw.quotas import OwnQuotas


class Shares:
    def __init__(self, most_starts: int) -> None:
        self._most_starts = most_starts
        self._own: dict[Namespace, OwnQuotas] = {}
        self._starting: Counter[Namespace] = Counter()

    def take(self, namespace: Namespace, own: OwnQuotas) -> None:
        self._own[namespace] = own

    def weight_of(self, namespace: Namespace) -> float:
        own = self._own.get(namespace)
        return 1.0 if own is None or own.weight is None else own.weight

    def may_start(self, action: ActionName) -> bool:
        """Return False when the namespace has as many starts in progress as it may have."""
        namespace = _owner(action)
        own = self._own.get(namespace)
        most = self._most_starts if own is None or own.starts is None else own.starts
        return self._starting[namespace] < most

    def count(self, group: GroupView, by: int) -> None:
        """A group is new, or is about to be no start in progress any more."""
        if group.is_starting:
            namespace = _owner(group.plan.action)
            self._starting[namespace] += by
            if not self._starting[namespace]:
                del self._starting[namespace]


def _owner(action: ActionName) -> Namespace:
    return Namespace(action.partition("/")[0])
