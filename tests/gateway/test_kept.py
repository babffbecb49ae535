"""The events that are kept of streams whose clients have gone, after any sequence of events."""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from gateway.serving.answers.event_ids import EventId, Progress
from gateway.serving.answers.kept import Bounds, Kept, Shelf, token_bytes
from relay.protocol.messages import RunFinished, RunToken, TokenLogprob
from thaw.errors import WorkerLost
from thaw.ids import ActivationId

TOKEN = RunToken(0, 100, "x" * 10)
SIZE = token_bytes(TOKEN)
BOUNDS = Bounds(60, 10 * SIZE, 15 * SIZE)
END = RunFinished("length", 3, 1)


def shelf_with(*n_tokens: int, bounds: Bounds = BOUNDS) -> tuple[Shelf, list[Kept]]:
    """Streams of so many tokens each, which are read."""
    shelf, found = Shelf(bounds), []
    for n, count in enumerate(n_tokens):
        found.append(Kept(ActivationId(str(n))))
        shelf.put(found[-1])
        for _ in range(count):
            assert not shelf.add(found[-1], TOKEN)
    return shelf, found


def test_streams_whose_clients_stay_away_are_dropped_together_when_their_time_is_over() -> None:
    shelf, both = shelf_with(1, 1)
    for kept in both:
        shelf.leave(kept, 100.0, resumable=True)
    assert (shelf.expire(159.0), shelf.expire(160.0)) == ([], both)


def test_an_error_is_kept_for_a_client_that_has_not_read_it() -> None:
    shelf, (read, absent) = shelf_with(1, 1)
    shelf.finish(read, WorkerLost("lost"))
    assert shelf.leave(read, 100.0, resumable=True) == (read,)
    shelf.leave(absent, 100.0, resumable=True)
    shelf.finish(absent, WorkerLost("lost"))
    assert shelf.get(absent.activation_id) is absent


def test_what_has_ended_gives_way_to_what_runs() -> None:
    shelf, (running, ended, newer) = shelf_with(7, 6, 2)
    for kept in (running, ended, newer):
        shelf.leave(kept, 100.0, resumable=True)
    shelf.finish(ended, END)
    assert shelf.add(newer, TOKEN) == [ended]
    for _ in range(5):
        assert not shelf.add(newer, TOKEN)
    assert shelf.add(newer, TOKEN) == [newer]  # none has ended, so the one that grows gives way
    assert shelf.get(running.activation_id) is running


def test_what_a_dropped_stream_still_says_changes_nothing_for_the_next_one_of_its_activation() -> None:
    shelf = Shelf(BOUNDS)
    old, new = Kept(ActivationId("1"), SIZE), Kept(ActivationId("1"), SIZE)
    shelf.put(old)
    shelf.leave(old, 100.0, resumable=False)
    shelf.put(new)
    shelf.leave(new, 100.0, resumable=True)
    for _ in range(12):
        assert not shelf.add(old, TOKEN)
    shelf.finish(old, END)
    assert (shelf.get(new.activation_id), shelf.n_bytes, shelf.n_absent) == (new, SIZE, 1)


def test_alternatives_take_memory_too() -> None:
    alone = RunToken(0, 1, "x", TokenLogprob("x", -0.5, ()))
    with_others = RunToken(0, 1, "x", TokenLogprob("x", -0.5, (("x", -0.5), ("y", -1.5))))
    assert token_bytes(RunToken(0, 1, "x")) < token_bytes(alone) < token_bytes(with_others)


