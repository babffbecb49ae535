"""Records which KV blocks of the other stages a stage has: pure bookkeeping for the pre-copy of a consolidation.

A block that is full never changes while a request holds it, so a copy made while the pipeline decodes stays right.  A
block that a request gives up may be taken by another one.  A copy is therefore right only for its *content*: the
request and the place in it, or the digest of all tokens up to the block's end (the key of the prefix cache).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass

Owner = tuple[str, int, int]
"""Request id, how often the request lost its blocks, and the block's place in the request."""


@dataclass(frozen=True, slots=True)
class HeldBlock:
    """A block that a request holds, with ``n_tokens`` computed tokens in it.  ``digest`` is None outside the prefix
    cache.
    """

    block: int
    owner: Owner
    n_tokens: int
    is_full: bool
    digest: bytes | None = None


class BlockCopies:
    """The copies of one KV cache group."""

    def __init__(self) -> None:
        self._copied: dict[int, HeldBlock] = {}
        self._asked: dict[int, HeldBlock] = {}
        self._last_round: Set[int] = frozenset()  # the blocks that came in the last round

    def missing(self, held: Iterable[HeldBlock]) -> list[HeldBlock]:
        """The blocks without a right copy, each once, in order.  A block that is not full is always missing."""
        found = {each.block: each for each in held if not self._has(each)}
        return list(found.values())

    def ask(self, blocks: Sequence[HeldBlock]) -> None:
        """Note that these blocks are requested in their present state."""
        self._asked = {each.block: each for each in blocks}

    def added_tokens(self) -> dict[int, int]:
        """Return how many tokens each requested block has gained since the round before, if it came in that round
        too."""
        return {
            block: held.n_tokens - copy.n_tokens for block, held in self._asked.items() if (copy := self._copy(held))
        }

    def arrived(self) -> None:
        """Note that all requested blocks have arrived."""
        self._copied |= self._asked
        self._last_round, self._asked = self._asked.keys(), {}

    def forget(self, blocks: Iterable[int]) -> None:
        """Note that these blocks have been overwritten here."""
        for block in blocks:
            self._copied.pop(block, None)

    def unusable(self, held: Iterable[HeldBlock], cached: Sequence[tuple[int, bytes]]) -> set[int]:
        """The blocks of the prefix cache (block, digest) that no later request may use: those whose content was not
        copied.  ``held`` are the blocks that requests hold, all of them copied."""
        right = {each.block for each in held if each.is_full}
        right |= {block for block, digest in cached if self._is_digest(block, digest)}
        return {block for block, _ in cached} - right

    def has_part(self, held: HeldBlock) -> bool:
        """True if the block came in the round before too, so that the other stages need to send its changes only."""
        return self._copy(held) is not None

    def _copy(self, held: HeldBlock) -> HeldBlock | None:
        copy = self._copied.get(held.block) if held.block in self._last_round else None
        return copy if copy is not None and copy.owner == held.owner else None

    def _has(self, held: HeldBlock) -> bool:
        copy = self._copied.get(held.block)
        if copy is None or not copy.is_full or not held.is_full:
            return False
        return copy.owner == held.owner or (held.digest is not None and copy.digest == held.digest)

    def _is_digest(self, block: int, digest: bytes) -> bool:
        copy = self._copied.get(block)
        return copy is not None and copy.is_full and copy.digest == digest
