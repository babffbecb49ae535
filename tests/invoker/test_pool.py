"""The pool's choices, and their effects on real containers."""

from __future__ import annotations

import threading
from itertools import product
from pathlib import Path

import pytest

from invoker.containers.memory_ledger import Ledger
from invoker.containers.pool import IdleInstance, Need, Place, PoolView, StemCell, Wait, choose
from relay.protocol.messages import InstanceChanged
from tests.invoker.platform import Host
from thaw.action import KIND_LLM, KIND_PYTHON
from thaw.errors import MemoryTooSmall
from thaw.ids import InstanceId

PY = StemCell("cell-1", KIND_PYTHON, 64)
ZYGOTE = StemCell("zygote", KIND_LLM, 700, shared=True)
OLD, NEW = IdleInstance(InstanceId("old"), 300, 1), IdleInstance(InstanceId("new"), 300, 2)


def need(n_bytes: int, kind: str = KIND_PYTHON) -> Need:
    return Need(kind, n_bytes)


def test_a_stem_cell_of_the_kind_is_taken_and_its_own_memory_counts_for_it() -> None:
    assert choose(PoolView(100, 36, (PY,), ()), need(100)) == Place(PY)
    assert choose(PoolView(1000, 300, (PY, ZYGOTE), ()), need(300, KIND_LLM)) == Place(ZYGOTE)


def test_without_a_stem_cell_it_is_cold() -> None:
    assert choose(PoolView(1000, 936, (PY,), ()), need(500, KIND_LLM)) == Place(None)


def test_other_stem_cells_go_first_then_the_own_then_the_longest_idle() -> None:
    assert choose(PoolView(1000, 0, (PY, ZYGOTE), (NEW, OLD)), need(60, KIND_LLM)) == Place(ZYGOTE, (PY,))
    assert choose(PoolView(1500, 0, (PY, ZYGOTE), (NEW, OLD)), need(700, KIND_LLM)) == Place(None, (PY, ZYGOTE))
    assert choose(PoolView(1500, 0, (ZYGOTE,), (NEW, OLD)), need(900, KIND_LLM)) == Place(
        None, (ZYGOTE,), (InstanceId("old"),)
    )


def test_what_works_is_waited_for_and_never_evicted() -> None:
    assert choose(PoolView(1000, 100, (), (OLD,)), need(500)) == Wait()


def test_more_than_the_host_has_is_refused_for_good() -> None:
    with pytest.raises(MemoryTooSmall):
        choose(PoolView(1000, 1000, (), ()), need(1001))


def test_a_placement_always_frees_enough_and_never_more_than_it_must() -> None:
    sizes = {OLD.instance_id: OLD.n_bytes, NEW.instance_id: NEW.n_bytes}
    for free, n_bytes in product(range(0, 1001, 50), repeat=2):
        choice = choose(PoolView(2000, free, (PY, ZYGOTE), (OLD, NEW)), need(n_bytes, KIND_LLM))
        if isinstance(choice, Place):
            freed = [c.n_bytes for c in choice.drop_cells] + [sizes[i] for i in choice.evict]
            assert free + sum(freed) >= n_bytes, (free, n_bytes)
            assert not freed or free + sum(freed[:-1]) < n_bytes, (free, n_bytes)
        else:
            assert isinstance(choice, Wait), (free, n_bytes)


def test_a_ledger_never_promises_twice_and_repeats_are_free() -> None:
    ledger = Ledger(100)
    assert ledger.take("a", 60)
    assert ledger.take("a", 60)
    assert not ledger.take("b", 50)
    ledger.give_back("a")
    ledger.give_back("a")
    assert ledger.take("b", 100)
    assert ledger.free_bytes == 0


def test_what_a_start_expects_is_not_spare_until_it_is_taken_or_given_back() -> None:
    ledger = Ledger(100)
    ledger.expect("start", 60)
    assert not ledger.take("cell", 50, spare=True)
    assert ledger.take("cell", 40, spare=True)
    assert ledger.take("start", 60)
    ledger.give_back("start")
    assert ledger.take("other", 60, spare=True)
    ledger.expect("other", 60)
    ledger.give_back("other")
    ledger.expect("next", 60)
    ledger.give_back("next")
    assert ledger.take("last", 60, spare=True)


def test_a_start_without_room_evicts_the_longest_idle_instance(valkey_url: str, run_dir: Path) -> None:
    with Host(valkey_url, run_dir, memory_mb=256) as host:
        host.deploy("def main(args):\n    return {}\n", memory=128)
        first, second = host.ready(), host.ready()
        host.run(first.instance_id, {})
        third = host.ready()
        assert host.gone(second.instance_id).error is None
        assert host.run(first.instance_id, {})[0] == 200
        assert host.run(third.instance_id, {})[0] == 200


def test_a_start_waits_for_an_instance_that_works(valkey_url: str, run_dir: Path) -> None:
    with Host(valkey_url, run_dir, memory_mb=128) as host:
        first = host.serving("import time\ndef main(args):\n    time.sleep(0.5)\n    return {}\n", memory=128)
        run = threading.Thread(target=host.run, args=(first.instance_id, {}))
        run.start()
        host.events.wait(lambda m: isinstance(m, InstanceChanged) and m.instance.inflight == 1)
        second = host.ready()
        assert host.run(second.instance_id, {})[0] == 200
        run.join(10)
