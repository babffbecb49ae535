"""The protocol by which a group becomes one worker, on a stage that records the calls that it gets."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from thaw.errors import ErrorInfo, ModelCorrupt, ProtocolError, WorkerLost, from_info
from thaw_runtime.engine.protocol import Consolidated, ConsolidationEnded
from thaw_runtime.pipeline import consolidation
from thaw_runtime.pipeline.block_copies import BlockCopies, HeldBlock
from thaw_runtime.pipeline.consolidation import (
    MAX_CHECKS,
    ROUND_S,
    BlockCheck,
    Checking,
    CheckingBlocks,
    Consolidation,
    State,
)
from thaw_runtime.pipeline.kv_wire import KvPart
from thaw_runtime.pipeline.wire import Blocks, KvWanted

BLOCK_BYTES, PART_BYTES = 1000, 10
GENERATORS = {"r": b"state"}


@dataclass
class Recorded:
    """A first stage of three.  ``on_drain`` is called while no step is scheduled."""

    n_stages: int = 3
    layers: Mapping[int, frozenset[str]] = field(default_factory=lambda: {1: frozenset("ab"), 2: frozenset("c")})
    is_ready: bool = False
    load_error: ErrorInfo | None = None
    problem: ErrorInfo | None = None
    other_weights: ErrorInfo | None = None
    blocks: list[HeldBlock] = field(default_factory=list)
    asked: list[KvWanted] = field(default_factory=list)
    written: list[tuple[int, str]] = field(default_factory=list)  # (number of asks, layer)
    verified_without: list[frozenset[int]] = field(default_factory=list)
    is_stopped: bool = False
    whole: tuple[set[str], Mapping[str, bytes]] | None = None
    given_up: int = 0
    refuses: str = ""
    raises: Exception | None = None  # by the check
    overwritten: frozenset[int] = frozenset()
    slices: int = 1  # the slices of each check
    n_checks: int = 0  # checks that have begun and not ended: each holds KV blocks
    wanted_generators: Mapping[str, bytes] = field(default_factory=lambda: GENERATORS)
    on_drain: Callable[[], None] = lambda: None

    def ready(self) -> bool:
        if self.load_error is not None:
            raise from_info(self.load_error)
        return self.is_ready

    def held(self) -> Sequence[Sequence[HeldBlock]]:
        return [list(self.blocks)]

    def n_bytes(self, blocks: Blocks) -> int:
        return BLOCK_BYTES * sum(map(len, blocks))

    def ask(self, wanted: KvWanted) -> None:
        assert wanted.last == self.is_stopped
        self.asked.append(wanted)

    def write(
        self, name: str, layout: str, wanted: KvWanted, data: memoryview, added: Sequence[Mapping[int, int]]
    ) -> None:
        if name == self.refuses:
            raise ProtocolError("another block")
        assert wanted == self.asked[-1]
        assert set(wanted.known[0]) == added[0].keys()
        self.written.append((len(self.asked), name))

    def verify_weights(self) -> Checking:
        yield from self._slices()
        return self.other_weights

    def verify_blocks(self, missing: frozenset[int]) -> CheckingBlocks:
        self.verified_without.append(missing)
        if self.raises is not None:
            raise self.raises
        yield from self._slices()
        n_full = sum(held.is_full and held.block not in missing for held in self.blocks)
        return BlockCheck(self.problem, n_full, self.overwritten)

    def _slices(self) -> Generator[None, None, None]:
        self.n_checks += 1
        try:
            for _ in range(self.slices - 1):
                yield
        finally:
            self.n_checks -= 1

    @contextmanager
    def stopped(self) -> Iterator[None]:
        self.is_stopped = True
        try:
            yield
        finally:
            self.is_stopped = False

    def drain(self) -> None:
        assert self.is_stopped
        self.on_drain()

    def check_generators(self, generators: Mapping[str, bytes]) -> None:
        if generators != self.wanted_generators:
            raise ProtocolError("other generators")

    def become_whole(self, copies: Sequence[BlockCopies], generators: Mapping[str, bytes]) -> None:
        assert self.is_stopped
        assert self.whole is None
        assert not copies[0].missing([held for held in self.blocks if held.is_full])
        self.whole = ({name for n, name in self.written if n == len(self.asked)}, dict(generators))

    def give_up(self) -> None:
        self.given_up += 1


class Attempt:
    """One consolidation.  The methods are what happens to it."""

    def __init__(self) -> None:
        self.stage = Recorded()
        self.ended: list[ConsolidationEnded] = []
        self.group = Consolidation(self.stage, 7, 1, threading.Condition(), self.ended.append)

    def load(self) -> None:
        self.stage.is_ready = True
        self.group.load_ended()

    def advance(self, *, computes: bool = True) -> None:
        self.group.advance(computes=computes)

    def part(self, stage: int, names: str, **other: object) -> None:
        wanted = self.stage.asked[-1]
        generators = GENERATORS if wanted.last and stage == 2 else {}
        layers = {name: memoryview(bytes(PART_BYTES)) for name in names}
        made = KvPart(7, wanted.round, wanted.blocks, dict.fromkeys(names, "x"), layers, generators)
        self.group.take(stage, replace(made, **other))  # type: ignore[arg-type]

    def parts(self) -> None:
        self.part(1, "a")
        self.part(2, "c")
        self.part(1, "b")

    def round(self) -> None:
        self.parts()
        self.advance()

    def up_to_the_stop(self) -> None:
        """Everything up to the moment in which the next ``advance`` stops the pipeline."""
        self.load()
        self.advance()
        self.round()  # and the check
        self.stage.on_drain = self.parts
        self.parts()


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time that the protocol sees.  It goes on by a millisecond whenever it is read."""
    now = [1000.0]

    def monotonic() -> float:
        now[0] += 0.001
        return now[0]

    monkeypatch.setattr(consolidation, "monotonic", monotonic)
    return now


