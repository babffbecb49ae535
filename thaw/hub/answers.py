"""Reads a hub's answers, for all of its clients: the files of a commit, and refusals as sentences with the next step.

This module is pure: status, headers and bytes in, values out.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, Protocol
from urllib.parse import quote, unquote

from thaw.checkpoints import checkpoint
from thaw.errors import ModelCorrupt
from thaw.hub.links import Link, link_of
from thaw.hub.models import HubModel

MOST_PAGES: Final = 32
MOST_LIST_BYTES: Final = 8 * 1024 * 1024
"""A page of the list of a commit's files has at most so many bytes."""

_NEXT: Final = re.compile(r'<([^<>]+)>\s*;\s*rel="?next"?')
_MOVED: Final = re.compile(r"(?:\A|/)([A-Za-z0-9._-]+/[A-Za-z0-9._-]+)/resolve/")
_OID: Final = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
_KNOWN: Final = frozenset(
    (*checkpoint.SIDECAR_NAMES, checkpoint.SHARDS_NAME, *checkpoint.FOREIGN_NAMES, "adapter_config.json")
)
"""The names of needed files besides weights.  Thaw's own index and pointer are not among them: the owner of a
repository could claim in them that it holds the files of another one."""


@dataclass(frozen=True, slots=True)
class HubFile:
    """``oid`` is the SHA-256 of the content for a file in LFS, and git's hash for a small one."""

    n_bytes: int
    oid: str

    @property
    def sha256(self) -> str:
        """Empty for a small file."""
        return self.oid if len(self.oid) == 64 else ""

    def oid_of(self, pieces: Iterable[bytes | memoryview]) -> str:
        """The hash of these bytes, of the kind that the hub has for the file."""
        of_git = b"blob %d\0" % self.n_bytes
        digest = hashlib.sha256() if self.sha256 else hashlib.sha1(of_git, usedforsecurity=False)
        for piece in pieces:
            digest.update(piece)
        return digest.hexdigest()


class Headers(Protocol):
    """The headers of an answer.  They are found in any spelling."""

    def get(self, name: str, default: str, /) -> str: ...


class Refusal(NamedTuple):
    """``is_move``: another URI names the model now."""

    sentence: str
    hint: str
    is_move: bool = False


def list_path(model: HubModel) -> str:
    """With folders, because an embedding model has one file in a folder."""
    return f"/api/models/{quote(model.repository)}/tree/{quote(model.revision, safe='')}?recursive=true"


def file_path(model: HubModel, name: str) -> str:
    return f"/{quote(model.repository)}/resolve/{quote(model.revision, safe='')}/{quote(name)}"


def files_of(body: bytes, model: HubModel) -> dict[str, HubFile]:
    """The files of a commit that may belong to a model.  Raises ModelCorrupt."""
    try:
        entries = [e for e in json.loads(body) if e["type"] == "file" and _matters(e["path"])]
        return {str(e["path"]): _file(e) for e in entries}
    except (ValueError, KeyError, TypeError, RecursionError) as e:
        raise ModelCorrupt(
            f"{model}: the hub's list of its files cannot be read: {type(e).__name__}", hint="is HF_ENDPOINT a hub?"
        ) from None


def _matters(name: object) -> bool:
    return isinstance(name, str) and (name in _KNOWN or checkpoint.is_fetchable(name))


def _file(entry: dict[str, Any]) -> HubFile:
    lfs = entry.get("lfs")
    n_bytes, oid = (lfs["size"], lfs["oid"]) if lfs else (entry["size"], entry["oid"])
    if type(n_bytes) is not int or not 0 <= n_bytes < 2**48 or not _OID.fullmatch(oid):
        raise ValueError("no size and hash")
    return HubFile(n_bytes, oid)


def next_page(headers: Headers, page: Link) -> Link | Refusal | None:
    """Return the link to the page after ``page``, from the header Link; None after the last one.  Return a Refusal for
    a link to another server, because the token is for the hub alone."""
    found = _NEXT.search(headers.get("Link", ""))
    if found is None:
        return None
    place = link_of(found[1], page)
    if place is None:
        return Refusal("the hub's list of files goes on at a place that is no URL", "is HF_ENDPOINT a hub?")
    if place.origin != page.origin:
        return Refusal(f"the hub's list of files goes on at {place.origin}", f"set HF_ENDPOINT to {place.origin}")
    return place


def too_long(model: HubModel) -> Refusal:
    return Refusal(
        f"{model}: the hub's list of its files has more than {MOST_PAGES} pages", "name a smaller repository"
    )


def refusal(
    status: int, headers: Headers, model: HubModel, endpoint: str, file: str, *, has_token: bool, how: str
) -> Refusal:
    """Why the hub gives neither ``file`` nor a redirect to it.  ``how`` says how a token is given."""
    code = headers.get("X-Error-Code", "")
    name, page = f"hf://{model.repository}", f"{endpoint}/{model.repository}"
    if code == "GatedRepo":
        who = "gave no access to the owner of the token that was sent" if has_token else "want to see a token"
        return Refusal(f"{name} is gated, and its authors {who}", f"request access at {page}, then {how}")
    if code == "RevisionNotFound":
        return Refusal(f"{name} has no revision {model.revision}", f"{page}/tree/main lists branches, tags and commits")
    if code == "EntryNotFound" and file != "config.json":
        return Refusal(f"{model} has no {file} any more", "start again")
    if code == "EntryNotFound":
        return Refusal(
            f"{model} holds no config.json at its top, so it is no model that an engine loads",
            "name a repository with config.json, a tokenizer and safetensors",
        )
    if status == 401 and "invalid" in headers.get("X-Error-Message", "").lower():
        return Refusal(f"{name}: the hub does not accept the token that was sent", how)
    if code == "RepoNotFound" or status in (401, 404):
        return Refusal(
            f"{name}: the hub has no such model, or it is private and needs another token",
            f"check the name at {page}; for a private model {how}",
        )
    if status == 403:
        return Refusal(f"{name}: the hub refuses access (403)", f"look at {page}; {how}")
    if 300 <= status < 400:
        return _moved(headers.get("Location", ""), name)
    return Refusal(f"{name}: the hub answered {status}", "is HF_ENDPOINT a hub?")


def _moved(location: str, name: str) -> Refusal:
    place = unquote(location)
    found = _MOVED.search(place)
    if found is None:
        link = link_of(location)
        return Refusal(
            f"{name}: the hub leads {f'to {link.origin}' if link else 'elsewhere'}",
            "HF_ENDPOINT must be the hub's own URL",
        )
    return Refusal(f"{name} has moved to hf://{found[1]}", "use that URI; an operator may have to allow it", True)
