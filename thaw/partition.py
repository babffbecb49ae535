"""Dividing a model into pipeline stages by bytes: who fetches which layers, and where those lie.

Every stage fetches at the same time, so a start takes as long as its largest stage: the partition makes that one as
small as a contiguous division can.  The embedding counts for the first stage, the final norm and the head for the
last, a tied embedding for both.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache, lru_cache
from itertools import accumulate

from thaw.errors import ModelUnsupported
from thaw.model import FileRange, ModelParts


def split(parts: ModelParts, n_stages: int) -> tuple[tuple[int, int], ...]:
    """Layers ``[a, b)`` of each stage, every stage with at least one.

    Among the divisions whose largest stage is smallest, the one that puts more layers first: the last stage also
    samples.  Raises ModelUnsupported when there are more stages than layers.
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

    @cache
    def best(a: int, stages: int) -> tuple[int, int]:
        """(bytes of the largest stage, end of the first) for layers [a, n) in ``stages`` stages."""
        head = first if a == 0 else 0
        if stages == 1:
            return head + sums[-1] - sums[a] + last, n_layers
        ends = range(n_layers - stages + 1, a, -1)
        return min(((max(head + sums[b] - sums[a], best(b, stages - 1)[0]), b) for b in ends), key=lambda c: c[0])

    bounds, a = [], 0
    for stages in range(n_stages, 0, -1):
        b = best(a, stages)[1]
        bounds.append((a, b))
        a = b
    return tuple(bounds)


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