def tail(n: int) -> list[HeldBlock]:
    return [HeldBlock(k, (f"r{k}", 0, 0), 1, False) for k in range(n)]


def test_the_pipeline_stops_once_when_the_model_is_whole_checked_and_its_blocks_are_copied() -> None:
    a = Attempt()
    a.stage.blocks = tail(2)
    a.advance()
    assert not a.stage.asked  # the model is not whole
    a.up_to_the_stop()
    assert a.stage.verified_without == [frozenset({0, 1})]
    a.advance()
    assert [w.last for w in a.stage.asked] == [False, False, True]
    assert a.stage.whole == ({"a", "b", "c"}, GENERATORS)
    assert a.group.state is State.WHOLE
    (done,) = a.ended
    assert isinstance(done, Consolidated)
    assert (done.rounds, done.n_bytes, done.tail_bytes) == (3, 3 * 3 * PART_BYTES, 3 * PART_BYTES)
    assert [w.known for w in a.stage.asked] == [((),), ((0, 1),), ((0, 1),)]
    assert not a.stage.is_stopped


def test_a_full_block_is_asked_for_once_and_the_tail_in_every_round() -> None:
    a = Attempt()
    a.stage.blocks = [HeldBlock(9, ("r", 0, 0), 4, True), HeldBlock(3, ("r", 0, 1), 1, False)]
    a.up_to_the_stop()
    a.advance()
    assert [w.blocks for w in a.stage.asked] == [((9, 3),), ((3,),), ((3,),)]


def test_an_idle_group_is_switched_without_blocks_but_not_unchecked() -> None:
    a = Attempt()
    a.up_to_the_stop()
    a.advance(computes=False)
    assert a.group.state is State.WHOLE
    assert len(a.stage.verified_without) == 1


