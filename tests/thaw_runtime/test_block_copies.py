"""The bookkeeping of the pre-copy, compared with a model of the real contents of each block."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from thaw_runtime.pipeline.block_copies import BlockCopies, HeldBlock

SIZE = 4  # tokens of a block
N_BLOCKS = 8


@dataclass
class Request:
    name: str
    tokens: tuple[int, ...]  # all that it will ever have: equal beginnings share digests
    blocks: list[int] = field(default_factory=list)
    n_computed: int = 0
    n_lost: int = 0


class Source:
    """A stage's cache and its scheduler: what lies in a block is a tuple of (writer, place, token)."""

    def __init__(self) -> None:
        self.content: dict[int, tuple[object, ...]] = {}
        self.cached: dict[int, bytes] = {}  # block → digest
        self.free = list(range(N_BLOCKS))
        self.running: dict[str, Request] = {}

    def begin(self, name: str, kind: int) -> None:
        if name not in self.running:
            request = Request(name, tuple((kind * 100 + i) for i in range(64)))
            self._find_prefix(request)
            self.running[name] = request

    def compute(self, name: str, n_tokens: int) -> None:
        request = self.running.get(name)
        for _ in range(n_tokens if request else 0):
            assert request is not None
            i = request.n_computed // SIZE
            if i == len(request.blocks) and not self._take(request):
                return
            block = request.blocks[i]
            place = request.n_computed % SIZE
            self.content[block] = (*self.content[block][:place], request.tokens[request.n_computed])
            request.n_computed += 1
            if place == SIZE - 1:
                self.cached[block] = self._digest(request, i)

    def end(self, name: str) -> None:
        if request := self.running.pop(name, None):
            self.free += request.blocks

    def preempt(self, name: str) -> None:
        if request := self.running.get(name):
            self.free += request.blocks
            request.blocks, request.n_computed, request.n_lost = [], 0, request.n_lost + 1

    def held(self) -> list[HeldBlock]:
        return [
            HeldBlock(
                block,
                (r.name, r.n_lost, i),
                min(SIZE, r.n_computed - i * SIZE),
                (i + 1) * SIZE <= r.n_computed,
                self.cached.get(block),
            )
            for r in self.running.values()
            for i, block in enumerate(r.blocks[: -(-r.n_computed // SIZE)])
        ]

    def _digest(self, request: Request, i: int) -> bytes:
        return repr(request.tokens[: (i + 1) * SIZE]).encode()

    def _find_prefix(self, request: Request) -> None:
        for i in range(3):
            found = next((b for b, d in self.cached.items() if d == self._digest(request, i) and b in self.free), None)
            if found is None:
                return
            self.free.remove(found)
            request.blocks.append(found)
            request.n_computed += SIZE

    def _take(self, request: Request) -> bool:
        if not self.free:
            return False
        block = self.free.pop(0)
        self.cached.pop(block, None)
        self.content[block] = ()
        request.blocks.append(block)
        return True


NAMES = st.sampled_from("abc")
EVENTS = st.one_of(
    st.tuples(st.just("begin"), NAMES, st.integers(0, 1)),
    st.tuples(st.just("compute"), NAMES, st.integers(1, 9)),
    st.tuples(st.just("end"), NAMES),
    st.tuples(st.just("preempt"), NAMES),
    st.tuples(st.just("ask")),
    st.tuples(st.just("arrive")),
)


@given(st.lists(EVENTS, max_size=60))
def test_after_the_last_round_every_block_that_may_be_read_is_right(events: list[tuple[object, ...]]) -> None:
    source, copies = Source(), BlockCopies()
    here: dict[int, tuple[object, ...]] = {}  # the contents of the copy
    on_its_way: dict[int, tuple[object, ...]] | None = None

    def ask() -> dict[int, tuple[object, ...]]:
        missing = copies.missing(source.held())
        copies.ask(missing)
        more = copies.added_tokens()
        for held in (held for held in missing if held.block in more):  # the old copy is continued
            assert source.content[held.block][: held.n_tokens - more[held.block]] == here[held.block]
        return {held.block: source.content[held.block] for held in missing}

    for event in events:
        if event[0] == "ask" and on_its_way is None:
            on_its_way = ask()
        elif event[0] == "arrive" and on_its_way is not None:
            here |= on_its_way
            copies.arrived()
            on_its_way = None
        elif event[0] not in ("ask", "arrive"):
            getattr(source, str(event[0]))(*event[1:])
    if on_its_way is not None:
        here |= on_its_way
        copies.arrived()
    here |= ask()
    copies.arrived()
    for held in source.held():
        assert here[held.block] == source.content[held.block]
    unusable = copies.unusable(source.held(), list(source.cached.items()))
    for block in source.cached.keys() - unusable:
        assert here[block] == source.content[block]


def test_a_full_block_is_copied_once_and_the_last_one_in_every_round() -> None:
    copies = BlockCopies()
    full, tail = HeldBlock(3, ("a", 0, 0), 4, True), HeldBlock(5, ("a", 0, 1), 1, False)
    assert copies.missing([full, tail]) == [full, tail]
    copies.ask([full, tail])
    copies.arrived()
    assert copies.missing([full, tail]) == [tail]


def test_a_block_that_the_last_round_left_out_is_copied_whole() -> None:
    copies, tail = BlockCopies(), HeldBlock(5, ("a", 0, 1), 1, False)
    copies.ask([tail])
    copies.arrived()
    grown = HeldBlock(5, ("a", 0, 1), 3, False)
    copies.ask([grown])
    assert copies.added_tokens() == {5: 2}
    copies.arrived()
    copies.ask([])
    copies.arrived()
    copies.ask([grown])
    assert copies.added_tokens() == {}


def test_a_block_that_another_request_took_is_copied_again() -> None:
    copies = BlockCopies()
    copies.ask([HeldBlock(3, ("a", 0, 0), 4, True, b"x")])
    copies.arrived()
    taken = HeldBlock(3, ("b", 0, 0), 4, True, b"y")
    assert copies.missing([taken]) == [taken]


def test_a_block_whose_request_ended_stays_usable_by_its_digest_only() -> None:
    copies = BlockCopies()
    copies.ask([HeldBlock(3, ("a", 0, 0), 4, True, b"x"), HeldBlock(4, ("a", 0, 1), 4, True, None)])
    copies.arrived()
    assert copies.unusable([], [(3, b"x"), (4, b"z"), (7, b"w")]) == {4, 7}
    assert copies.missing([HeldBlock(3, ("b", 0, 0), 4, True, b"x")]) == []
