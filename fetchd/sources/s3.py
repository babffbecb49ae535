"""``s3://bucket/prefix``: botocore signs, our own reader moves the bytes (path-style addresses)."""

from __future__ import annotations

from urllib.parse import quote, urlsplit

from botocore.auth import S3SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials

from fetchd.settings import FetchdSettings
from fetchd.sources.http import HttpSource, Signer, unsigned


def s3_source(uri: str, settings: FetchdSettings) -> HttpSource:
    parts = urlsplit(uri)
    endpoint = settings.s3_endpoint or f"https://s3.{settings.s3_region}.amazonaws.com"
    base_url = f"{endpoint.rstrip('/')}/{parts.netloc}{quote(parts.path, safe='/~-._%')}"
    return HttpSource(base_url, settings.read_timeout_s, kind="s3", sign=_signer(settings))


def _signer(settings: FetchdSettings) -> Signer:
    if not settings.s3_key_id:
        return unsigned
    auth = S3SigV4Auth(Credentials(settings.s3_key_id, settings.s3_secret), "s3", settings.s3_region)

    def sign(method: str, url: str, headers: dict[str, str]) -> dict[str, str]:
        request = AWSRequest(method=method, url=url, headers=headers)
        auth.add_auth(request)
        return {name: str(value) for name, value in request.headers.items()}

    return sign