def test_a_check_that_found_no_blocks_is_repeated_when_a_request_has_some() -> None:
    a = Attempt()
    a.up_to_the_stop()
    a.stage.blocks = [HeldBlock(9, ("r", 0, 0), 4, True)]
    a.advance()
    assert (len(a.stage.verified_without), a.stage.asked[-1].blocks) == (1, ((9,),))
    a.round()
    assert (len(a.stage.verified_without), a.group.state) == (2, State.COPYING)
    a.round()
    assert (len(a.stage.verified_without), a.group.state) == (2, State.WHOLE)


def test_requests_that_always_end_before_the_check_do_not_keep_the_group_a_pipeline() -> None:
    a = Attempt()
    a.up_to_the_stop()
    for n in range(20):
        a.stage.blocks = [HeldBlock(n, (f"r{n}", 0, 0), 4, True)]
        if not a.ended:
            a.advance()
            a.parts()
    assert (a.group.state, len(a.stage.verified_without)) == (State.WHOLE, MAX_CHECKS)


@pytest.mark.parametrize("lacking", ["a", "b", "c"])
def test_without_one_layer_of_the_tail_the_pipeline_goes_on(lacking: str, monkeypatch: pytest.MonkeyPatch) -> None:
    a = Attempt()
    a.stage.blocks = tail(1)
    a.up_to_the_stop()

    def all_but_one() -> None:
        for stage, name in ((1, "a"), (1, "b"), (2, "c")):
            if name != lacking:
                a.part(stage, name)

    a.stage.on_drain = all_but_one
    monkeypatch.setattr(consolidation, "STOPPED_S", 0.01)
    a.advance()
    assert (a.group.state, a.stage.whole, a.stage.given_up, a.stage.is_stopped) == (State.GIVEN_UP, None, 1, False)
    (error,) = a.ended
    assert isinstance(error, ErrorInfo)
    assert f"stage {2 if lacking == 'c' else 1} did not send" in error.message


@pytest.mark.parametrize("when", ["loading", "copying", "stopped"])
def test_a_lost_stage_ends_the_attempt_in_every_state(when: str) -> None:
    a, lost = Attempt(), WorkerLost("stage 1 has ended").info()
    if when == "stopped":
        a.up_to_the_stop()
        a.stage.on_drain = lambda: a.group.fail(lost)
    elif when == "copying":
        a.load()
        a.advance()
        a.group.fail(lost)
    else:
        a.group.fail(lost)
    a.advance()
    assert (a.ended, a.stage.whole) == ([lost], None)


def test_a_load_that_fails_ends_the_attempt() -> None:
    a = Attempt()
    a.stage.load_error = ModelCorrupt("a tensor is missing").info()
    a.group.load_ended()
    a.advance()
    assert a.ended == [a.stage.load_error]


def test_a_pipeline_too_busy_for_the_check_stays_one(clock: list[float]) -> None:
    a = Attempt()
    a.group.load_ended()
    a.advance()
    assert a.ended == []
    clock[0] += ROUND_S
    assert a.group.is_due()
    a.advance()
    assert "did not answer the check's request" in str(a.ended)


def test_a_block_that_the_check_overwrote_is_copied_again() -> None:
    a = Attempt()
    a.stage.blocks = [HeldBlock(9, ("r", 0, 0), 4, True, b"x"), HeldBlock(5, ("r", 0, 1), 4, True, b"y")]
    a.stage.overwritten = frozenset({5, 77})
    a.load()
    a.advance()
    a.round()
    assert [w.blocks for w in a.stage.asked] == [((9, 5),), ((5,),)]


def test_a_step_follows_every_slice_of_a_check() -> None:
    a = Attempt()
    a.stage.blocks, a.stage.slices = tail(1), 3
    a.load()
    asked = []
    for _ in range(3):
        asked.append(len(a.stage.asked))
        assert a.group.is_due()
        a.advance()
    assert (asked, len(a.stage.asked)) == ([0, 0, 0], 1)
    a.parts()
    a.advance()
    a.stage.blocks = tail(3)  # the steps between the slices computed more
    a.advance()
    a.advance()
    assert (a.stage.n_checks, a.stage.asked[-1].blocks) == (0, ((0, 1, 2),))


