"""Blocks of a KV cache as bytes: a scatter writes exactly the blocks that another engine gathered."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from thaw.errors import PlatformError, ProtocolError  # noqa: E402
from thaw_runtime.engine.vllm.kv_blocks import KvBlocks  # noqa: E402
from thaw_runtime.pipeline.wire import KvWanted  # noqa: E402

N_BLOCKS, SIZE = 6, 4
NAMES = [f"model.layers.{k}.self_attn.attn" for k in range(3)]


def runner(seed: int, *, per_block: int = 1, n_blocks: int = N_BLOCKS, dtype: str = "float32") -> Any:
    """A runner with a cache of two groups: the layers 0 and 2, and the layer 1."""
    random = torch.Generator().manual_seed(seed)
    caches = {
        name: SimpleNamespace(
            kv_cache=torch.randn(n_blocks * per_block, 2, SIZE, 6, generator=random).to(getattr(torch, dtype)),
            isa="vec",
        )
        for name in NAMES
    }
    groups = [SimpleNamespace(layer_names=[NAMES[0], NAMES[2]]), SimpleNamespace(layer_names=[NAMES[1]])]
    return SimpleNamespace(
        vllm_config=SimpleNamespace(cache_config=SimpleNamespace(num_gpu_blocks=N_BLOCKS, block_size=SIZE)),
        compilation_config=SimpleNamespace(static_forward_context=caches),
        kv_cache_config=SimpleNamespace(kv_cache_groups=groups),
    )


def cache(made: Any, name: str) -> Any:
    return made.compilation_config.static_forward_context[name].kv_cache


def asked(*blocks: tuple[int, ...], known: tuple[tuple[int, ...], ...] = ((), ())) -> KvWanted:
    return KvWanted(1, 1, blocks, known)


def sent(there: Any, wanted: KvWanted, before: Any = None) -> memoryview:
    """Return the bytes of layer 0 that an engine with this runner sends, if it sent the cache ``before`` in the last
    round."""
    kv = KvBlocks(there, "v")
    old = {}
    if before is not None:
        every = asked(tuple(range(N_BLOCKS)), ())
        old = kv.by_block(NAMES[0], every, KvBlocks(before, "v").gather(NAMES[0], every.blocks))
    return kv.encode(NAMES[0], wanted, kv.gather(NAMES[0], wanted.blocks), old)


@pytest.mark.parametrize("per_block", [1, 2])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gathered_blocks_arrive_and_no_other_block_changes(per_block: int, dtype: str) -> None:
    here, there = (runner(seed, per_block=per_block, dtype=dtype) for seed in (1, 2))
    before, wanted = cache(here, NAMES[0]).clone(), asked((4, 1), (2,))
    KvBlocks(here, "v").scatter(NAMES[0], wanted, sent(there, wanted), [{}, {}])
    for block in range(N_BLOCKS):
        rows = slice(block * per_block, (block + 1) * per_block)
        source = there if block in wanted.blocks[0] else None
        expected = cache(source, NAMES[0])[rows] if source else before[rows]
        assert torch.equal(cache(here, NAMES[0])[rows], expected)


def test_layers_are_found_by_their_numbers_and_counted_by_their_groups() -> None:
    kv = KvBlocks(runner(1), "v")
    assert kv.names((1, 3)) == (NAMES[2], NAMES[1])
    assert kv.n_bytes(NAMES, ((0, 1), (5,))) == (2 * 2 + 1) * 2 * SIZE * 6 * 4


@pytest.mark.parametrize("data", [b"", b"x" * 191, b"x" * 193])
def test_other_bytes_than_the_blocks_have_are_refused(data: bytes) -> None:
    with pytest.raises(ProtocolError, match="bytes for"):
        KvBlocks(runner(1), "v").scatter(NAMES[0], asked((3,), ()), memoryview(data), [{}, {}])


def test_another_number_of_groups_is_refused() -> None:
    with pytest.raises(ProtocolError, match="groups"):
        KvBlocks(runner(1), "v").gather(NAMES[0], ((3,),))


def test_a_layer_without_a_cache_is_refused() -> None:
    with pytest.raises(ProtocolError, match="without a cache"):
        KvBlocks(runner(1), "v").scatter("model.layers.9.attn", asked((), ()), memoryview(b""), [{}, {}])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_of_a_known_block_only_the_changed_elements_are_sent(dtype: str) -> None:
    """Block 3 has two tokens more than in the round before, and block 1 is new."""
    here, there, before = (runner(seed, dtype=dtype) for seed in (1, 1, 1))
    cache(there, NAMES[0])[3, :, 1:3] += 1.0
    cache(there, NAMES[0])[1] = float("nan")
    wanted = asked((3, 1), (), known=((3,), ()))
    data = sent(there, wanted, before)
    n_elements, size = 2 * SIZE * 6, cache(there, NAMES[0]).element_size()
    assert len(data) == n_elements * size + n_elements // 8 + n_elements * size * 2 // SIZE
    KvBlocks(here, "v").scatter(NAMES[0], wanted, data, [{3: 2}, {}])
    for block in (1, 3):
        assert torch.equal(
            cache(here, NAMES[0])[block].view(torch.uint8), cache(there, NAMES[0])[block].view(torch.uint8)
        )


@pytest.mark.parametrize(("change", "accepted"), [("one token", True), ("another block", False), ("nothing", True)])
def test_a_known_block_must_continue_its_last_copy(change: str, accepted: bool) -> None:
    """The block has one token more than here, so only that token's elements may differ.

    They need not: the place may hold the same token of a request that had the block before.
    """
    here, there, before = runner(1), runner(1), runner(1)
    if change == "one token":
        cache(there, NAMES[0])[3, :, 2] += 1.0
    elif change == "another block":
        cache(there, NAMES[0])[3] = cache(there, NAMES[0])[4]
    wanted = asked((3,), (), known=((3,), ()))
    data, kv = sent(there, wanted, before), KvBlocks(here, "v")
    if accepted:
        kv.scatter(NAMES[0], wanted, data, [{3: 1}, {}])
        assert torch.equal(cache(here, NAMES[0])[3], cache(there, NAMES[0])[3])
    else:
        with pytest.raises(ProtocolError, match="copied before"):
            kv.scatter(NAMES[0], wanted, data, [{3: 1}, {}])


@pytest.mark.parametrize("cut", [1, 5, 7])
def test_cut_changes_are_refused(cut: int) -> None:
    there, before = runner(1), runner(1)
    cache(there, NAMES[0])[3, :, 2] += 1.0
    wanted = asked((3,), (), known=((3,), ()))
    with pytest.raises(ProtocolError, match="bytes for"):
        KvBlocks(runner(1), "v").scatter(NAMES[0], wanted, sent(there, wanted, before)[:-cut], [{3: 1}, {}])


def test_a_known_block_that_was_not_sent_before_is_refused() -> None:
    with pytest.raises(ProtocolError, match="has not sent"):
        sent(runner(1), asked((3,), (), known=((3,), ())))


def test_engines_that_arrange_blocks_differently_have_other_layouts() -> None:
    base = KvBlocks(runner(1), "v").layout(NAMES[0])
    other = runner(1)
    other.compilation_config.static_forward_context[NAMES[0]].isa = "amx"
    half = runner(1)
    half.compilation_config.static_forward_context[NAMES[0]].kv_cache = cache(half, NAMES[0]).bfloat16()
    found = {KvBlocks(other, "v").layout(NAMES[0]), KvBlocks(half, "v").layout(NAMES[0])}
    found |= {KvBlocks(runner(1), "w").layout(NAMES[0]), KvBlocks(runner(1, per_block=2), "v").layout(NAMES[0])}
    assert base not in found
    assert len(found) == 4


def test_a_cache_in_which_a_block_is_not_one_piece_is_refused() -> None:
    with pytest.raises(PlatformError, match="shape"):
        KvBlocks(runner(1, n_blocks=2), "v")


def test_the_difference_is_that_of_the_worst_block() -> None:
    made = runner(1)
    cache(made, NAMES[0])[4] = cache(made, NAMES[0])[1] * 1.5
    cache(made, NAMES[0])[5] = cache(made, NAMES[0])[2]
    assert KvBlocks(made, "v").difference(NAMES[0], ((1, 2), ()), ((4, 5), ())) == pytest.approx(0.5)
