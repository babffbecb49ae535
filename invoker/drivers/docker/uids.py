"""A uid for each container, which no other live container of its engine has.  Pure.

The kernel counts some things by uid, over all containers: inotify instances and watches, pending signals, message
queues, pipe buffers, keys.  With one uid for all, a function that takes 128 inotify instances leaves none to its
neighbours.

The engine's labels say which uids its containers have, those of an earlier invoker and of other hosts too.  This file
notes uids that are about to become labels.  A uid comes back into use as late as possible, after all others.  Hosts
that share an engine begin at different places of the range, because they do not see the containers that another one is
about to create.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Final, Self

from thaw.errors import PlatformError
from thaw.settings import SettingError

_RANGE: Final = re.compile(r"\A([0-9]{1,10})-([0-9]{1,10})\Z")
_LEAST: Final = 1000
"""Uids below it belong to a machine's own users."""
_MOST: Final = 2**31 - 1
"""Some file systems and programs take larger ones for negative numbers."""
_NOBODY: Final = frozenset({65_534, 65_535})
"""The kernel's uid for those that it does not know, which others have, too; and -1 in 16 bits."""

_MOST_MAPPED: Final = 65_535
"""An engine with a user namespace of its own maps 65,536 uids, as /etc/subuid gives them by convention."""


@dataclass(frozen=True, slots=True)
class UidRange:
    """Both ends are in it.  The gid of a container is the same number."""

    first: int
    last: int

    @classmethod
    def parse(cls, text: str) -> Self:
        """Raises SettingError."""
        found = _RANGE.match(text)
        first, last = (int(found[1]), int(found[2])) if found else (0, 0)
        if not _LEAST <= first <= last <= _MOST:
            raise SettingError(
                f"THAW_CONTAINER_UIDS={text!r} is no range of uids",
                hint=f"use FIRST-LAST within {_LEAST} and {_MOST}, such as {DEFAULT_RANGE.first}-{DEFAULT_RANGE.last}",
            )
        return cls(first, last)

    def check_mapped(self) -> None:
        """Raises SettingError if an engine that maps the uids of its containers may have none for this range."""
        if self.last > _MOST_MAPPED:
            raise SettingError(
                f"THAW_CONTAINER_UIDS={self.first}-{self.last} has uids that no container of this engine can have: it "
                "is rootless, or has userns-remap",
                hint=f"use FIRST-LAST within {_LEAST} and {_MOST_MAPPED}, such as {_LEAST}-{min(_NOBODY) - 1}",
            )

    @property
    def n_uids(self) -> int:
        return self.last - self.first + 1


DEFAULT_RANGE: Final = UidRange(2_000_000_000, 2_000_065_535)
"""No distribution gives these to anything: systemd's page on uids calls them unused."""


class Uids:
    def __init__(self, uids: UidRange, owner: str) -> None:
        """``owner`` decides where in the range this host begins."""
        self._range = uids
        digest = hashlib.sha256(owner.encode()).digest()
        self._next = int.from_bytes(digest[:8]) % uids.n_uids
        self._of: dict[str, int] = {}

    def take(self, container_id: str, live: Collection[int] = ()) -> int:
        """The container's uid, the same one whenever it is asked for.  ``live``: the uids of all containers that the
        engine has.  Raises PlatformError when none is free."""
        known = self._of.get(container_id)
        if known is not None:
            return known
        taken = {*live, *self._of.values(), *_NOBODY}
        n_uids = self._range.n_uids
        for step in range(min(n_uids, len(taken) + 1)):
            place = (self._next + step) % n_uids
            uid = self._range.first + place
            if uid not in taken:
                self._next = (place + 1) % n_uids
                self._of[container_id] = uid
                return uid
        raise PlatformError(
            f"all {n_uids} uids of THAW_CONTAINER_UIDS are taken", hint="give the host's containers a longer range"
        )

    def release(self, container_id: str) -> None:
        """The container is gone, with all its processes.  Unknown ones are no error."""
        self._of.pop(container_id, None)
