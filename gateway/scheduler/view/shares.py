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
        self._lifted: ActionName | None = None
        self._put_off: dict[Namespace, None] = {}
        self.is_eased = False  # a namespace that might not start anything may do so now

    def take(self, namespace: Namespace, own: OwnQuotas) -> None:
        self._own[namespace] = own
        self._free(namespace)
        self.is_eased = True

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
        if action == self._lifted:
            self._lifted = None

    def lift(self, action: ActionName) -> bool:
        """Examine an action: if it does not wait() again before settle(), it leaves the line.  Return False when it
        does not stand there."""
        waits = action in self._waiting.get(_owner(action), ())
        self._lifted = action if waits else None
        return waits

    def settle(self) -> None:
        if self._lifted is not None:
            namespace = _owner(self._lifted)
            del self._waiting[namespace][self._lifted]
            if not self._waiting[namespace]:
                del self._waiting[namespace]
            self._lifted = None

    def woken(self) -> Iterator[ActionName]:
        """Yield the actions that may start now, until their namespaces have as many starts as they may have.  The
        caller examines each one before the next."""
        while self._freed:
            namespace, _ = self._freed.popitem()
            for name in list(self._waiting.get(namespace, ())):
                if not self.may_start(name):
                    break
                yield name

    def put_off(self, action: ActionName) -> None:
        """The rest of this one's namespace is woken at the next end of one of its starts, or by resume()."""
        self._put_off[_owner(action)] = None

    def resume(self) -> None:
        for namespace in self._put_off:
            self._free(namespace)
        self._put_off.clear()

    def _free(self, namespace: Namespace) -> None:
        if namespace in self._waiting:
            self._freed[namespace] = None

    def count(self, group: GroupView, by: int) -> None:
        """A group is new, or is about to be no start in progress any more."""
        if group.is_starting:
            namespace = _owner(group.plan.action)
            self.is_eased |= by < 0 and self._starting[namespace] >= self.most_starts(namespace)
            self._starting[namespace] += by
            if not self._starting[namespace]:
                del self._starting[namespace]
            if by < 0:
                self._free(namespace)


def _owner(action: ActionName) -> Namespace:
    return Namespace(action.partition("/")[0])
