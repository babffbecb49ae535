"""A push and a removal of the same version exclude one another, on stores that have no locks.

::

    push:     write STAMP ── is MARK there? ── files ── index ── pointer ── delete STAMP
    removal:  write MARK ── is STAMP there? is it used? ── index away ── is it used now? ── files away ── delete MARK

Each writes its own sign before it looks for the other's, so at least one of two at once sees the other and gives way.
The index goes first: from then on no host takes the version, and a removal that is cut has taken nothing that anybody
was promised.  All ages are differences of the store's own times.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from thaw import versions
from thaw.cli.stores import Store, Stored
from thaw.errors import Conflict, ModelCorrupt, ModelNotFound, ModelUnsupported, PlatformError, ThawError
from thaw.model import INDEX_NAME

STAMP: Final = "thaw-push.stamp"
MARK: Final = "thaw-gc.mark"
UNFINISHED_S: Final = 24 * 3600.0
"""A push that has written nothing for longer was cut for good."""
MARK_S: Final = 600.0
"""A mark that is older is of a removal that was killed; a living one ends itself before."""
_REMOVAL_S: Final = 300.0


def begin_push(place: Store) -> None:
    """Announce that ``place``, a version, is being written.  Raises Conflict while it is being removed."""
    place.write(STAMP, b"")
    found = place.objects()
    if MARK not in found:
        return
    if found[STAMP].modified_s - found[MARK].modified_s < MARK_S:
        place.delete(STAMP)
        raise Conflict(f"{place.uri} is being removed just now", hint="push again in a minute")
    place.delete(MARK)


def end_push(place: Store) -> None:
    with suppress(PlatformError):  # whoever may write and not delete leaves a stamp, which keeps the version for a day
        place.delete(STAMP)


@dataclass(frozen=True, slots=True)
class Removed:
    """``kept`` is why a version stays; empty: it is gone, and so many bytes with it."""

    uri: str
    n_bytes: int
    kept: str = ""


def remove(
    place: Store, name: Store, used_by: Callable[[], list[str]], grace_s: float, *, dry_run: bool = False
) -> Removed:
    """Remove the version at ``place`` of the model ``name``, unless it is the newest one, is used, or was the newest
    one less than ``grace_s`` ago: a start may have chosen it then.  ``used_by`` names who uses the version now."""
    began_s = time.monotonic()
    place.write(MARK, b"")
    gone = False
    try:
        objects = place.objects()
        n_bytes = sum(o.n_bytes for o in objects.values())
        if kept := _reason_to_keep(place, name, objects, used_by, grace_s):
            return Removed(place.uri, n_bytes, kept)
        if not dry_run:
            if kept := _take_index_away(place, name, used_by):
                return Removed(place.uri, n_bytes, kept)
            gone = True
            _delete_files(place, objects, began_s)
        return Removed(place.uri, n_bytes)
    finally:
        if not gone:
            place.delete(MARK)


def _reason_to_keep(
    place: Store, name: Store, objects: Mapping[str, Stored], used_by: Callable[[], list[str]], grace_s: float
) -> str:
    now_s = objects[MARK].modified_s
    if STAMP in objects and now_s - objects[STAMP].modified_s < UNFINISHED_S:
        return "a push of it is under way"
    moved = name.objects().get(versions.POINTER_NAME)
    if _is_newest(place, name):
        return "it is the newest one"
    changed_s = max((o.modified_s for n, o in objects.items() if n != MARK), default=0.0)
    if moved is not None:
        changed_s = max(changed_s, moved.modified_s)
    if now_s - changed_s < grace_s:
        return f"it may have been the newest one until {now_s - changed_s:.0f} s ago"
    return _used(used_by)


def _used(used_by: Callable[[], list[str]]) -> str:
    names = used_by()
    return f"{', '.join(names)} use{'s' if len(names) == 1 else ''} it" if names else ""


def _take_index_away(place: Store, name: Store, used_by: Callable[[], list[str]]) -> str:
    """Whoever began to use the version before its index went finds it again; returns who."""
    try:
        index = b"".join(place.read(INDEX_NAME))
    except ModelNotFound:
        return ""  # an earlier removal, or a push that was cut
    place.delete(INDEX_NAME)
    try:
        kept = "it is the newest one" if _is_newest(place, name) else _used(used_by)
    except ThawError:
        place.write(INDEX_NAME, index)
        raise
    if kept:
        place.write(INDEX_NAME, index)
    return kept


def _is_newest(place: Store, name: Store) -> bool:
    try:
        data = b"".join(name.read(versions.POINTER_NAME))
        return versions.short(versions.read_pointer(name.uri, data)) == versions.pinned(place.uri)
    except ModelNotFound:
        return False
    except (ModelCorrupt, ModelUnsupported):
        return True  # nobody knows what the name means


def _delete_files(place: Store, objects: Mapping[str, Stored], began_s: float) -> None:
    for object_name in sorted(objects.keys() - {MARK, INDEX_NAME}):
        if time.monotonic() - began_s > _REMOVAL_S:  # a push may soon take the mark for a dead one's
            raise Conflict(f"the removal of {place.uri} took too long", hint="run it again: it goes on")
        place.delete(object_name)
    place.delete(MARK)
    place.delete_place()