@pytest.mark.parametrize("why", ["a lost stage", "an engine that ends", "too late"])
@pytest.mark.parametrize("what", ["weights", "blocks"])
def test_a_check_that_does_not_end_gives_its_blocks_back(what: str, why: str, clock: list[float]) -> None:
    a = Attempt()
    a.stage.slices = 3
    a.load()
    if what == "blocks":
        for _ in range(3):
            a.advance()
        a.parts()
    a.advance()
    assert a.stage.n_checks == 1
    if why == "a lost stage":
        a.group.fail(WorkerLost("stage 1 has ended").info())
        a.advance()
    elif why == "an engine that ends":
        a.group.give_up(ModelCorrupt("the engine ends").info())
    else:
        clock[0] += ROUND_S
        a.advance()
    assert (a.stage.n_checks, a.group.state, len(a.ended)) == (0, State.GIVEN_UP, 1)
    assert ("did not end within" in str(a.ended)) == (why == "too late")


@pytest.mark.parametrize("error", [ValueError("too many tokens"), MemoryError(), ProtocolError("odd")])
def test_an_error_of_the_check_ends_the_attempt_and_not_the_engine(error: Exception) -> None:
    a = Attempt()
    a.stage.raises = error
    a.load()
    a.advance()
    a.round()
    assert (len(a.ended), a.group.state) == (1, State.GIVEN_UP)


def test_an_error_of_the_engines_own_steps_is_the_engines() -> None:
    a = Attempt()
    a.up_to_the_stop()

    def broken() -> None:
        raise ValueError("the step failed")

    a.stage.on_drain = broken
    with pytest.raises(ValueError, match="the step failed"):
        a.advance()
    assert not a.stage.is_stopped


@pytest.mark.parametrize(("stage", "is_taken"), [(1, False), (2, True)])
def test_only_the_last_stage_says_the_state_of_the_generators_and_only_in_the_stop(stage: int, is_taken: bool) -> None:
    a = Attempt()
    a.load()
    a.advance()
    a.part(2, "c", generators={"r": b"old"})
    a.parts()
    a.advance()
    a.parts()
    if is_taken:
        a.stage.on_drain = a.parts
    else:
        a.stage.on_drain = lambda: [a.part(1, "ab", generators=GENERATORS), a.part(2, "c", generators={})][0]
    a.advance()
    assert (a.stage.whole is not None) is is_taken
    assert len(a.ended) == 1


def test_a_whole_worker_with_other_weights_is_refused_before_anything_is_copied() -> None:
    a = Attempt()
    a.stage.other_weights = ModelCorrupt("the logprobs differ").info()
    a.load()
    a.advance()
    assert (a.ended, a.stage.asked) == ([a.stage.other_weights], [])


def test_a_whole_worker_that_computes_something_else_is_refused() -> None:
    a = Attempt()
    a.stage.problem = ModelCorrupt("layer 3 differs").info()
    a.load()
    a.advance()
    a.round()
    assert (a.ended, a.stage.whole) == ([a.stage.problem], None)


@pytest.mark.parametrize(
    ("stage", "names", "other", "said"),
    [
        (1, "c", {}, "which it does not have"),
        (4, "a", {}, "which it does not have"),
        (1, "a", {"blocks": ((5,),)}, "other KV blocks than it was asked for"),
    ],
)
def test_a_part_that_was_not_asked_for_ends_the_attempt(
    stage: int, names: str, other: dict[str, object], said: str
) -> None:
    a = Attempt()
    a.load()
    a.advance()
    a.part(stage, names, **other)
    a.advance()
    assert said in str(a.ended)
    assert a.stage.written == []


