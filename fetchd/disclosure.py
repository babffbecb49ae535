"""The errors that a tenant gets when a store that it named cannot be read.

An error that told "connection refused" from "answered 501" would make fetchd a scanner of networks that only it
reaches, and one that quoted the wrong part of a file would show the file's content to the tenant.  So a tenant gets one
fixed sentence for each class of errors and an id, and the operator finds the reason under that id in fetchd's log.
Stores that an operator has chosen (s3, file, a package's) are no secret: their errors stay as they are.  A hub's errors
are written for tenants, and the details, such as the address of a store, are in the log.
"""

from __future__ import annotations

import secrets
from typing import Final

from fetchd.sources.base import NotAUri
from thaw.errors import (
    DeveloperError,
    MemoryTooSmall,
    ModelCorrupt,
    ModelNotFound,
    ModelUnsupported,
    PlatformError,
    StoreUnavailable,
    ThawError,
)
from thaw.hub.models import is_hub
from thaw.logs import Log
from thaw.model_uri import HUB

_NAMED_BY_TENANTS: Final = frozenset({"http", "https"})
_WHO_KNOWS: Final = "an operator finds the reason in fetchd's log under this id"
_READABLE: Final = f"check that everybody can read it there; {_WHO_KNOWS}"
_TOLD: Final[tuple[tuple[type[ThawError], str, str], ...]] = (
    (StoreUnavailable, "no model could be read there", _READABLE),
    (ModelNotFound, "no model could be read there", _READABLE),
    (ModelUnsupported, "no engine or store of this platform can use what is there", f"push it again; {_WHO_KNOWS}"),
    (ModelCorrupt, "what is there is damaged, or no model", f"push it again; {_WHO_KNOWS}"),
    (DeveloperError, "what is there cannot be used", _WHO_KNOWS),
)


def disclosed(uri: str, error: Exception, log: Log) -> Exception:
    """Return the error to answer with.  It keeps a class that callers handle differently, and its text reveals nothing
    of the store's answer.  An error that is no ThawError may quote an answer, too, so it becomes a PlatformError.

    These stay as they are: NotAUri, because no store was asked; MemoryTooSmall, because only a complete and valid model
    causes it; and the platform's own errors."""
    if is_hub(uri) and isinstance(error, ThawError):
        _log_what_is_behind(uri, error, log)
        return error
    scheme = uri.partition(":")[0].lower()
    if scheme not in (*_NAMED_BY_TENANTS, HUB) or isinstance(error, NotAUri | MemoryTooSmall):
        return error
    told = next((t for t in _TOLD if isinstance(error, t[0])), None)
    if told is None and isinstance(error, ThawError):
        return error
    kind, sentence, hint = told or (PlatformError, "fetchd could not make sense of what is there", _WHO_KNOWS)
    error_id = secrets.token_hex(4)
    reason = {"code": error.code, "error": error.message, "hint": error.hint} if isinstance(error, ThawError) else {}
    log.event(
        "store_failed",
        error_id=error_id,
        uri=uri[:500],
        **(reason or {"code": type(error).__name__, "error": str(error)[:500], "hint": "a defect of fetchd"}),
    )
    return kind(f"{uri:.300}: {sentence} (error id {error_id})", hint=hint)


def _log_what_is_behind(uri: str, error: ThawError, log: Log) -> None:
    cause: BaseException = error
    while cause.__cause__ is not None:
        cause = cause.__cause__
    if isinstance(cause, OSError):
        log.event("hub_failed", uri=uri[:500], error=error.message, cause=f"{type(cause).__name__}: {cause}"[:500])
