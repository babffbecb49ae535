"""Parses the URI of a model in one way, so that all components compare URIs alike.

An operator allows models by prefixes (``s3://models``, ``hf://org``, ``https://host/path``, ``file:///srv/models``).  A
prefix is compared part by part, after everything was decoded once: ``s3://models-evil`` is not below ``s3://models``.
A URI that a store could interpret differently is refused: ``..`` in any spelling, a backslash, a name and password, a
query, a fragment, an empty part, half an escape.  Nothing else reads such a URI: stores and sources get a ModelUri.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final
from urllib.parse import quote, unquote_to_bytes

from thaw.errors import BadRequest, Forbidden
from thaw.settings import SettingError

MOST_BYTES: Final = 2048
_FORM: Final = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://([^/]*)(?:/(.*))?", re.S)
_BAD: Final = re.compile(r"[\x00-\x1f\x7f\\?#]|%(?![0-9A-Fa-f]{2})")
_BUCKET: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_HOST: Final = re.compile(r"(\[[0-9a-f:.]+\]|[a-z0-9][a-z0-9._-]*?)\.?(?::([0-9]{1,5}))?")
_PLACES: Final = {"s3": _BUCKET, "file": re.compile(r""), "http": _HOST, "https": _HOST, "hf": _BUCKET}
_ANY_PLACE: Final = re.compile(r"[A-Za-z0-9._:\[\]-]*")
"""The place in a URI of a store that a package has added."""
HUB: Final = "hf"
"""The scheme of models on a hub: ``hf://org/name@revision`` (thaw/hub/models.py)."""
_HUB_NAME: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,95}")
_HUB_REVISION: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._+-]*(?:/[A-Za-z0-9._+-]+)*")
_HUB_MAIN: Final = "@main"
_PORTS: Final = {"http": "80", "https": "443"}
_MOST_PORT: Final = 65535
_WRITTEN: Final = "~-._@+:=,!$&'()*;"
"""The characters of a path that a canonical URI does not escape."""
_LOCAL: Final = frozenset({"file"})
FORMS: Final = "s3://bucket/prefix, hf://org/name@revision, http(s)://host/path or file:///absolute/path"


@dataclass(frozen=True, slots=True)
class ModelUri:
    """``place`` is a bucket, a host with its port, or an organisation of a hub; empty for files.  ``path`` is decoded,
    without empty parts; on a hub it is the name and, behind an @, the revision.  ``str`` of it is its canonical text:
    two URIs with the same text mean the same place, and the text is read as this object again."""

    scheme: str
    place: str
    path: tuple[str, ...]

    @staticmethod
    def parse(text: str) -> ModelUri:
        """Raises BadRequest."""
        found = ModelUri.parse_prefix(text)
        if not found.place and found.scheme in ("s3", *_PORTS):
            raise _not_one(text, "it names no bucket or host")
        if not found.path and found.scheme in ("s3", *_LOCAL):
            raise _not_one(text, "a model has a name in its store")
        if found.scheme == HUB and not (found.place and found.path):
            raise _not_one(text, "a model on a hub has an organisation and a name")
        if found.scheme == HUB and len(found.path) == 1:
            return replace(found, path=(*found.path, _HUB_MAIN))
        return found

    @staticmethod
    def parse_prefix(text: str) -> ModelUri:
        """As :meth:`parse`; a prefix without a place (``s3://``) stands for all places.  Raises BadRequest."""
        if len(text.encode("utf-8", "surrogatepass")) > MOST_BYTES or text != text.strip() or _BAD.search(text):
            raise _not_one(text, "it is too long, or has a character that no model's uri has")
        found = _FORM.fullmatch(text)
        if found is None:
            raise _not_one(text, "it does not begin with a scheme and ://")
        scheme, place, path = found[1].lower(), found[2], found[3] or ""
        parts = [_decoded(text, part) for part in path.rstrip("/").split("/")] if path.strip("/") else []
        if path.startswith("/") or "" in parts:
            raise _not_one(text, "a part of its path is empty (//)")
        if scheme == HUB:
            parts = _hub_path(text, parts)
        return ModelUri(scheme, _place(text, scheme, place), tuple(parts))

    def __str__(self) -> str:
        parts = [quote(part, safe=_WRITTEN) for part in self.path]
        if self.scheme == HUB and len(parts) > 1:
            parts[:2] = [f"{parts[0]}{quote(self.path[1], safe=_WRITTEN + '/')}"]
        return "/".join((f"{self.scheme}://{self.place}", *parts))

    @property
    def key(self) -> str:
        """The decoded path in one piece: what an object store has its objects below."""
        return "/".join(self.path)

    @property
    def url_path(self) -> str:
        """The path as a URL has it, with every character escaped that some server might read differently."""
        return "".join(f"/{quote(part, safe='~-._')}" for part in self.path)

    def beside(self, name: str) -> ModelUri:
        """The place with another last part.  Raises BadRequest when no URI can name it."""
        return ModelUri.parse(str(replace(self, path=(*self.path[:-1], name))))

    @property
    def directory(self) -> str:
        """The directory that a ``file://`` URI names; empty for other URIs."""
        return "/" + "/".join(self.path) if self.scheme in _LOCAL else ""

    def is_below(self, prefix: ModelUri) -> bool:
        return (
            self.scheme == prefix.scheme
            and (self.place == prefix.place or not prefix.place)
            and self.path[: len(prefix.path)] == prefix.path
        )


