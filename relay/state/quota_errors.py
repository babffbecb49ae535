"""The errors of writes that a namespace's quotas refuse."""

from __future__ import annotations

from relay.state.storage import Storage
from thaw.errors import Forbidden, RequestError, ThawError, Throttled
from thaw.ids import Namespace
from thaw.quotas import who_raises


def too_many_actions(namespace: Namespace, too_many: bool, n: int, storage: Storage) -> ThawError:
    if not too_many:
        return storage.too_much_code(namespace, n)
    allowed = storage.quotas_of(namespace).actions
    return Forbidden(
        f"The namespace has too many actions (count: {n}, allowed: {allowed}). {who_raises('actions', namespace)}.",
        hint="delete actions that nobody needs",
    )


def not_accepted(namespace: Namespace, what: str, n: int, storage: Storage) -> RequestError:
    if what == "quota":
        return storage.too_much_waits(namespace, n, storage.room_of_202s(namespace)[0])
    if what == "memory":
        return storage.full(n)
    allowed = storage.quotas_of(namespace).accepted
    return Throttled(
        f"Too many concurrent requests in flight (count: {n}, allowed: {allowed}). {who_raises('accepted', namespace)}."
    )
