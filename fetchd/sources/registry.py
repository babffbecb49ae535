"""Which source serves a uri."""

from __future__ import annotations

from urllib.parse import urlsplit

from fetchd.settings import FetchdSettings
from fetchd.sources.base import Source
from fetchd.sources.file import FileSource
from fetchd.sources.http import HttpSource
from thaw.errors import ModelNotFound

_HINT = "use file:///dir, http(s)://host/dir or s3://bucket/prefix"


def open_source(uri: str, settings: FetchdSettings, *, huge: bool = False) -> Source:
    """``huge``: the pool is made of huge pages.  Raises ModelNotFound for a uri that no source serves."""
    try:
        parts = urlsplit(uri)
        host, _ = parts.hostname, parts.port  # port: its lookup is what checks it
    except ValueError as e:
        raise ModelNotFound(f"{uri!r:.200} is not a model uri: {e}", hint=_HINT) from None
    if parts.scheme == "file" and not parts.netloc and parts.path.startswith("/"):
        return FileSource(uri, huge=huge)
    if parts.scheme in ("http", "https") and host:
        return HttpSource(f"{parts.scheme}://{parts.netloc}{parts.path}", settings.read_timeout_s)
    if parts.scheme == "s3" and parts.netloc:
        from fetchd.sources.s3 import s3_source  # botocore takes long to import: only where it is needed

        return s3_source(uri, settings)
    raise ModelNotFound(f"{uri!r:.200} is not a model uri", hint=_HINT)
