"""What a tenant hears when a store that it named cannot be read.

An error that told "connection refused" from "answered 501" would make fetchd a scanner of networks that only it
reaches.  So a tenant gets one sentence and an id, whatever happened, and the operator finds the reason under that id in
fetchd's log.  Stores that an operator has chosen (s3, file, a package's) are no secret: their errors stay as they are.
"""

from __future__ import annotations

import secrets
from typing import Final

from fetchd.sources.base import NotAUri
from thaw.errors import ModelNotFound, StoreUnavailable, ThawError
from thaw.logs import Log

_NAMED_BY_TENANTS: Final = frozenset({"http", "https"})
_HINT: Final = "check that everybody can read it there; an operator finds the reason in fetchd's log under this id"


def disclosed(uri: str, error: ThawError, log: Log) -> ThawError:
    """The error to answer with.  Its class stays one of two: a store that may answer later, or none."""
    kind = next((cls for cls in (StoreUnavailable, ModelNotFound) if isinstance(error, cls)), None)
    if kind is None or isinstance(error, NotAUri) or uri.partition(":")[0].lower() not in _NAMED_BY_TENANTS:
        return error
    error_id = secrets.token_hex(4)
    log.event("store_failed", error_id=error_id, uri=uri[:500], code=error.code, error=error.message, hint=error.hint)
    return kind(f"{uri:.300}: no model could be read there (error id {error_id})", hint=_HINT)
