"""The quotas of namespaces, their starts that are in progress, and the actions that wait for one of these to end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from gateway.scheduler.view.entries import GroupView
from thaw.ids import ActionName, Namespace
from thaw.quotas import OwnQuotas


class Shares:
    def __init__(self, most_starts: int) -> None:
        self._most_starts = most_starts
        self._own: dict[Namespace, OwnQuotas] = {}
        self._starting: Counter[Namespace] = Counter()
        self._waiting: dict[Namespace, dict[ActionName, None]] = {}
        self._freed: dict[Namespace, None] = {}  # waiting namespaces that may have a place now

    def take(self, namespace: Namespace, own: OwnQuotas) -> None:
        self._own[namespace] = own
        self._free(namespace)

    def weight_of(self, namespace: Namespace) -> float:
        own = self._own.get(namespace)
        return 1.0 if own is None or own.weight is None else own.weight

    def most_starts(self, namespace: Namespace) -> int:
        own = self._own.get(namespace)
        return self._most_starts if own is None or own.starts is None else own.starts

    def may_start(self, action: ActionName) -> bool:
        """Return False when the namespace has as many starts in progress as it may have."""
        namespace = _owner(action)
        return self._starting[namespace] < self.most_starts(namespace)

    def wait(self, action: ActionName) -> None:
        """The action is to be among woken() when it may start; it keeps its place if it waits already."""
        self._waiting.setdefault(_owner(action), {})[action] = None

    def woken(self) -> Iterator[ActionName]:
        """Yield the actions that may start now, until their namespaces have as many starts as they may have.  The
        caller decides about a start before the next one."""
        while self._freed:
            namespace, _ = self._freed.popitem()
            line = self._waiting.get(namespace, {})
            while line and self.may_start(name := next(iter(line))):
                del line[name]
                yield name
            if not line:
                self._waiting.pop(namespace, None)

    def _free(self, namespace: Namespace) -> None:
        if namespace in self._waiting:
            self._freed[namespace] = None

    def count(self, group: GroupView, by: int) -> None:
        """A group is new, or is about to be no start in progress any more."""
        if group.is_starting:
            namespace = _owner(group.plan.action)
            self._starting[namespace] += by
            if not self._starting[namespace]:
                del self._starting[namespace]
            if by < 0:
                self._free(namespace)


def _owner(action: ActionName) -> Namespace:
    return Namespace(action.partition("/")[0])
