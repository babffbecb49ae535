"""The partition compared with every contiguous division, and the ranges that follow from it."""

from __future__ import annotations

from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from thaw.errors import ModelUnsupported
from thaw.model import FileRange, ModelParts
from thaw.partition import join, largest_stages, ranges, rest, size, split

SIZES = st.lists(st.integers(1, 50), min_size=1, max_size=9)


def model(layers: list[int], entry: int = 0, exit_: int = 0, *, tied: bool = False) -> ModelParts:
    at, placed = 0, []
    for n_bytes in (entry, *layers, exit_):
        placed.append((FileRange("w", at, n_bytes),) if n_bytes else ())
        at += n_bytes
    return ModelParts(placed[0], tuple(placed[1:-1]), placed[-1], placed[0] if tied else ())


def largest(parts: ModelParts, bounds: tuple[tuple[int, int], ...]) -> int:
    return max(size(ranges(parts, b)) for b in bounds)


def unevenness(layers: list[int], bounds: tuple[tuple[int, int], ...]) -> int:
    return sum(sum(layers[a:b]) ** 2 for a, b in bounds)


@given(SIZES, st.integers(0, 80), st.integers(0, 80), st.booleans(), st.integers(1, 8))
def test_no_contiguous_division_has_a_smaller_largest_stage_or_with_the_same_one_more_even_layers(
    layers: list[int], entry: int, exit_: int, tied: bool, n_stages: int
) -> None:
    n_stages = min(n_stages, len(layers))
    parts = model(layers, entry, exit_, tied=tied)
    bounds = split(parts, n_stages)
    assert [a for a, _ in bounds] == [0, *[b for _, b in bounds[:-1]]]
    assert bounds[-1][1] == len(layers)
    divisions = [tuple(pairwise((0, *c, len(layers)))) for c in combinations(range(1, len(layers)), n_stages - 1)]
    assert largest(parts, bounds) == min(largest(parts, d) for d in divisions)
    best = [d for d in divisions if largest(parts, d) == largest(parts, bounds)]
    assert unevenness(layers, bounds) == min(unevenness(layers, d) for d in best)


@given(SIZES, st.booleans(), st.integers(1, 8))
def test_the_stages_have_every_byte_once_and_a_tied_embedding_twice(
    layers: list[int], tied: bool, n_stages: int
) -> None:
    n_stages = min(n_stages, len(layers))
    parts = model(layers, 7, 3, tied=tied)
    fetched = sum(size(ranges(parts, b)) for b in split(parts, n_stages))
    assert fetched == 7 + sum(layers) + 3 + (7 if tied and n_stages > 1 else 0)


def test_more_stages_than_layers_are_refused_with_the_number_of_layers() -> None:
    with pytest.raises(ModelUnsupported, match="2 layers cannot be divided into 3"):
        split(model([1, 1]), 3)


def lacking(parts: ModelParts, layers: tuple[int, int]) -> tuple[FileRange, ...]:
    return rest(ranges(parts, (0, len(parts.layers))), ranges(parts, layers))


@given(SIZES, st.booleans(), st.integers(1, 8))
def test_what_a_stage_has_and_the_rest_are_the_whole_model_and_nothing_twice(
    layers: list[int], tied: bool, n_stages: int
) -> None:
    parts = model(layers, 7, 3, tied=tied)
    whole = ranges(parts, (0, len(layers)))
    for bounds in split(parts, min(n_stages, len(layers))):
        mine, others = ranges(parts, bounds), lacking(parts, bounds)
        assert join([*mine, *others]) == whole
        assert size(mine) + size(others) == size(whole)


def test_the_rest_is_cut_out_of_every_file_that_a_stage_has_a_part_of() -> None:
    layers = ((FileRange("a", 10, 5), FileRange("b", 0, 4)), (FileRange("a", 15, 5), FileRange("c", 0, 2)))
    parts = ModelParts((FileRange("a", 0, 10),), layers, (FileRange("b", 8, 1),))
    assert lacking(parts, (1, 2)) == (FileRange("a", 0, 15), FileRange("b", 0, 4))
    assert lacking(parts, (0, 1)) == (FileRange("a", 15, 5), FileRange("b", 8, 1), FileRange("c", 0, 2))
    assert lacking(parts, (0, 2)) == ()


@given(SIZES, st.booleans(), st.integers(1, 8))
def test_the_bytes_of_the_largest_stage_are_those_of_its_ranges(layers: list[int], tied: bool, most: int) -> None:
    parts, sizes = model(layers, 7, 3, tied=tied), range(2, min(most, len(layers)) + 1)
    assert largest_stages(parts, sizes) == [
        max(size(ranges(parts, bounds)) for bounds in split(parts, n_stages)) for n_stages in sizes
    ]
