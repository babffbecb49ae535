"""Divide a model into pipeline stages by bytes: which stage fetches which layers, and where these lie.

All stages fetch at the same time, so a start takes as long as its largest stage.  The partition makes the largest stage
as small as a contiguous division can.  The embedding counts for the first stage, the final norm and the head count for
the last stage, and a tied embedding counts for both.  All stages also compute at the same time, and each computes its
layers.  So if several divisions have an equally small largest stage, the layers are divided evenly.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from functools import cache, lru_cache
from itertools import accumulate
from operator import attrgetter
from typing import Final

from thaw.errors import ModelUnsupported
from thaw.model import FileRange, ModelParts

_PLACE: Final = attrgetter("file", "offset")


def split(parts: ModelParts, n_stages: int) -> tuple[tuple[int, int], ...]:
    """Layers ``[a, b)`` of each stage; every stage has at least one layer.

    Among the divisions whose largest stage is smallest, this function takes the division with the most even layers, by
    the sum of the squares of each stage's layer bytes.  Among equal divisions, it takes the one with more layers in the
    first stages, because the last stage also samples.  Raises ModelUnsupported when there are more stages than layers.
    """
    n_layers = len(parts.layers)
    if not 1 <= n_stages <= n_layers:
        raise ModelUnsupported(
            f"a model of {n_layers} layers cannot be divided into {n_stages} stages",
            hint="set scaling.stages to at most the number of its layers",
        )
    return _bounds(*_layer_bytes(parts, n_stages), n_stages)


def largest_stages(parts: ModelParts, sizes: range) -> list[int]:
    """Bytes of weights of the largest stage, for each number of stages in ``sizes``, all of them above 1.
    The caller makes sure that there are enough layers."""
    layers, first, last = _layer_bytes(parts, 2)
    return [_largest_stage(layers, first, last, n_stages) for n_stages in sizes]


@lru_cache(maxsize=4096)
def _largest_stage(layers: tuple[int, ...], first: int, last: int, n_stages: int) -> int:
    bounds = _bounds(layers, first, last, n_stages)
    return max(sum(layers[a:b]) + (first if a == 0 else 0) + (last if b == len(layers) else 0) for a, b in bounds)


def _layer_bytes(parts: ModelParts, n_stages: int) -> tuple[tuple[int, ...], int, int]:
    """Bytes of each layer, of the parts before the first layer, and of the other parts that the last stage has."""
    last = size(parts.exit) + (size(parts.tied) if n_stages > 1 else 0)
    return tuple([size(layer) for layer in parts.layers]), size(parts.entry), last


@lru_cache(maxsize=4096)
def _bounds(layers: tuple[int, ...], first: int, last: int, n_stages: int) -> tuple[tuple[int, int], ...]:
    """The result of ``split``, cached by sizes, because thousands of functions are fine-tunes of a few models."""
    sums, n_layers = tuple(accumulate(layers, initial=0)), len(layers)
    cap = _least_cap(sums, first, last, n_stages)

    @cache
    def best(a: int, stages: int) -> tuple[float, int]:
        """(sum of squares, end of the first stage) for layers [a, n) in ``stages`` stages of at most ``cap`` bytes."""
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
        """Fill the stages from the first one: each takes as many layers as fit, but leaves one to each later stage."""
        a, room = 0, cap - first
        for left in range(n_stages - 1, 0, -1):
            b = min(bisect_right(sums, sums[a] + room) - 1, len(sums) - 1 - left)
            if b <= a:
                return False
            a, room = b, cap
        return sums[-1] - sums[a] + last <= cap

    return bisect_left(range(sums[-1] + first + last), True, key=fits)


def ranges(parts: ModelParts, layers: tuple[int, int]) -> tuple[FileRange, ...]:
    """The weights of a stage with layers ``[a, b)``, in load order, without sidecar files."""
    a, b = layers
    n_layers = len(parts.layers)
    wanted = [*(parts.entry if a == 0 else ()), *(r for layer in parts.layers[a:b] for r in layer)]
    if b == n_layers:
        wanted += [*parts.exit, *(parts.tied if a > 0 else ())]
    return join(wanted)


def rest(whole: Sequence[FileRange], weights: Sequence[FileRange]) -> tuple[FileRange, ...]:
    """The weights that a stage with ``weights`` does not have: it fetches them to become the ``whole`` model.  Both are
    results of ``ranges``."""
    return tuple(left for r in whole for left in _without(r, weights))


def files(parts: ModelParts) -> set[str]:
    """The names of the files with weights."""
    return {r.file for part in (parts.entry, *parts.layers, parts.exit, parts.tied) for r in part}


def _without(whole: FileRange, taken: Sequence[FileRange]) -> Iterator[FileRange]:
    """The parts of ``whole`` that are not in ``taken``, which must be joined and in order."""
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
    """The ranges in order of file and offset, with adjacent ranges joined."""
    joined: list[FileRange] = []
    file: str | None = None
    begin = end = 0
    for r in sorted(ranges_, key=_PLACE):
        if r.file == file and r.offset == end:
            end += r.n_bytes
            continue
        if file is not None:
            joined.append(FileRange(file, begin, end - begin))
        file, begin, end = r.file, r.offset, r.offset + r.n_bytes
    return (*joined, FileRange(file, begin, end - begin)) if file is not None else ()


def size(ranges_: Sequence[FileRange]) -> int:
    return sum([r.n_bytes for r in ranges_])
