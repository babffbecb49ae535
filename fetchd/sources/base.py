"""The interface of every model store, and the cursor that makes a broken read resumable.

Errors at this seam: ModelNotFound, ModelCorrupt and ModelUnsupported are final.  StoreUnavailable may pass, and the
reader tries again from :attr:`Target.done`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from fetchd.settings import FetchdSettings
from thaw.errors import ModelNotFound


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    n_bytes: int
    etag: str


class AccessRefused(ModelNotFound):
    """The store refused access.  Some stores answer so for an object that merely does not exist, so the error is final
    only when nothing else is found either."""

    @property
    def code(self) -> str:
        return ModelNotFound.__name__


class Target:
    """Memory to be filled front to back, in pieces that need not touch."""

    def __init__(self, pieces: Sequence[memoryview]) -> None:
        self._pieces = pieces
        self._piece, self._at = 0, 0
        self.n_bytes = sum(len(p) for p in pieces)
        self.done = 0

    @property
    def left(self) -> int:
        return self.n_bytes - self.done

    def next(self, most: int) -> memoryview:
        """The next unfilled bytes, contiguous, at most ``most``."""
        return self._pieces[self._piece][self._at : self._at + most]

    def advance(self, n_bytes: int) -> None:
        self.done += n_bytes
        self._at += n_bytes
        if self._at == len(self._pieces[self._piece]):
            self._piece, self._at = self._piece + 1, 0


class Throttle(Protocol):
    """A connection asks it before each read, and learns of a cancel from it."""

    def quantum(self, most: int) -> int: ...

    def before_read(self, n_bytes: int) -> None:
        """Sleep as long as the pace demands.  Raises FetchCancelled."""

    def after_read(self, n_bytes: int) -> None: ...


class Connection(Protocol):
    """One reader's connection to the store.  One thread uses it; any thread may call :meth:`interrupt`."""

    def stat(self, name: str) -> ObjectInfo:
        """Raises ModelNotFound."""

    def read_into(self, name: str, offset: int, target: Target, throttle: Throttle, etag: str) -> str:
        """Fill ``target`` from byte ``offset + target.done`` of ``name``; return the etag of the object.

        If ``etag`` is not empty, the object must still be that version (ModelCorrupt otherwise).
        """

    def interrupt(self) -> None:
        """Make a blocked read fail now."""

    def close(self) -> None: ...


class Source(Protocol):
    """A model's directory at a store."""

    kind: str
    host: str  # the host that sends the bytes over the network; empty for a store on this machine

    def connect(self) -> Connection: ...


SourceOpener = Callable[[str], Source]


class OpenSource(Protocol):
    """What the registry holds for the scheme of a URI."""

    def __call__(self, uri: str, settings: FetchdSettings, *, huge: bool) -> Source:
        """``huge``: reads go into huge pages.  Raises ModelNotFound for a URI that names no model of this store, and
        PlatformError for a store that this host can never use."""
        ...


def not_a_uri(uri: str, form: str) -> ModelNotFound:
    """``form`` is how such a URI is written."""
    return ModelNotFound(f"{uri!r:.200} is not a model uri", hint=f"write it as {form}")


class Unthrottled:
    """For the small reads of an index."""

    def quantum(self, most: int) -> int:
        return most

    def before_read(self, n_bytes: int) -> None:
        return None

    def after_read(self, n_bytes: int) -> None:
        return None


def fill(target: Target, throttle: Throttle, most: int, read: Callable[[memoryview], int]) -> bool:
    """Fill ``target`` in pieces of at most ``most`` bytes.  ``read`` puts bytes at the front of a piece and returns how
    many.  False: it returned 0, so the object is too short.  Raises FetchCancelled, and what ``read`` raises."""
    while target.left:
        piece = target.next(throttle.quantum(most))
        throttle.before_read(len(piece))
        count = read(piece)
        if count == 0:
            return False
        target.advance(count)
        throttle.after_read(count)
    return True


def read_bytes(connection: Connection, name: str, offset: int, n_bytes: int, etag: str = "") -> bytes:
    """Read a small piece of an object."""
    buffer = bytearray(n_bytes)
    connection.read_into(name, offset, Target([memoryview(buffer)]), Unthrottled(), etag)
    return bytes(buffer)