@dataclass(frozen=True, slots=True)
class ModelPolicy:
    """The models that namespaces may run.  ``default`` holds the prefixes for all namespaces."""

    default: tuple[str, ...]

    def check(self, namespace: str, uri: str, more: Sequence[str]) -> None:
        """``more``: the namespace's own prefixes.  Raises Forbidden, and BadRequest for a text that is no model's
        URI."""
        model, prefixes = ModelUri.parse(uri), (*self.default, *more)
        if not any(model.is_below(ModelUri.parse_prefix(prefix)) for prefix in prefixes):
            allowed = ", ".join(prefixes) if prefixes else "nothing"
            raise Forbidden(
                f"$.model.uri: the namespace {namespace} may not run {uri:.300}; it may run what is below {allowed} "
                "(THAW_MODELS).",
                hint=f"an operator allows more: thaw namespace allow-models {namespace} PREFIX, or THAW_MODELS for all",
            )


def policy_of(setting: str) -> ModelPolicy:
    """The policy that THAW_MODELS describes.  Raises SettingError."""
    prefixes = tuple(text for entry in setting.split(",") if (text := entry.strip()))
    try:
        for text in prefixes:
            ModelUri.parse_prefix(text)
    except BadRequest as e:
        raise SettingError(
            f"THAW_MODELS: {e.message}", hint="separate prefixes by commas: s3://models, https://host/path"
        ) from None
    return ModelPolicy(prefixes)


def _not_one(text: str, problem: str) -> BadRequest:
    return BadRequest(f"{text!r:.300} is not a model's uri: {problem}", hint=f"write it as {FORMS}")


def _decoded(text: str, part: str) -> str:
    try:
        found = unquote_to_bytes(part).decode()
    except UnicodeError:
        raise _not_one(text, f"{part!r:.80} is not UTF-8") from None
    if found in (".", "..") or re.search(r"[\x00-\x1f\x7f/\\]", found):
        raise _not_one(text, f"{part!r:.80} must not be a part of its path")
    return found


def _hub_path(text: str, parts: list[str]) -> list[str]:
    """The name and the revision are parts of their own, so a prefix without a revision holds for all of them."""
    name, at, revision = "/".join(parts).partition("@")
    if (name or at) and not _HUB_NAME.fullmatch(name):
        raise _not_one(text, f"{name!r:.80} is not the name of a model on a hub")
    if at and not _HUB_REVISION.fullmatch(revision):
        raise _not_one(text, f"{revision!r:.80} is not a branch, a tag or a commit")
    return [part for part in (name, at + revision) if part]


def _place(text: str, scheme: str, place: str) -> str:
    found = _PLACES.get(scheme, _ANY_PLACE).fullmatch(place.lower() if scheme in _PORTS else place)
    if not place:
        return ""
    if found is None:
        raise _not_one(text, f"{place!r:.80} cannot stand after {scheme}://")
    if scheme not in _PORTS:
        return place
    port = str(int(found[2])) if found[2] else _PORTS[scheme]
    if not 0 < int(port) <= _MOST_PORT:
        raise _not_one(text, f"there is no port {port}")
    return found[1] if port == _PORTS[scheme] else f"{found[1]}:{port}"
