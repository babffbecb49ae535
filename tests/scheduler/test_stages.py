"""The bytes that the stages of a model fetch, and the slabs that these take in a host's pool."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fetchd.segments import SegmentKey
from gateway.scheduler.placement.stage_bytes import Stages
from relay.protocol.pool import n_slabs
from tests.scheduler.facts import FACTS, MIB, SMOLLM2
from thaw import partition
from thaw.errors import ModelUnsupported
from thaw.model import FileRange, ModelFacts, ModelParts

LAYERS = ((FileRange("one", 10, 50),), (FileRange("two", 0, 40),))
PARTS = ModelParts((FileRange("embedding", 0, 10),), LAYERS, (FileRange("two", 40, 10),))
FILES = {"config.json": 20, "embedding": 10, "one": 60, "two": 50, "unused.safetensors": 10}
SHARDED = ModelFacts("s3://m/sharded", 150, 120, 2, (50, 40), 30, "", "e", True, FILES, parts=PARTS)
"""The embedding has a file of its own, and so has each layer."""


@pytest.mark.parametrize("facts", [FACTS, SMOLLM2, SHARDED], ids=lambda facts: facts.uri)
def test_one_stage_is_every_file_from_its_begin_to_its_end_in_the_order_of_the_facts(facts: ModelFacts) -> None:
    (whole,) = Stages(facts).of(1)
    assert whole.first == tuple(FileRange(name, 0, n_bytes) for name, n_bytes in facts.files.items())
    assert (whole.layers, whole.rest, whole.n_bytes) == ((0, facts.n_layers), (), sum(facts.files.values()))


@pytest.mark.parametrize("facts", [SMOLLM2, SHARDED], ids=lambda facts: facts.uri)
def test_every_stage_of_several_has_the_sidecars_its_layers_and_then_the_rest_of_the_weights(
    facts: ModelFacts,
) -> None:
    found = Stages(facts).of(2)
    assert [s.layers for s in found] == list(partition.split(facts.parts, 2))
    sidecar = FileRange("config.json", 0, facts.files["config.json"])
    whole = partition.ranges(facts.parts, (0, facts.n_layers))
    for stage in found:
        assert stage.first == (sidecar, *partition.ranges(facts.parts, stage.layers))
        assert stage.rest == partition.rest(whole, partition.ranges(facts.parts, stage.layers))
        assert stage.n_bytes == sum(r.n_bytes for r in stage.first)


@pytest.mark.parametrize("facts", [SMOLLM2, SHARDED], ids=lambda facts: facts.uri)
def test_the_largest_stage_is_known_before_any_ranges_are_made(facts: ModelFacts) -> None:
    stages = Stages(facts)
    assert stages.most == facts.n_layers
    expected = tuple(max(s.n_bytes for s in stages.of(n)) for n in range(1, stages.most + 1))
    for up_to in (1, 2, stages.most, stages.most + 3):  # larger questions do not change the earlier answers
        assert stages.largest(up_to) == expected[:up_to]
    assert stages.largest(1) == expected[:1]


def test_a_model_whose_parts_are_not_known_has_one_stage() -> None:
    stages = Stages(FACTS)
    assert stages.most == 1
    assert stages.largest(4) == (100 * MIB,)
    with pytest.raises(ModelUnsupported):
        stages.of(2)


def test_a_pool_must_have_room_for_the_first_part_of_the_largest_stage_in_slabs_of_its_own_size() -> None:
    stages = Stages(SMOLLM2)
    for slab_bytes in (MIB, 64 * MIB):  # hosts may have slabs of different sizes
        for n in (1, 4):
            assert stages.slabs(n, slab_bytes) == max(n_slabs(s.first, slab_bytes) for s in stages.of(n))
    assert stages.slabs(1, 64 * MIB) == 5


@pytest.mark.parametrize(("sha256", "etag", "version"), [("aa", "", "aa"), ("", "ee", "ee")])
def test_the_whole_model_is_known_by_the_name_that_fetchd_gives_to_its_segment(
    sha256: str, etag: str, version: str
) -> None:
    whole = Stages(replace(FACTS, sha256=sha256, etag=etag)).whole
    assert whole.ranges == (FileRange("w", 0, 100 * MIB),)
    assert whole.key == SegmentKey("s3://m/x", version, whole.ranges).content
