"""Lists of deployed actions.

A tenant's actions may have gigabytes of code, and a hundred megabytes of parameters whose objects take thirty times as
much.  So a list is read row by row, and keeps of each action its head: all but its code, its packages and parameters,
and its annotations as far as they are short.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import redis

from relay.state import keys, redis_link
from thaw import wire
from thaw.action import Action
from thaw.errors import ProtocolError
from thaw.ids import ActionName, Namespace

_PART_BYTES: Final = 4 << 20
"""Rows that are read together."""
_ANNOTATIONS_BYTES: Final = 16 << 10
"""The annotations of one action in a list take no more, in JSON."""
_ALL_ANNOTATIONS_BYTES: Final = 2 << 20
"""The annotations of all entities in a list take no more."""


class AnnotationsLeft:
    """The annotations that a list still has room for."""

    def __init__(self) -> None:
        self._left = _ALL_ANNOTATIONS_BYTES

    def short(self, annotations: Mapping[str, object]) -> Mapping[str, object]:
        """As many as there is room for, at first those with a prefix: others than their author read these."""
        most_bytes = min(self._left, _ANNOTATIONS_BYTES)
        if (n_bytes := _n_bytes(annotations)) <= most_bytes:
            self._left -= n_bytes
            return annotations
        kept: set[str] = set()
        for name in sorted(annotations, key=lambda name: "/" not in name):
            n_bytes = _n_bytes({name: annotations[name]})
            if n_bytes <= most_bytes:
                kept.add(name)
                most_bytes -= n_bytes
                self._left -= n_bytes
        return {name: value for name, value in annotations.items() if name in kept}


class ActionLists:
    """All methods raise PlatformError."""

    _redis: redis.Redis

    def actions(self, namespace: Namespace, within: str = "") -> list[Action]:
        """The heads, newest first.  ``within``: the beginning of the names."""
        left = AnnotationsLeft()
        rows = self._rows(keys.actions(namespace), within)
        return sorted((_head(wire.loads(Action, row), left) for row in rows), key=lambda a: -a.updated_ms)

    def each_action(self, namespace: Namespace) -> Iterator[Action]:
        """The heads in any order, one at a time."""
        return (_head(wire.loads(Action, row)) for row in self._rows(keys.actions(namespace)))

    def action_names(self, namespace: Namespace, within: str = "") -> list[ActionName]:
        """Newest first.  ``within``: the beginning of the names."""
        rows = self._rows(keys.actions(namespace), within)
        found = [(-action.updated_ms, action.name) for action in (wire.loads(Action, row) for row in rows)]
        return [name for _, name in sorted(found, key=lambda one: one[0])]

    def some_actions(self, namespace: Namespace, names: Sequence[ActionName]) -> Iterator[Action]:
        """The heads of those that are still there, in this order."""
        wanted = [name.encode() for name in names]
        left = AnnotationsLeft()
        return (_head(wire.loads(Action, row), left) for row in self._in_parts(keys.actions(namespace), wanted))

    def all_actions(self) -> Iterator[Action]:
        """The heads of the actions of every namespace, one at a time, without those that another version of the
        platform wrote: one of them must not hide all others from the scheduler."""
        with redis_link.translated("list every action"):
            found = [redis_link.text(k) for k in self._redis.scan_iter(match=keys.actions("*"), count=500)]
        return (_head(action) for key in found for action in _readable(self._rows(key)))

    def _rows(self, key: str, within: str = "") -> Iterator[bytes]:
        with redis_link.translated("list actions"):
            names: Any = self._redis.hkeys(key)
        return self._in_parts(key, [name for name in names if name.startswith(within.encode())])

    def _in_parts(self, key: str, names: Sequence[bytes]) -> Iterator[bytes]:
        """Yield these values of a hash, read in parts."""
        with redis_link.translated("list actions"):
            pipe = self._redis.pipeline(transaction=False)
            for name in names:
                pipe.hstrlen(key, name)
            lengths = pipe.execute()
        part: list[bytes] = []
        n_bytes = 0
        for name, length in zip(names, lengths, strict=True):
            if part and n_bytes + length > _PART_BYTES:
                yield from self._part(key, part)
                part, n_bytes = [], 0
            part.append(name)
            n_bytes += length
        if part:
            yield from self._part(key, part)

    def _part(self, key: str, names: list[bytes]) -> Iterator[bytes]:
        with redis_link.translated("list actions"):
            rows: Any = self._redis.hmget(key, names)
        while rows:
            row = rows.pop(0)
            if row is not None:  # deleted meanwhile
                yield row


def without_code(action: Action) -> Action:
    return replace(action, exec=replace(action.exec, code=""))


def _head(action: Action, left: AnnotationsLeft | None = None) -> Action:
    """``left``: those of the list; None where no list is kept."""
    return replace(
        action,
        exec=replace(action.exec, code="", packages=(), main=""),
        parameters={},
        init_parameters={},
        annotations=(left or AnnotationsLeft()).short(action.annotations),
    )


def _n_bytes(plain: Mapping[str, object]) -> int:
    return len(json.dumps(plain))


def _readable(rows: Iterable[bytes]) -> Iterator[Action]:
    for row in rows:
        try:
            yield wire.loads(Action, row)
        except ProtocolError:
            continue
