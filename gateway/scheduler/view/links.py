"""Hosts by the speed of their links, in blocks: the fastest come first, and a whole block can be left out.

Measured links all differ, so hosts of equal speed no longer form a class.  A block holds hosts whose links are near one
another, in the order of ties.  A search for fast links goes from block to block, and in each only as far as its order
of ties is of interest::

    Links   [0, 1.1e9)          [1.1e9, 1.9e9)       [1.9e9, …)
              (0, h3) (1, h8)     (0, h1) (0, h7)      (0, h2) (0, h5) (2, h4)

A block is divided when it grows, but never between hosts of the same speed: a thousand equal links are one block.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass
from typing import Final

from thaw.ids import HostId

Key = tuple[int, HostId]
"""(workers, host): among hosts whose links are free, a tie goes to the least key."""

MOST_IN_BLOCK: Final = 32
"""A search examines nearly all of the fastest block and the front of every other one.  With 16 in a block, a decision
took a fifth longer at ten thousand hosts, and a tenth longer at a thousand."""


@dataclass(slots=True)
class Block:
    """``slowest`` and ``fastest`` bound the links of its hosts (bytes/s).  After a host has gone they may be wider than
    needed."""

    keys: list[Key]  # sorted
    speeds: dict[HostId, float]
    slowest: float
    fastest: float

    @property
    def is_uniform(self) -> bool:
        return self.slowest == self.fastest

    def put(self, key: Key, bytes_per_s: float) -> None:
        bisect.insort(self.keys, key)
        self.speeds[key[1]] = bytes_per_s
        self.slowest, self.fastest = min(self.slowest, bytes_per_s), max(self.fastest, bytes_per_s)

    def drop(self, key: Key) -> None:
        del self.keys[bisect.bisect_left(self.keys, key)]
        del self.speeds[key[1]]


class Links:
    def __init__(self) -> None:
        self._from: list[float] = []  # where each block begins, ascending; the first one also holds all slower links
        self._blocks: list[Block] = []

    def __bool__(self) -> bool:
        return bool(self._blocks)

    @property
    def fastest_first(self) -> list[Block]:
        return self._blocks[::-1]

    @property
    def fastest(self) -> float:
        """Bytes/s of the fastest link, or a little more.  Raises IndexError without a host."""
        return self._blocks[-1].fastest

    def put(self, key: Key, bytes_per_s: float) -> None:
        if not self._blocks:
            self._from.append(bytes_per_s)
            self._blocks.append(_block([(key, bytes_per_s)]))
            return
        n = self._number(bytes_per_s)
        block = self._blocks[n]
        block.put(key, bytes_per_s)
        if len(block.keys) > MOST_IN_BLOCK and not block.is_uniform:
            self._divide(n)

    def drop(self, key: Key, bytes_per_s: float) -> None:
        """Raises KeyError for a host that is not there with this link."""
        n = self._number(bytes_per_s)
        block = self._blocks[n]
        block.drop(key)
        if not block.keys:
            del self._blocks[n], self._from[n]

    def _number(self, bytes_per_s: float) -> int:
        return max(0, bisect.bisect_right(self._from, bytes_per_s) - 1)

    def _divide(self, n: int) -> None:
        """Divide a block in the middle, or where the run of equal speeds around the middle begins or ends."""
        block = self._blocks[n]
        hosts = sorted(((key, block.speeds[key[1]]) for key in block.keys), key=lambda host: host[1])
        speeds = [speed for _, speed in hosts]
        at = bisect.bisect_left(speeds, speeds[len(speeds) // 2]) or bisect.bisect_right(speeds, speeds[0])
        if at == len(speeds):  # all are equal; hosts that have gone made the block look wider
            block.slowest = block.fastest = speeds[0]
            return
        self._blocks[n : n + 1] = [_block(hosts[:at]), _block(hosts[at:])]
        self._from.insert(n + 1, speeds[at])


def _block(hosts: list[tuple[Key, float]]) -> Block:
    speeds = [speed for _, speed in hosts]
    return Block(sorted(key for key, _ in hosts), {key[1]: speed for key, speed in hosts}, min(speeds), max(speeds))
