"""The versions of a model: their names, and the pointer that says which one a plain name means.

A push writes the files of a model to a place of their own and then moves one small object, the pointer::

    s3://models/x@3f0c9a17be2d4451/   config.json  model.safetensors …  thaw-index.json     never written again
    s3://models/x/thaw-version.json   {"version": 1, "sha256": "3f0c9a17be2d4451…"}         written last

``s3://models/x@3f0c9a17be2d4451`` is a *pin*: it means these bytes for ever.  ``s3://models/x`` means the newest ones
at each start.  A pin ends with the first 16 hex digits of the root of the model's hash tree.  These digits are only a
name: a user who may write to the store and computes 2**32 hashes can make two models with the same name.  A pin with
all 64 digits means the same place and is a proof, like the digits in the pointer.  See
docs/formats/checkpoint-index.md.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any, Final

from thaw import wire
from thaw.errors import BadRequest, ModelCorrupt, ModelUnsupported, ProtocolError
from thaw.model_uri import HUB, ModelUri

POINTER_NAME: Final = "thaw-version.json"
_FORMAT: Final = 1
_DIGITS: Final = 16
_PIN: Final = re.compile(r"(.+)@([0-9a-f]{64}|[0-9a-f]{16})", re.S)
_SHA256: Final = re.compile(r"[0-9a-f]{64}")


def short(version: str) -> str:
    """The part of a model's version that people read, and that a pin ends with."""
    return version[:_DIGITS]


def pin(uri: str, sha256: str) -> str:
    """The URI of one version of the model with the plain name ``uri``.  Raises BadRequest."""
    name = ModelUri.parse(uri)
    if not name.path:
        raise BadRequest(f"{uri!r:.300} has no name that a version could have", hint="push the model below it")
    return str(name.beside(f"{name.path[-1]}@{short(sha256)}"))


def pinned(uri: str) -> str:
    """The digits of the version that ``uri`` pins; empty for a plain name, for a text that is no model's URI, and for
    every model on a hub, which has revisions of its own (thaw/hub/models.py) and is asked at each start whether it may
    still be read."""
    return _parts(uri)[1]


def place(uri: str) -> str:
    """The place of the files of the version that ``uri`` pins."""
    return pin(plain_name(uri), pinned(uri))


def plain_name(uri: str) -> str:
    """``uri`` without its pin, in its canonical form; as it is if it is no model's URI."""
    return _parts(uri)[0]


@lru_cache(maxsize=4096)
def _parts(uri: str) -> tuple[str, str]:
    """The plain name and the digits of its pin."""
    try:
        name = ModelUri.parse(uri)
        match = _PIN.fullmatch(name.path[-1]) if name.path and name.scheme != HUB else None
        return (str(name.beside(match[1])), match[2]) if match else (str(name), "")
    except BadRequest:
        return uri, ""


def write_pointer(sha256: str) -> bytes:
    """The content of ``thaw-version.json``."""
    return wire.encode({"version": _FORMAT, "sha256": sha256}) + b"\n"


POINTER_BYTES: Final = len(write_pointer("0" * 64))
"""Every pointer of this format is as long as this, so one request for a range reads it, whatever its length was
before."""


def read_pointer(uri: str, data: bytes) -> str:
    """Return the root that the pointer of the model ``uri`` names.

    Raises ModelCorrupt, or ModelUnsupported for another format.
    """
    hint = f"push the model again: thaw model push DIR {uri}"
    try:
        plain = wire.loads(dict[str, Any], data)
    except ProtocolError as e:
        raise ModelCorrupt(f"{uri}: {POINTER_NAME} cannot be read: {e.message}", hint=hint) from None
    if plain.get("version") != _FORMAT:
        found = plain.get("version")
        raise ModelUnsupported(f"{uri}: {POINTER_NAME} has version {found!r:.20}; this side reads {_FORMAT}", hint=hint)
    sha256 = plain.get("sha256")
    if not isinstance(sha256, str) or not _SHA256.fullmatch(sha256):
        raise ModelCorrupt(f"{uri}: {POINTER_NAME} names no version", hint=hint)
    return sha256
