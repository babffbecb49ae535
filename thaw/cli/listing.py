"""The models of a store: every place that holds an index or a config.json."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from thaw.cli.checkpoints import read_index
from thaw.cli.stores import open_store
from thaw.dev.layout import default_layout
from thaw.errors import ModelCorrupt, ModelNotFound, PlatformError, StoreUnavailable
from thaw.model import INDEX_NAME, ModelIndex


def models() -> Iterator[tuple[str, ModelIndex | None]]:
    """(uri, index) of each model, sorted by URI.  The index is None for a checkpoint without a readable one."""
    platform = default_layout().read_platform()
    uris = _in_directory(Path(platform.store_dir)) if platform is not None and platform.store_dir else _in_s3()
    for uri in sorted(uris):
        try:
            yield uri, read_index(open_store(uri))
        except (ModelNotFound, ModelCorrupt):
            yield uri, None


def _in_directory(root: Path) -> set[str]:
    names = (INDEX_NAME, "config.json")
    return {path.parent.as_uri() for name in names for path in root.glob(f"**/{name}")}


def _in_s3() -> set[str]:
    from botocore.exceptions import BotoCoreError, ClientError

    from thaw.cli.s3 import client
    from thaw.s3 import refusal

    s3 = client()
    try:
        return {uri for bucket in s3.list_buckets()["Buckets"] for uri in _in_bucket(s3, bucket["Name"])}
    except ClientError as e:
        raise PlatformError(
            f"the store refused to list: {refusal(e)}", hint="see 'Credentials for S3' in docs/fetchd.md"
        ) from e
    except BotoCoreError as e:
        raise StoreUnavailable(f"the store does not answer: {e}", hint="thaw dev status; THAW_S3_ENDPOINT") from e


def _in_bucket(s3: Any, bucket: str) -> set[str]:
    found = set()
    for page in s3.get_paginator("list_objects_v2").paginate(Bucket=bucket):
        for entry in page.get("Contents", []):
            prefix, _, name = entry["Key"].rpartition("/")
            if name in (INDEX_NAME, "config.json") and prefix:
                found.add(f"s3://{bucket}/{prefix}")
    return found
