"""``s3://bucket/prefix``: botocore signs, our own reader moves the bytes (path-style addresses)."""

from __future__ import annotations

from functools import lru_cache
from urllib.parse import quote, urlsplit

from fetchd.settings import FetchdSettings
from fetchd.sources.http import HttpSource
from thaw.s3 import S3Access


def s3_source(uri: str, settings: FetchdSettings) -> HttpSource:
    """Raises PlatformError for credentials that can never be used."""
    access = _access(settings.s3_endpoint, settings.s3_region)
    parts = urlsplit(uri)
    base_url = f"{access.endpoint}/{parts.netloc}{quote(parts.path, safe='/~-._%')}"
    return HttpSource(base_url, settings.read_timeout_s, kind="s3", sign=access.sign)


@lru_cache(maxsize=1)
def _access(endpoint: str, region: str) -> S3Access:
    """One for the process: every model's reads share the credentials that were found, and their renewal."""
    return S3Access(endpoint, region)
