"""How much a start takes from a host's pool of memory for models.

fetchd keeps a model in a *segment* of whole slabs.  Ranges lie in it one after the other, each at the next multiple of
a page::

    |first range|..|second range|....|later range|..........|
    |<----- slab ----->|<----- slab ----->|<----- slab ----->|

The scheduler counts with :func:`n_slabs` before it decides a start, and fetchd with the same function when the start
comes, so both find the same room in the pool.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Final

from thaw.hub.models import content_of
from thaw.model import FileRange

ALIGNMENT: Final = 4096
"""Every range begins at a multiple of a page, so that O_DIRECT and cudaHostRegister can work on it."""


def aligned(n_bytes: int) -> int:
    """The next multiple of ALIGNMENT."""
    return -(-n_bytes // ALIGNMENT) * ALIGNMENT


def segment_length(ranges: Sequence[FileRange]) -> int:
    """Bytes from the begin of a segment with these ranges to the end of the last of them."""
    begin = end = 0
    for r in ranges:
        end = max(end, begin + r.n_bytes)
        begin += aligned(r.n_bytes)
    return end


def n_slabs(ranges: Sequence[FileRange], slab_bytes: int) -> int:
    """Number of slabs of a segment with these ranges.  A stage's later ranges follow its first ones in one segment."""
    return -(-segment_length(ranges) // slab_bytes)


def content_key(uri: str, version: str, first: Sequence[FileRange], later: Sequence[FileRange]) -> str:
    """A short name of a segment's content: fetchd lets starts with equal keys share one segment."""
    spans = [[[r.file, r.offset, r.n_bytes] for r in ranges] for ranges in (first, later)]
    return hashlib.blake2b(json.dumps([*content_of(uri, version), spans]).encode(), digest_size=12).hexdigest()
