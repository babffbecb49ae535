"""``s3://bucket/prefix``: botocore signs, our own reader moves the bytes (path-style addresses)."""

from __future__ import annotations

import threading
from functools import lru_cache
from typing import Final

from fetchd.credentials import Identity, credentials_of
from fetchd.settings import FetchdSettings
from fetchd.sources.http import HttpSource
from thaw.errors import PlatformError, ThawError
from thaw.logs import Log
from thaw.model_uri import ModelUri
from thaw.s3 import S3Access

_REFUSED: Final = "check uri and credentials; THAW_FETCHD_OWN_STORE and THAW_FETCHD_CREDENTIALS say which ones are sent"


def open_s3(uri: ModelUri, settings: FetchdSettings, *, huge: bool) -> HttpSource:
    """Raises PlatformError for credentials that can never be used."""
    access = _access(credentials_of(settings).of(uri))
    base_url = f"{access.endpoint}/{uri.place}{uri.url_path}"
    return HttpSource(base_url, settings.read_timeout_s, kind="s3", sign=access.sign, refused_hint=_REFUSED)


def prepare(settings: FetchdSettings, log: Log) -> None:
    """Look for the credentials now, in the background: the service that gives a role is slow, and the first start from
    S3 must not wait for it."""
    try:
        access = _access(credentials_of(settings).own)
    except PlatformError as e:
        _log_missing(log, e)
        return

    def look() -> None:
        try:
            access.prepare()
        except ThawError as e:
            _log_missing(log, e)

    threading.Thread(target=look, name="s3-credentials", daemon=True).start()


def _log_missing(log: Log, e: ThawError) -> None:
    log.event("s3_credentials_missing", error=e.message, hint=e.hint)


@lru_cache(maxsize=64)
def _access(identity: Identity) -> S3Access:
    """One S3Access for each identity: the reads of all models share its credentials and their renewal."""
    return S3Access(
        identity.endpoint,
        identity.region,
        key_id=identity.key_id,
        secret=identity.secret,
        token=identity.token,
        profile=identity.profile,
        anonymous=identity.anonymous,
    )
