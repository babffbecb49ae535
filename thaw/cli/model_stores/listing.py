"""The models of a store: every place that holds a pointer, an index or a config.json."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from thaw.checkpoints import versions
from thaw.cli.model_stores.checkpoints import newest, read_index
from thaw.cli.model_stores.stores import open_store
from thaw.dev.layout import default_layout
from thaw.errors import BadRequest, ModelCorrupt, ModelNotFound, ModelUnsupported, PlatformError, StoreUnavailable
from thaw.model import INDEX_NAME, ModelIndex
from thaw.model_uri import ModelUri

_NAMES: Final = (versions.POINTER_NAME, INDEX_NAME, "config.json")


@dataclass(frozen=True, slots=True)
class Listed:
    """``index`` is the newest version's, and None for a checkpoint without a readable one.  ``n_versions`` is 0 for a
    directory that was not pushed by versions."""

    uri: str
    index: ModelIndex | None
    n_versions: int


def models() -> Iterator[Listed]:
    """Each model by its plain name, sorted by URI; a version whose plain name is not there stands by itself."""
    platform = default_layout().read_platform()
    uris = _in_directory(Path(platform.store_dir)) if platform is not None and platform.store_dir else _in_s3()
    n_versions = Counter(versions.plain_name(uri) for uri in uris if versions.pinned(uri))
    for uri in sorted(uri for uri in uris if not (versions.pinned(uri) and versions.plain_name(uri) in uris)):
        try:
            yield Listed(uri, read_index(newest(open_store(uri))), n_versions[uri])
        except (ModelNotFound, ModelCorrupt, ModelUnsupported):
            yield Listed(uri, None, n_versions[uri])


def _in_directory(root: Path) -> set[str]:
    found = {path.parent for name in _NAMES for path in root.glob(f"**/{name}")}
    return _named(ModelUri("file", "", path.parts[1:]) for path in found)


def _in_s3() -> set[str]:
    from botocore.exceptions import BotoCoreError, ClientError

    from thaw.cli.model_stores.s3 import client
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
    found = set[ModelUri]()
    for page in s3.get_paginator("list_objects_v2").paginate(Bucket=bucket):
        for entry in page.get("Contents", []):
            prefix, _, name = entry["Key"].rpartition("/")
            if name in _NAMES and prefix:
                found.add(ModelUri("s3", bucket, tuple(prefix.split("/"))))
    return _named(found)


def _named(places: Iterable[ModelUri]) -> set[str]:
    """The URIs of places; those that no URI can name are somebody else's."""
    found = set()
    for place in places:
        with suppress(BadRequest, UnicodeError):
            found.add(str(ModelUri.parse(str(place))))
    return found
