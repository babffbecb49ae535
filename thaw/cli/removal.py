"""``thaw model versions``, ``delete`` and ``gc``: what of a model a store has, and what nobody needs any more."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from thaw import checkpoint, versions
from thaw.cli import guards
from thaw.cli.checkpoints import pointer
from thaw.cli.guards import Removed
from thaw.cli.model_uses import Uses
from thaw.cli.stores import Store, open_store
from thaw.errors import Conflict, ModelCorrupt, ModelNotFound, ModelUnsupported
from thaw.model import INDEX_NAME

AskUses = Callable[[], Uses]
NOBODY = Uses({}, frozenset())


@dataclass(frozen=True, slots=True)
class Version:
    """One version of a model.  ``pushed_s`` is the store's time of its last change; an unfinished one has no index."""

    uri: str
    n_bytes: int
    pushed_s: float
    newest: bool
    finished: bool

    @property
    def digits(self) -> str:
        return versions.pinned(self.uri)


def versions_of(uri: str) -> list[Version]:
    """The newest change last.  Raises ModelNotFound for a model of which there is nothing."""
    name = open_store(uri)
    newest, found = _newest(name), []
    for pin in name.versions():
        objects = open_store(pin).objects()
        files = [o for n, o in objects.items() if n not in (guards.MARK, guards.STAMP)]
        if not objects:
            continue  # some stores list an empty place for a while
        pushed_s = max((o.modified_s for o in files), default=0.0)
        n_bytes = sum(o.n_bytes for o in files)
        found.append(Version(pin, n_bytes, pushed_s, versions.pinned(pin) == newest, INDEX_NAME in objects))
    if not found and not name.objects():
        raise ModelNotFound(f"there is nothing at {uri}", hint="thaw model list")
    return sorted(found, key=lambda v: (v.pushed_s, v.uri))


def _newest(name: Store) -> str:
    """The digits of the version that the name means; empty for a name without a pointer that can be read."""
    try:
        return versions.short(versions.read_pointer(name.uri, pointer(name)))
    except (ModelCorrupt, ModelUnsupported):
        return ""


def collect(uri: str, ask: AskUses, grace_s: float, *, dry_run: bool) -> Iterator[Removed]:
    """Remove the versions of a model that nobody uses, the oldest first."""
    name = open_store(uri)
    for version in versions_of(uri):
        if not version.newest:
            yield _remove(version.uri, name, ask, grace_s, dry_run=dry_run)


def delete(uri: str, ask: AskUses) -> list[Removed]:
    """Delete one version, or a name with all of its versions.  Raises Conflict, which names who uses it."""
    if versions.pinned(uri):
        return [_delete_version(uri, ask)]
    name, before = open_store(uri), versions_of(uri)
    refuse_used(uri, ask().of_name(uri))
    for version in before:  # a name without its pointer must not be found with half of its versions
        refuse_used(version.uri, ask().of_version(uri, version.digits, newest=False))
    data = pointer(name)
    name.delete(versions.POINTER_NAME)  # from now on no start finds it
    if data and (users := ask().of_name(uri)):
        name.write(versions.POINTER_NAME, data)
        refuse_used(uri, users)
    removed = [_remove(version.uri, name, ask, 0.0) for version in before]
    removed.append(Removed(uri, sum(name.objects()[n].n_bytes for n in _own_files(name))))
    for file in _own_files(name):
        name.delete(file)
    name.delete_place()
    return removed


def _delete_version(uri: str, ask: AskUses) -> Removed:
    plain = versions.plain_name(uri)
    if not open_store(uri).objects():
        raise ModelNotFound(f"there is no version {uri}", hint=f"thaw model versions {plain}")
    removed = _remove(uri, open_store(plain), ask, 0.0)
    if removed.kept:
        raise Conflict(f"{uri} stays: {removed.kept}", hint=f"thaw model versions {plain} shows who uses what")
    return removed


def _remove(pin: str, name: Store, ask: AskUses, grace_s: float, *, dry_run: bool = False) -> Removed:
    def used_by() -> list[str]:
        return ask().of_version(name.uri, versions.pinned(pin), newest=False)

    return guards.remove(open_store(pin), name, used_by, grace_s, dry_run=dry_run)


def refuse_used(uri: str, users: list[str]) -> None:
    if users:
        raise Conflict(f"{uri} is used by {', '.join(users)}", hint="delete or change these functions first")


def _own_files(name: Store) -> list[str]:
    """Of a model that was pushed without versions, or copied there.  Other files are somebody else's."""
    known = {INDEX_NAME, checkpoint.SHARDS_NAME, versions.POINTER_NAME}
    return [n for n in name.objects() if n in known or checkpoint.is_fetchable(n)]
