"""The digest of a leaf of the hash tree, apart from hash_tree.py, which loads the standard library only."""

from __future__ import annotations


def digest(piece: bytes | memoryview) -> str:
    """Return the BLAKE3 of a chunk or an edge, written as in the index."""
    from blake3 import blake3  # most commands of the CLI need no digest

    return str(blake3(piece).hexdigest())
