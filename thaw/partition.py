"""Dividing a model into pipeline stages by bytes: who fetches which layers, and where those lie.

Every stage fetches at the same time, so a start takes as long as its largest stage: the partition makes that one as
small as a contiguous division can.  The embedding counts for the first stage, the final norm and the head for the
last, a tied embedding for both.  Every stage also computes at the same time, and what it computes is its layers: where
the largest leaves a choice, they are divided evenly.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from functools import cache, lru_cache
from itertools import accumulate

from thaw.errors import ModelUnsupported
from thaw.model import FileRange, ModelParts


def split(parts: ModelParts, n_stages: int) -> tuple[tuple[int, int], ...]:
    """Layers ``[a, b)`` of each stage, every stage with at least one.

    Among the divisions whose largest stage is smallest, the one with the most even layers, by the sum of the squares
    of their bytes; among those, the one that puts more layers first: the last stage also samples.  Raises
    ModelUnsupported when there are more stages than layers.
    """
    n_layers = len(parts.layers)
    if not 1 <= n_stages <= n_layers:
        raise ModelUnsupported(f"a model of {n_layers} layers cannot be divided into {n_stages} stages",
                               hint="set scaling.stages to at most the number of its layers")  # fmt: skip
    return _bounds(*_layer_bytes(parts, n_stages), n_stages)


def stage_bytes(parts: ModelParts, n_stages: int) -> tuple[int, ...]:
    """Bytes of weights that each stage of ``split`` has.  Its callers know that there are that many layers."""
    layers, first, last = _layer_bytes(parts, n_stages)
    bounds = _bounds(layers, first, last, n_stages)
    return tuple(
        sum(layers[a:b]) + (first if a == 0 else 0) + (last if b == len(layers) else 0) for a, b in bounds
    )  # fmt: skip


def _layer_bytes(parts: ModelParts, n_stages: int) -> tuple[tuple[int, ...], int, int]:
    """Of each layer, of what comes before the first, and of what the last stage of so many has besides."""
    last = size(parts.exit) + (size(parts.tied) if n_stages > 1 else 0)
    return tuple(size(layer) for layer in parts.layers), size(parts.entry), last


@lru_cache(maxsize=4096)
def _bounds(layers: tuple[int, ...], first: int, last: int, n_stages: int) -> tuple[tuple[int, int], ...]:
    """Kept by shape: thousands of functions are fine-tunes of a few models."""
    sums, n_layers = tuple(accumulate(layers, initial=0)), len(layers)
    cap = _least_cap(sums, first, last, n_stages)

    @cache
    def best(a: int, stages: int) -> tuple[float, int]:
        """(sum of squares, end of the first) for layers [a, n) in ``stages`` stages, none of which is over ``cap``."""
        if stages == 1:
            return (sums[-1] - sums[a]) ** 2 if sums[-1] - sums[a] + last <= cap else math.inf, n_layers
        found: tuple[float, int] = math.inf, n_layers
        for b in range(a + 1, n_layers - stages + 2):
            if sums[b] - sums[a] + (first if a == 0 else 0) > cap:
                break
            squares = (sums[b] - sums[a]) ** 2 + best(b, stages - 1)[0]
            if squares <= found[0]:
                found = squares, b
        return found

    bounds, a = [], 0
    for stages in range(n_stages, 0, -1):
        b = best(a, stages)[1]
        bounds.append((a, b))
        a = b
    return tuple(bounds)


def _least_cap(sums: tuple[int, ...], first: int, last: int, n_stages: int) -> int:
    """Bytes of the largest stage of the best division."""

    def fits(cap: int) -> bool:
        """With as many layers in each stage, from the front, as it can have and leave one to each behind it."""
        a, room = 0, cap - first
        for left in range(n_stages - 1, 0, -1):
            b = min(bisect_right(sums, sums[a] + room) - 1, len(sums) - 1 - left)
            if b <= a:
                return False
            a, room = b, cap
        return sums[-1] - sums[a] + last <= cap

    return bisect_left(range(sums[-1] + first + last), True, key=fits)


def ranges(parts: ModelParts, layers: tuple[int, int]) -> tuple[FileRange, ...]:
    """The weights of a stage with layers ``[a, b)``, in load order; sidecar files are not among them."""
    a, b = layers
    n_layers = len(parts.layers)
    wanted = [*(parts.entry if a == 0 else ()), *(r for layer in parts.layers[a:b] for r in layer)]
    if b == n_layers:
        wanted += [*parts.exit, *(parts.tied if a > 0 else ())]
    return join(wanted)


def rest(parts: ModelParts, layers: tuple[int, int]) -> tuple[FileRange, ...]:
    """The weights that a stage with layers ``[a, b)`` does not have yet: what it fetches to become a whole model."""
    whole = ranges(parts, (0, len(parts.layers)))
    return tuple(left for r in whole for left in _without(r, ranges(parts, layers)))


def _without(whole: FileRange, taken: Sequence[FileRange]) -> Iterator[FileRange]:
    """``taken`` is joined and in order."""
    at, end = whole.offset, whole.offset + whole.n_bytes
    for r in taken:
        if r.file != whole.file or r.offset + r.n_bytes <= at or r.offset >= end:
            continue
        if r.offset > at:
            yield FileRange(whole.file, at, r.offset - at)
        at = r.offset + r.n_bytes
    if at < end:
        yield FileRange(whole.file, at, end - at)


def join(ranges_: Sequence[FileRange]) -> tuple[FileRange, ...]:
    """In order of file and offset, neighbours joined."""
    joined: list[FileRange] = []
    for r in sorted(ranges_, key=lambda r: (r.file, r.offset)):
        last = joined[-1] if joined else None
        if last is not None and last.file == r.file and last.offset + last.n_bytes == r.offset:
            joined[-1] = FileRange(r.file, last.offset, last.n_bytes + r.n_bytes)
        else:
            joined.append(r)
    return tuple(joined)


def size(ranges_: Sequence[FileRange]) -> int:
    return sum(r.n_bytes for r in ranges_)
