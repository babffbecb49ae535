"""One large object for S3, in parts: an interrupted push continues it, and chunks that the store has are copied there.

::

    part 1   an earlier push sent it (its MD5 is the part's etag)      kept
    part 2   another version has the same chunks side by side          copied within the store
    part 3   neither                                                   sent

An error or Ctrl-C leaves the parts of a push.  If no later push continues them, the store keeps and bills them until
its lifecycle rule for unfinished uploads removes them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from thaw.errors import ModelCorrupt
from thaw.model import CHUNK_BYTES
from thaw.model_uri import ModelUri

_PARTS_AT_MOST: Final = 9_000  # S3 allows 10,000


class Held(NamedTuple):
    """A chunk that a store has: ``[offset, …)`` of ``file`` of the model at ``uri``."""

    uri: str
    file: str
    offset: int


@dataclass(frozen=True, slots=True)
class Content:
    """A file to write.  Its chunks have CHUNK_BYTES each, the last one may have less."""

    n_bytes: int
    chunk: Callable[[int], bytes]
    """Read a chunk by its number.  Raises ModelCorrupt for one that has changed since it was hashed."""
    held: Callable[[int], Held | None]
    """Returns the place where the store has the same chunk."""
    sent: Callable[[int], None]
    """Called with the bytes that went over the network."""
    there: Callable[[int], None]
    """Called with the bytes that the store had."""

    @property
    def n_chunks(self) -> int:
        return -(-self.n_bytes // CHUNK_BYTES)


def write(s3: Any, at: Mapping[str, str], content: Content) -> None:
    """``at`` holds Bucket and Key.  Raises ModelCorrupt, and botocore's errors."""
    upload, kept = _begin(s3, at)
    per_part = -(-content.n_chunks // _PARTS_AT_MOST)
    parts = []
    try:
        for number, first in enumerate(range(0, content.n_chunks, per_part), 1):
            numbers = range(first, min(first + per_part, content.n_chunks))
            begin = first * CHUNK_BYTES
            n_bytes = min(numbers.stop * CHUNK_BYTES, content.n_bytes) - begin
            part = {**at, "UploadId": upload, "PartNumber": number}
            if (held := _side_by_side([content.held(i) for i in numbers])) is not None and number not in kept:
                etag = _copy(s3, part, held, n_bytes)
                content.there(n_bytes)
            else:
                body = b"".join(map(content.chunk, numbers))
                etag = f'"{hashlib.md5(body, usedforsecurity=False).hexdigest()}"'
                if kept.get(number) == etag.strip('"'):
                    content.there(n_bytes)
                else:
                    etag = s3.upload_part(**part, Body=body)["ETag"]
                    content.sent(n_bytes)
            parts.append({"PartNumber": number, "ETag": etag})
        s3.complete_multipart_upload(**at, UploadId=upload, MultipartUpload={"Parts": parts})
    except ModelCorrupt:
        s3.abort_multipart_upload(**at, UploadId=upload)
        raise


def _begin(s3: Any, at: Mapping[str, str]) -> tuple[str, dict[int, str]]:
    """Return an upload of this object and the parts that it has: number → etag.  The newest unfinished one, if any."""
    found = s3.list_multipart_uploads(Bucket=at["Bucket"], Prefix=at["Key"]).get("Uploads", [])
    mine = sorted((u for u in found if u["Key"] == at["Key"]), key=lambda u: u["Initiated"])
    if not mine:
        return str(s3.create_multipart_upload(**at)["UploadId"]), {}
    upload = str(mine[-1]["UploadId"])
    pages = s3.get_paginator("list_parts").paginate(**at, UploadId=upload)
    return upload, {p["PartNumber"]: p["ETag"].strip('"') for page in pages for p in page.get("Parts", [])}


def _side_by_side(held: Sequence[Held | None]) -> Held | None:
    """The place of the first chunk, if the others follow it there."""
    first = held[0]
    if first is None:
        return None
    expected = [first._replace(offset=first.offset + i * CHUNK_BYTES) for i in range(len(held))]
    return first if list(held) == expected else None


def _copy(s3: Any, part: Mapping[str, Any], held: Held, n_bytes: int) -> str:
    place = ModelUri.parse(held.uri)
    source = {"Bucket": place.place, "Key": f"{place.key}/{held.file}"}
    span = f"bytes={held.offset}-{held.offset + n_bytes - 1}"
    answer = s3.upload_part_copy(**part, CopySource=source, CopySourceRange=span)
    return str(answer["CopyPartResult"]["ETag"])
