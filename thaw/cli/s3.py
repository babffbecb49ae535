"""A botocore client for the S3 store: the platform's own, or the one that the environment names.

botocore alone (no boto3): it signs, retries and speaks the protocol; what goes beyond single calls is in stores.py.
"""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from thaw.dev.layout import default_layout
from thaw.errors import PlatformError, StoreUnavailable


def client(environ: dict[str, str] | None = None) -> Any:
    """Of the store that THAW_S3_ENDPOINT names, else of the running dev platform, else AWS itself."""
    import botocore.config
    import botocore.session

    env = environ if environ is not None else _environment()
    endpoint = env.get("THAW_S3_ENDPOINT")
    config = botocore.config.Config(
        proxies={} if endpoint and _is_loopback(endpoint) else None,  # None: as http_proxy and no_proxy say
        retries={"mode": "standard", "max_attempts": 3}, s3={"addressing_style": "path"}, max_pool_connections=8,
        request_checksum_calculation="when_required", response_checksum_validation="when_required",
    )  # fmt: skip
    session = botocore.session.get_session()
    return session.create_client(
        "s3", region_name=env.get("AWS_REGION") or "us-east-1", endpoint_url=endpoint,
        aws_access_key_id=env.get("AWS_ACCESS_KEY_ID"), aws_secret_access_key=env.get("AWS_SECRET_ACCESS_KEY"),
        config=config,
    )  # fmt: skip


def _environment() -> dict[str, str]:
    if names_a_store(os.environ):
        return dict(os.environ)
    platform = default_layout().read_platform()
    return dict(os.environ) | (platform.store_env() if platform is not None else {})


def names_a_store(environ: Mapping[str, str]) -> bool:
    """Keys alone do not: many a shell has those of another store."""
    return "THAW_S3_ENDPOINT" in environ


def _is_loopback(url: str) -> bool:
    host = urlsplit(url).hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def make_bucket(environ: dict[str, str] | None, name: str) -> None:
    """Make the bucket if it is not there, in the store of :func:`client`.  Raises StoreUnavailable."""
    from botocore.exceptions import BotoCoreError, ClientError

    s3 = client(environ)
    try:
        s3.create_bucket(Bucket=name)
    except ClientError as e:
        if e.response["Error"]["Code"] not in ("BucketAlreadyOwnedByYou", "BucketAlreadyExists"):
            raise PlatformError(f"the store refused to make the bucket {name}: {e}") from e
    except BotoCoreError as e:
        raise StoreUnavailable(f"the store does not answer: {e}") from e
    finally:
        s3.close()
