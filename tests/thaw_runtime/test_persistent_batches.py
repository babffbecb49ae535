"""Each batch in flight finds its rows again, and no request has rows in two places."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace

from hypothesis import given
from hypothesis import strategies as st

from thaw_runtime.engine.vllm.persistent_batches import PersistentBatches


@dataclass
class Rows:
    """The used part of the engine's persistent batch."""

    req_id_to_index: dict[str, int] = field(default_factory=dict)

    def remove_request(self, name: str) -> None:
        del self.req_id_to_index[name]


class Runner:
    """Changes its batch in a step as the engine's runner does."""

    def __init__(self, n: int) -> None:
        self.all = [Rows() for _ in range(n)]
        self.input_batch = self.all[0]
        self._batches = PersistentBatches(self.all)

    def step(self, *scheduled: str, finished: tuple[str, ...] = ()) -> int:
        """Run a step.  Return the number of rows that were written."""
        output = SimpleNamespace(num_scheduled_tokens=dict.fromkeys(scheduled, 1), finished_req_ids=set(finished))
        self._batches.take_up(self, output)
        rows = self.input_batch.req_id_to_index
        for name in [n for n in rows if n not in scheduled or n in finished]:
            del rows[name]
        new = [n for n in scheduled if n not in rows]
        rows.update((name, i) for i, name in enumerate(new))
        return len(new)


def test_batches_that_take_turns_write_their_rows_once() -> None:
    runner = Runner(3)
    batches = [("a", "b"), ("c", "d"), ("e", "f")]
    assert [runner.step(*batch) for batch in batches] == [2, 2, 2]
    assert [runner.step(*batch) for batch in batches * 4] == [0] * 12


def test_a_request_that_changes_batches_leaves_nothing_behind() -> None:
    runner = Runner(2)
    runner.step("a", "b", "c")
    runner.step("d", "e")
    assert runner.step("d", "e", "c") == 1
    assert [sorted(rows.req_id_to_index) for rows in runner.all] == [["a", "b"], ["c", "d", "e"]]


def test_a_request_that_has_ended_is_forgotten_whatever_batch_it_was_in() -> None:
    runner = Runner(2)
    runner.step("a", "b")
    runner.step("c", finished=("a",))
    assert runner.step("b", "a") == 1  # "a" is another request with the same name


@given(
    st.integers(1, 4),
    st.lists(
        st.tuples(st.sets(st.sampled_from("abcdef"), min_size=1), st.sets(st.sampled_from("abcdef"))), max_size=20
    ),
)
def test_no_request_is_ever_in_two_batches(n: int, steps: list[tuple[set[str], set[str]]]) -> None:
    runner = Runner(n)
    for scheduled, ended in steps:
        runner.step(*scheduled, finished=tuple(ended - scheduled))
        names = [name for rows in runner.all for name in rows.req_id_to_index]
        assert len(names) == len(set(names))
        assert set(runner.input_batch.req_id_to_index) == scheduled
        assert not set(names) & (ended - scheduled)
