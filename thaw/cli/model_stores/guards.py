"""A push and a removal of the same version exclude one another, on stores that have no locks.

::

    push:     write a stamp ── is a mark there? ── files ── index ── pointer ── delete the stamp
    removal:  write a mark ── is a stamp there? is it used? ── index away ── is it used now? ── files away

Each writes its own sign before it looks for the other's, so at least one of two at once sees the other and gives way.
A sign has a random name, and nobody but its writer takes it away while it counts.  The index is removed first: from
then on no host takes the version, so an interrupted removal has deleted nothing that anybody relies on.  A removal
checks again before each file: if it slept, others may have treated its mark as that of a killed one.  All ages are
differences of the store's own times.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from thaw.checkpoints import versions
from thaw.cli.model_stores.stored_object import Stored
from thaw.cli.model_stores.stores import Store
from thaw.clock import wall_ms
from thaw.errors import Conflict, ModelCorrupt, ModelNotFound, ModelUnsupported, PlatformError
from thaw.model import INDEX_NAME

_STAMP: Final = ("thaw-push.", ".stamp")
_MARK: Final = ("thaw-gc.", ".mark")
UNFINISHED_S: Final = 24 * 3600.0
"""A push that has written nothing for longer was cut for good."""
MARK_S: Final = 600.0
"""An older mark belongs to a removal that was killed; a running one ends itself earlier."""
_REMOVAL_S: Final = 300.0
_CLOCK: Final = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
"""It goes on while the machine sleeps, as the store's clock does.  macOS calls that one CLOCK_MONOTONIC."""


def is_stamp(name: str) -> bool:
    return name.startswith(_STAMP[0]) and name.endswith(_STAMP[1])


def is_mark(name: str) -> bool:
    return name.startswith(_MARK[0]) and name.endswith(_MARK[1])


def begin_push(place: Store) -> str:
    """Announce that ``place``, a version, is being written; return the stamp.  Raises Conflict while it is being
    removed."""
    stamp = _write_sign(place, _STAMP)
    found = place.objects()
    marks = {n: found[stamp].modified_s - o.modified_s for n, o in found.items() if is_mark(n)}
    if any(age_s < MARK_S for age_s in marks.values()):
        place.delete(stamp)
        raise Conflict(f"{place.uri} is being removed just now", hint="push again in a minute")
    for mark in marks:
        place.delete(mark)
    return stamp


def end_push(place: Store, stamp: str) -> None:
    with suppress(PlatformError):  # without the right to delete, the stamp stays and keeps the version for a day
        place.delete(stamp)


def _write_sign(place: Store, form: tuple[str, str]) -> str:
    name = secrets.token_hex(8).join(form)
    place.write(name, b"")
    return name


@dataclass(frozen=True, slots=True)
class Removed:
    """``kept`` is why a version stays; empty: it is gone, with ``n_bytes`` bytes."""

    uri: str
    n_bytes: int
    kept: str = ""


def would_remove(place: Store, name: Store, used_by: Callable[[], list[str]], grace_s: float) -> Removed:
    """Return the result that :func:`remove` would have.  It writes nothing, so it reads this machine's clock instead of
    the store's."""
    objects = place.objects()
    kept = _reason_to_keep(place, name, objects, wall_ms() / 1000, used_by, grace_s)
    return Removed(place.uri, sum(o.n_bytes for o in objects.values()), kept)


def remove(place: Store, name: Store, used_by: Callable[[], list[str]], grace_s: float) -> Removed:
    """Remove the version at ``place`` of the model ``name``, unless it is the newest one, is used, or was the newest
    one less than ``grace_s`` ago: a start may have chosen it then.  ``used_by`` names who uses the version now.

    Raises Conflict when a push comes in between, or the removal takes too long."""
    removal = _Removal(place)
    try:
        objects = place.objects()
        now_s, n_bytes = objects[removal.mark].modified_s, sum(o.n_bytes for o in objects.values())
        kept = _reason_to_keep(place, name, objects, now_s, used_by, grace_s)
        if not kept:
            removal.check_alone()
            kept = _take_index_away(place, name, used_by)
        if not kept:
            removal.delete_files()
        return Removed(place.uri, n_bytes, kept)
    finally:
        place.delete(removal.mark)
        place.delete_place()


