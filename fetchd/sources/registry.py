"""The model stores that fetchd reads from, by the scheme of a model's URI."""

from __future__ import annotations

from typing import Final

from fetchd.settings import FetchdSettings
from fetchd.sources.base import NotAUri, OpenSource, Source
from fetchd.sources.file import open_file
from fetchd.sources.http import open_http
from fetchd.sources.hub import open_hub
from thaw import extensions
from thaw.errors import BadRequest, ModelNotFound
from thaw.extensions import Registry
from thaw.logs import Log
from thaw.model_uri import ModelUri

SOURCES: Final = Registry[OpenSource](
    extensions.SOURCES,
    {
        "file": open_file,
        "hf": open_hub,
        "http": open_http,
        "https": open_http,
        "s3": "fetchd.sources.s3:open_s3",  # botocore takes long to import
    },
)


def open_source(uri: str, settings: FetchdSettings, *, huge: bool = False) -> Source:
    """Open the source that serves ``uri``.  Raises ModelNotFound when there is none, and the errors of OpenSource."""
    try:
        model = ModelUri.parse(uri)
    except BadRequest as e:
        raise NotAUri(e.message, hint=f"{e.hint}; {_hint()}") from None
    open_one = SOURCES.find(model.scheme)
    if open_one is None:
        raise ModelNotFound(f"no model store of this host serves {uri!r:.200}", hint=_hint())
    return open_one(model, settings, huge=huge)


def prepare(settings: FetchdSettings, log: Log) -> None:
    """Begin to look for the credentials of a configured S3 store, before the first model is requested."""
    if settings.s3_endpoint or settings.s3_region:
        from fetchd.sources import s3

        s3.prepare(settings, log)


def _hint() -> str:
    return f"a uri begins with one of these schemes: {SOURCES.known()}"
