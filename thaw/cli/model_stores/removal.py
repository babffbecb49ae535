"""``thaw model versions``, ``delete`` and ``gc``: the versions of a model in a store, and those no longer needed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from thaw.checkpoints import checkpoint, versions
from thaw.cli.model_stores import guards
from thaw.cli.model_stores.checkpoints import pointer
from thaw.cli.model_stores.guards import Removed
from thaw.cli.model_stores.stores import Store, open_store
from thaw.cli.model_uses import Uses
from thaw.errors import Conflict, ModelCorrupt, ModelNotFound, ModelUnsupported
from thaw.model import INDEX_NAME

AskUses = Callable[[], Uses]
NOBODY = Uses(frozenset(), frozenset())


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
        files = [o for n, o in objects.items() if not guards.is_mark(n) and not guards.is_stamp(n)]
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
    name = open_store(uri)
    before = sorted(versions_of(uri), key=lambda v: not v.newest)
    refuse_used(uri, ask().of_name(uri))
    for version in before:  # a name without its pointer must not be found with half of its versions
        refuse_used(version.uri, ask().of_version(uri, version.digits, newest=False))
    with _nameless(name):  # from now on no start finds it
        refuse_used(uri, ask().of_name(uri))
        removed = [_remove(version.uri, name, ask, 0.0) for version in before]
    objects = name.objects()
    if versions.POINTER_NAME in objects:
        raise Conflict(f"{uri} has been pushed again meanwhile, and stays", hint=f"thaw model versions {uri}")
    own = _own_files(objects)
    for file in own:
        name.delete(file)
    name.delete_place()
    return [*removed, Removed(uri, sum(objects[n].n_bytes for n in own))]


@contextmanager
def _nameless(name: Store) -> Iterator[None]:
    """Remove the plain name's pointer while the block runs.  It is restored only if the block fails before the version
    that it named has gone.  The newest version must therefore be removed first."""
    taken = {n: data for n in (versions.POINTER_NAME, INDEX_NAME) if (data := _content(name, n)) is not None}
    try:
        for file in taken:
            name.delete(file)
        yield
    except BaseException:
        if versions.POINTER_NAME in taken and _leads_nowhere(name.uri, taken[versions.POINTER_NAME]):
            del taken[versions.POINTER_NAME]
        for file in taken.keys() - name.objects().keys():  # a push may have written another one
            name.write(file, taken[file])
        raise


def _content(name: Store, file: str) -> bytes | None:
    try:
        return b"".join(name.read(file))
    except ModelNotFound:
        return None


def _leads_nowhere(uri: str, data: bytes) -> bool:
    try:
        pin = versions.pin(uri, versions.read_pointer(uri, data))
    except (ModelCorrupt, ModelUnsupported):
        return False  # the name's meaning is unknown
    return open_store(pin).size(INDEX_NAME) is None


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

    do = guards.would_remove if dry_run else guards.remove
    return do(open_store(pin), name, used_by, grace_s)


def refuse_used(uri: str, users: list[str]) -> None:
    if users:
        raise Conflict(f"{uri} is used by {', '.join(users)}", hint="delete or change these functions first")


def _own_files(objects: Iterable[str]) -> list[str]:
    """Return the files of a model that was pushed without versions, or copied there.  Other files belong to somebody
    else, and a pointer belongs to a later push."""
    known = {INDEX_NAME, checkpoint.SHARDS_NAME}
    return [n for n in objects if n in known or checkpoint.is_fetchable(n)]