class _Removal:
    """A removal of the version at ``place`` that has begun, with its own mark."""

    def __init__(self, place: Store) -> None:
        self._place, self._began_s = place, time.clock_gettime(_CLOCK)
        self.mark = _write_sign(place, _MARK)

    def check_alone(self) -> Mapping[str, Stored]:
        """The objects of the place.  Raises Conflict when a push has come, or may take the mark for a dead one's."""
        found = self._place.objects()
        if self.mark not in found or any(_counts(n, o, found[self.mark].modified_s) for n, o in found.items()):
            raise Conflict(f"{self._place.uri} is being pushed again", hint="leave it, or run this again later")
        if time.clock_gettime(_CLOCK) - self._began_s > _REMOVAL_S:
            raise Conflict(f"the removal of {self._place.uri} took too long", hint="run it again: it goes on")
        return found

    def delete_files(self) -> None:
        while found := sorted(n for n in self.check_alone() if not is_mark(n)):
            if INDEX_NAME in found:  # another removal has found somebody who uses it
                raise Conflict(f"{self._place.uri} is used again", hint="thaw model versions shows who uses what")
            self._place.delete(found[0])
        objects = self._place.objects()
        for name, sign in objects.items():
            if is_mark(name) and self.mark in objects and objects[self.mark].modified_s - sign.modified_s >= MARK_S:
                self._place.delete(name)  # a mark of a removal that was killed


def _counts(name: str, stamp: Stored, now_s: float) -> bool:
    return is_stamp(name) and now_s - stamp.modified_s < UNFINISHED_S


def _reason_to_keep(
    place: Store,
    name: Store,
    objects: Mapping[str, Stored],
    now_s: float,
    used_by: Callable[[], list[str]],
    grace_s: float,
) -> str:
    if any(_counts(n, o, now_s) for n, o in objects.items()):
        return "a push of it is under way"
    moved = name.objects().get(versions.POINTER_NAME)
    if _is_newest(place, name):
        return "it is the newest one"
    changed_s = max((o.modified_s for n, o in objects.items() if not is_mark(n)), default=0.0)
    if moved is not None:
        changed_s = max(changed_s, moved.modified_s)
    age_s = max(0.0, now_s - changed_s)  # the store's clock may be ahead of this machine's
    if age_s < grace_s:
        return f"it may have been the newest one until {age_s:.0f} s ago"
    return _used(used_by)


def _used(used_by: Callable[[], list[str]]) -> str:
    names = used_by()
    return f"{', '.join(names)} use{'s' if len(names) == 1 else ''} it" if names else ""


def _take_index_away(place: Store, name: Store, used_by: Callable[[], list[str]]) -> str:
    """Remove the index.  If somebody began to use the version before that, write it back and return who."""
    try:
        index = b"".join(place.read(INDEX_NAME))
        place.delete(INDEX_NAME)
    except ModelNotFound:
        index = None  # an earlier removal, or a push that was cut
    kept = "nobody has answered"
    try:
        kept = "it is the newest one" if _is_newest(place, name) else _used(used_by)
    finally:
        if kept and index is not None:
            place.write(INDEX_NAME, index)
    return kept


def _is_newest(place: Store, name: Store) -> bool:
    try:
        data = b"".join(name.read(versions.POINTER_NAME))
        return versions.short(versions.read_pointer(name.uri, data)) == versions.pinned(place.uri)
    except ModelNotFound:
        return False
    except (ModelCorrupt, ModelUnsupported):
        return True  # the name's meaning is unknown