def test_a_block_that_the_stage_refuses_ends_the_attempt_also_in_the_last_round() -> None:
    a = Attempt()
    a.stage.blocks = tail(1)
    a.up_to_the_stop()
    a.stage.refuses = "b"
    a.advance()
    assert "another block" in str(a.ended)
    assert a.stage.whole is None


@pytest.mark.parametrize("other", [{"attempt": 6}, {"round": 0}, {"round": 2}])
def test_a_part_of_another_attempt_or_round_is_ignored(other: dict[str, object]) -> None:
    a = Attempt()
    a.load()
    a.advance()
    a.part(1, "ab", **other)
    assert (a.stage.written, a.ended, a.group.is_due()) == ([], [], False)


def test_a_part_that_comes_twice_is_written_once() -> None:
    a = Attempt()
    a.load()
    a.advance()
    a.part(1, "a")
    a.part(1, "a")
    a.part(1, "ab")
    assert a.stage.written == [(1, "a"), (1, "b")]


def test_nothing_is_written_after_the_switch() -> None:
    a = Attempt()
    a.up_to_the_stop()
    a.advance()
    n = len(a.stage.written)
    a.parts()
    assert len(a.stage.written) == n


@pytest.mark.parametrize("state", [State.WHOLE, State.GIVEN_UP])
def test_nothing_is_begun_after_the_end(state: State, clock: list[float]) -> None:
    a = Attempt()
    a.up_to_the_stop()
    if state is State.GIVEN_UP:
        a.stage.on_drain = lambda: a.group.fail(WorkerLost("stage 1 has ended").info())
    a.advance()
    asked = list(a.stage.asked)
    clock[0] += ROUND_S
    a.group.fail(WorkerLost("stage 2 has ended").info())
    assert not a.group.is_due()
    a.advance()
    assert (a.group.state, len(a.ended), a.stage.asked) == (state, 1, asked)


EVENTS = st.sampled_from(["load", "advance", "idle", "a", "b", "c", "ab", "old", "fail", "late", "grow", "refuse"])


@given(st.lists(EVENTS, max_size=40), st.lists(st.sampled_from("abc"), max_size=4), st.sampled_from([1, 2, 5]))
def test_whatever_happens_it_ends_once_and_switches_only_with_every_layer(
    events: list[str], in_the_stop: list[str], slices: int
) -> None:
    a, now = Attempt(), [0.0]
    a.stage.slices = slices
    sender = {"a": 1, "b": 1, "ab": 1, "c": 2}

    def stop() -> None:
        for name in in_the_stop:
            a.part(sender[name], name)
        now[0] += ROUND_S

    with pytest.MonkeyPatch.context() as patch:
        real = consolidation.monotonic
        patch.setattr(consolidation, "monotonic", lambda: real() + now[0])
        a.stage.on_drain = stop
        for event in events:
            if event == "load":
                a.load()
            elif event in ("advance", "idle"):
                a.advance(computes=event == "advance")
            elif event in sender and a.stage.asked:
                a.part(sender[event], event)
            elif event == "old" and a.stage.asked:
                a.part(1, "ab", round=a.stage.asked[-1].round - 1)
            elif event == "fail":
                a.group.fail(WorkerLost("lost").info())
            elif event == "late":
                now[0] += ROUND_S
            elif event == "grow":
                a.stage.blocks = tail(len(a.stage.blocks) + 1)
            elif event == "refuse":
                a.stage.refuses = "c"
            assert not a.stage.is_stopped
    assert len(a.ended) <= 1
    assert (a.group.state is State.WHOLE) == (a.stage.whole is not None)
    assert (a.group.state is State.GIVEN_UP) == (a.stage.given_up == 1)
    assert bool(a.ended) == (a.group.state in (State.WHOLE, State.GIVEN_UP))
    assert not (a.ended and a.stage.n_checks)
    if a.stage.whole is not None:
        assert a.stage.whole == ({"a", "b", "c"}, GENERATORS)
        assert a.stage.verified_without
