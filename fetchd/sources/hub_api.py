"""What a hub answers: refusals as sentences with the next step, the files of a commit, and pauses that it asks for."""

from __future__ import annotations

import http.client
import json
import re
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import unquote

from fetchd.sources.base import Busy, NotAUri, Refused
from fetchd.sources.http_client import passing
from thaw import checkpoint
from thaw.errors import ModelCorrupt, StoreUnavailable, ThawError
from thaw.hub import HubModel

_RATE_LIMIT: Final = re.compile(r'"\w+"\s*;\s*r\s*=\s*0\s*;\s*t\s*=\s*([0-9]{1,9})')
_NEXT: Final = re.compile(r'<([^<>]+)>\s*;\s*rel="?next"?')
_MOVED: Final = re.compile(r"(?:\A|/)([A-Za-z0-9._-]+/[A-Za-z0-9._-]+)/resolve/")
_OID: Final = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
_KNOWN: Final = frozenset(
    (*checkpoint.SIDECAR_NAMES, checkpoint.SHARDS_NAME, *checkpoint.FOREIGN_NAMES, "adapter_config.json")
)
"""The names that matter besides weights.  Thaw's own index and pointer are not among them: whoever writes to a
repository could say in them that it holds the files of another one."""
_CREDENTIALS: Final = 'an operator adds {"prefix": "%s", "token_file": "…"} to the file THAW_FETCHD_CREDENTIALS'


@dataclass(frozen=True, slots=True)
class HubFile:
    """``oid`` is the SHA-256 of the content for a file in LFS, and git's hash for a small one."""

    n_bytes: int
    oid: str


def refusal(response: http.client.HTTPResponse, model: HubModel, endpoint: str, *, has_token: bool) -> ThawError:
    """The error of an answer that is neither the object nor a redirect to it."""
    code, status = response.getheader("X-Error-Code", ""), response.status
    name = f"hf://{model.repository}"
    page = f"{endpoint}/{model.repository}"
    if (error := busy_or_down(response, str(model))) is not None:
        return error
    if code == "GatedRepo":
        who = "the token that this platform has for it has no leave" if has_token else "this platform has no token"
        return Refused(
            f"{name}: its authors give leave to read it, and {who}",
            hint=f"ask for leave at {page}; {_CREDENTIALS % name}",
        )
    if code == "RevisionNotFound":
        return Refused(
            f"{name} has no revision {model.revision}", hint=f"{page}/tree/main lists branches, tags and commits"
        )
    if code == "EntryNotFound":
        return Refused(
            f"{model} holds no config.json at its top, so it is no model that an engine loads",
            hint="name a repository with config.json, a tokenizer and safetensors",
        )
    if status == 401 and "invalid" in response.getheader("X-Error-Message", "").lower():
        return Refused(f"{name}: the hub does not accept the platform's token", hint=_CREDENTIALS % name)
    if code == "RepoNotFound" or status in (401, 404):
        return Refused(
            f"{name}: the hub has no such model, or it is private and the platform's token does not open it",
            hint=f"check the name at {page}; for a private model {_CREDENTIALS % name}",
        )
    if status == 403:
        return Refused(f"{name}: the hub refuses access (403)", hint=f"look at {page}; {_CREDENTIALS % name}")
    if 300 <= status < 400:
        return _moved(response, name)
    return Refused(f"{name}: the hub answered {status}", hint="is HF_ENDPOINT of fetchd a hub?")


def _moved(response: http.client.HTTPResponse, name: str) -> ThawError:
    place = unquote(response.getheader("Location", "elsewhere"))
    found = _MOVED.search(place)
    if found is None:
        return Refused(f"{name}: the hub leads to {place:.200}", hint="HF_ENDPOINT of fetchd must be the hub's own URL")
    return NotAUri(f"{name} has moved to hf://{found[1]}", hint="deploy that URI; an operator may have to allow it")


def busy_or_down(response: http.client.HTTPResponse, what: str) -> StoreUnavailable | None:
    """The error of a hub that may answer in another way later; None for another answer."""
    error = passing(response, what)
    if error is None or isinstance(error, Busy) or response.status != 429:
        return error
    found = _RATE_LIMIT.search(response.getheader("RateLimit", ""))
    return Busy(error.message, float(found[1]), hint=error.hint) if found else error


def files_of(body: bytes, model: HubModel) -> dict[str, HubFile]:
    """The files at the top of a commit that may belong to a model.  Raises ModelCorrupt."""
    try:
        entries = [e for e in json.loads(body) if e["type"] == "file" and _matters(e["path"])]
        return {str(e["path"]): _file(e) for e in entries}
    except (ValueError, KeyError, TypeError, RecursionError) as e:
        raise ModelCorrupt(
            f"{model}: the hub's list of its files cannot be read: {type(e).__name__}",
            hint="is HF_ENDPOINT of fetchd a hub?",
        ) from None


def _matters(name: object) -> bool:
    return isinstance(name, str) and (name in _KNOWN or checkpoint.is_fetchable(name))


def _file(entry: dict[str, Any]) -> HubFile:
    lfs = entry.get("lfs")
    n_bytes, oid = (lfs["size"], lfs["oid"]) if lfs else (entry["size"], entry["oid"])
    if type(n_bytes) is not int or not 0 <= n_bytes < 2**48 or not _OID.fullmatch(oid):
        raise ValueError("no size and hash")
    return HubFile(n_bytes, oid)


def next_page(response: http.client.HTTPResponse) -> str:
    """The URL of the list's next page; empty behind the last one."""
    found = _NEXT.search(response.getheader("Link", ""))
    return found[1] if found else ""