class Streams(RuleBasedStateMachine):
    """Three streams whose clients come and go.  Each client reads what a reader would give it, from its own event on,
    and must see each index once."""

    @initialize(bounds=st.sampled_from([BOUNDS, Bounds(5, 3 * SIZE, 4 * SIZE)]))
    def start(self, bounds: Bounds) -> None:
        self.bounds, self.shelf, self.now_s = bounds, Shelf(bounds), 0.0
        self.kept: dict[int, Kept] = {}
        self.read: dict[int, list[int]] = {}  # the indexes that the client has
        self.checksum: dict[int, int] = {}
        self.reads: set[int] = set()

    def gone(self, dropped: object) -> None:
        assert isinstance(dropped, (list, tuple))
        for n in [n for n, kept in self.kept.items() if kept in dropped]:
            del self.kept[n]
            assert n not in self.reads, "a stream was dropped under its reader"

    @rule(n=st.integers(0, 2))
    def begin(self, n: int) -> None:
        if n not in self.kept:
            self.kept[n] = Kept(ActivationId(str(n)), n * SIZE // 2)
            self.read[n], self.checksum[n] = [], 0
            self.reads.add(n)
            self.shelf.put(self.kept[n])

    def chosen(self, n: int, suits: Callable[[int], bool]) -> int | None:
        return next((m % 3 for m in range(n, n + 3) if m % 3 in self.kept and suits(m % 3)), None)

    @rule(n=st.integers(0, 2), text=st.sampled_from(["", "x" * 10]))
    def token(self, n: int, text: str) -> None:
        if (m := self.chosen(n, lambda m: self.kept[m].end is None)) is not None:
            index = len(self.kept[m].tokens)
            self.gone(self.shelf.add(self.kept[m], RunToken(index, 100 + index, text)))

    @rule(n=st.integers(0, 2))
    def end(self, n: int) -> None:
        if (m := self.chosen(n, lambda m: self.kept[m].end is None)) is not None:
            self.shelf.finish(self.kept[m], END)

    @rule(n=st.integers(0, 2), upto=st.integers(1, 30))
    def client_reads(self, n: int, upto: int) -> None:
        """A reader begins with the first token each time, as streams.Reader does."""
        if (m := self.chosen(n, lambda m: m in self.reads)) is None:
            return
        had = EventId(ActivationId(str(m)), 0, b"", len(self.read[m]) - 1, self.checksum[m]) if self.read[m] else None
        progress = Progress(had)
        for token in self.kept[m].tokens[:upto]:
            if progress.token(token.token_id):
                self.read[m].append(token.index)
                self.checksum[m] = progress.checksum

    @rule(n=st.integers(0, 2), resumable=st.booleans())
    def leave(self, n: int, resumable: bool) -> None:
        if (m := self.chosen(n, lambda m: m in self.reads)) is not None:
            kept = self.kept[m]
            self.reads.discard(m)
            self.gone(self.shelf.leave(kept, self.now_s, resumable=resumable))
            assert kept.dropped == (m not in self.kept)
            assert resumable or kept.dropped, "nobody may return to it"
            if kept.dropped:
                assert not self.shelf.leave(kept, self.now_s, resumable=True)
                assert self.shelf.get(kept.activation_id) is None

    @rule(n=st.integers(0, 2))
    def come_back(self, n: int) -> None:
        if (m := self.chosen(n, lambda m: m not in self.reads)) is not None:
            assert self.shelf.get(ActivationId(str(m))) is self.kept[m]
            self.shelf.attach(self.kept[m])
            self.reads.add(m)

    @rule(s=st.floats(0, 70))
    def time_passes(self, s: float) -> None:
        self.now_s += s
        over = [kept for kept in self.kept.values() if kept.until_s is not None and kept.until_s <= self.now_s]
        dropped = self.shelf.expire(self.now_s)
        assert sorted(k.activation_id for k in dropped) == sorted(k.activation_id for k in over)
        self.gone(dropped)

    @precondition(lambda self: hasattr(self, "shelf"))
    @invariant()
    def every_index_comes_once(self) -> None:
        for indexes in self.read.values():
            assert indexes == list(range(len(indexes)))

    @precondition(lambda self: hasattr(self, "shelf"))
    @invariant()
    def nothing_is_kept_beyond_the_bounds(self) -> None:
        absent = [kept for n, kept in self.kept.items() if n not in self.reads]
        sizes = [(0 if k.end else k.body_bytes) + sum(map(token_bytes, k.tokens)) for k in absent]
        assert (self.shelf.n_absent, self.shelf.n_bytes) == (len(absent), sum(sizes))
        assert sum(sizes) <= self.bounds.all_bytes
        assert max(sizes, default=0) <= self.bounds.stream_bytes
        assert all(kept.until_s is not None and kept.until_s > self.now_s for kept in absent)
        due = [kept.until_s for kept in absent if kept.until_s is not None]
        assert self.shelf.due_s() == min(due, default=None)


Streams.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestStreams = Streams.TestCase
