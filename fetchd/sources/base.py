"""The interface of every storage source, and the cursor that lets a broken read go on.

A source raises ModelNotFound, ModelCorrupt or ModelUnsupported if a retry cannot help, and StoreUnavailable if it may:
the reader then tries again from :attr:`Target.done`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from fetchd.settings import FetchdSettings
from thaw.errors import ModelNotFound, StoreUnavailable
from thaw.model_uri import ModelUri


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    n_bytes: int
    etag: str


class Refused(ModelNotFound):
    """The store does not give the object, and does not say that there is none."""

    @property
    def code(self) -> str:
        return ModelNotFound.__name__


class NotAUri(ModelNotFound):
    """The text names no place in any store.  No store was asked, so the text may say what is wrong."""

    @property
    def code(self) -> str:
        return ModelNotFound.__name__


class AccessRefused(Refused):
    """Some stores also refuse access to an object that does not exist, so this is final only when no other object of
    the model is found either."""


class Busy(StoreUnavailable):
    """The store answers, and wants to be asked again only after ``after_s`` seconds."""

    def __init__(self, message: str, after_s: float, *, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.after_s = after_s

    @property
    def code(self) -> str:
        return StoreUnavailable.__name__


class Target:
    """Memory that a read fills from front to back.  Its pieces need not lie side by side."""

    def __init__(self, pieces: Sequence[memoryview]) -> None:
        self._pieces = pieces
        self._piece, self._at = 0, 0
        self.n_bytes = sum(len(p) for p in pieces)
        self.done = 0

    @property
    def left(self) -> int:
        return self.n_bytes - self.done

    @property
    def pieces(self) -> Sequence[memoryview]:
        return self._pieces

    def next(self, most: int) -> memoryview:
        """The next unfilled bytes, contiguous, at most ``most``."""
        return self._pieces[self._piece][self._at : self._at + most]

    def advance(self, n_bytes: int) -> None:
        self.done += n_bytes
        self._at += n_bytes
        if self._at == len(self._pieces[self._piece]):
            self._piece, self._at = self._piece + 1, 0


class Throttle(Protocol):
    """A read asks it before each piece, and learns from it that the fetch was cancelled."""

    def quantum(self, most: int) -> int: ...

    def before_read(self, n_bytes: int) -> None:
        """Sleep as long as the pace demands.  Raises FetchCancelled."""

    def after_read(self, n_bytes: int) -> None: ...


class Connection(Protocol):
    """One reader's connection to the store.  One thread uses it; any thread may call :meth:`interrupt`."""

    def stat(self, name: str) -> ObjectInfo:
        """Raises ModelNotFound."""

    def read_into(self, name: str, offset: int, target: Target, throttle: Throttle, etag: str) -> str:
        """Fill ``target`` from byte ``offset + target.done`` of ``name``, and return the etag of the object.

        ``etag`` names the version to read; empty: any.  Raises ModelCorrupt for an object of another version.
        """

    def interrupt(self) -> None:
        """Make a blocked read fail now."""

    def close(self) -> None: ...


class Source(Protocol):
    """A model's directory in a store."""

    kind: str  # as metrics and traces name it
    host: str  # the machine that the bytes come from; empty: this one, so no network carries them

    def connect(self) -> Connection: ...


@runtime_checkable
class Revisions(Protocol):
    """A source whose store keeps the versions of a model itself.  For others thaw/checkpoints/versions.py does it."""

    revision: str  # the one of this source's URI; empty for a name that may move

    def newest(self, connection: Connection) -> str:
        """The URI of the revision that the model's name means now, asked on a connection of this source.  Raises
        ModelNotFound when the store does not let us read it, and StoreUnavailable."""
        ...

    def look_through(self, connection: Connection) -> None:
        """Read what the revision holds, before its objects are asked for: an error is about the model as a whole, not
        about one object.  Raises what :meth:`newest` raises, and ModelCorrupt."""
        ...


SourceOpener = Callable[[str], Source]


class OpenSource(Protocol):
    """The function that the registry has for the scheme of a URI."""

    def __call__(self, uri: ModelUri, settings: FetchdSettings, *, huge: bool) -> Source:
        """``huge``: reads go into huge pages.  Raises ModelNotFound for a URI that names no model of this store, and
        PlatformError for a store that this host can never use."""
        ...


class Unthrottled:
    """No pace: for the small reads of an index."""

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
