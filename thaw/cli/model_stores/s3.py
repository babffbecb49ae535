"""Chooses the S3 store of the command line: the one that the environment names, or the platform's own."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from botocore.exceptions import BotoCoreError, ClientError

from thaw.dev.layout import default_layout
from thaw.errors import PlatformError, StoreUnavailable
from thaw.s3 import S3Access, refusal


def client(store_env: Mapping[str, str] | None = None) -> Any:
    """A client of the platform whose ``store_env`` is given, else of the store that THAW_S3_ENDPOINT names, else of the
    platform that runs here, else of AWS.  For a platform's own store it uses the store's key, not the shell's.
    """
    if not store_env and not names_a_store(os.environ):
        platform = default_layout().read_platform()
        store_env = platform.store_env() if platform is not None else None
    if not store_env:
        return S3Access.from_environment(os.environ).client()
    return S3Access(
        store_env["THAW_S3_ENDPOINT"],
        store_env["AWS_REGION"],
        key_id=store_env["AWS_ACCESS_KEY_ID"],
        secret=store_env["AWS_SECRET_ACCESS_KEY"],
    ).client()


def names_a_store(environ: Mapping[str, str]) -> bool:
    """True if the environment names an endpoint.  Keys alone are not enough: they may be for another store."""
    return "THAW_S3_ENDPOINT" in environ


def make_bucket(store_env: Mapping[str, str] | None, name: str) -> None:
    """Make the bucket in the store of :func:`client`, unless it exists.  Raises PlatformError, StoreUnavailable."""
    s3 = client(store_env)
    try:
        s3.create_bucket(Bucket=name)
    except ClientError as e:
        if refusal(e) not in ("BucketAlreadyOwnedByYou", "BucketAlreadyExists"):
            raise PlatformError(f"the store refused to make the bucket {name}: {refusal(e)}") from e
    except BotoCoreError as e:
        raise StoreUnavailable(f"the store does not answer: {e}") from e
    finally:
        s3.close()
