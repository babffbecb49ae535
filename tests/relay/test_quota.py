"""The bytes that the priorities of a link leave to one another, in every order of events."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from relay.protocol.frames import Priority
from relay.transports.base import Flow
from relay.transports.quota import LinkQuota

PART = 1000
FLOW = Flow(chunk_bytes=250, window_bytes=PART, shared=True)
INFERENCE, KV, BULK = Priority


class Link:
    """A quota, with the numbers that a receiver would know."""

    def __init__(self, flow: Flow = FLOW) -> None:
        self.quota = LinkQuota(flow)
        self.sent = dict.fromkeys(Priority, 0)
        self.read = dict.fromkeys(Priority, 0)

    def take(self, priority: Priority, n_bytes: int) -> bool:
        took = self.quota.take(priority, n_bytes)
        self.sent[priority] += n_bytes if took else 0
        return took

    def fill(self, priority: Priority) -> int:
        before = self.sent[priority]
        while self.take(priority, 10):
            pass
        return self.sent[priority] - before

    def read_all(self, priority: Priority) -> None:
        self.read[priority] = self.sent[priority]
        self.quota.report(priority, self.read[priority])

    def ahead(self, *priorities: Priority) -> int:
        return sum(self.sent[p] - self.read[p] for p in priorities)


def test_a_priority_alone_has_its_part_and_those_below_it() -> None:
    assert [Link().fill(priority) for priority in Priority] == [3 * PART, 2 * PART, PART]


def test_without_sharing_each_has_its_window_whatever_the_others_do() -> None:
    link = Link(Flow(chunk_bytes=250, window_bytes=PART))
    assert [link.fill(priority) for priority in Priority] == [PART] * 3


def test_a_priority_that_waits_gets_its_part_once_the_borrower_was_read() -> None:
    link = Link()
    link.fill(INFERENCE)
    link.quota.begin(KV)
    assert not link.take(KV, 10)
    link.read_all(INFERENCE)
    assert link.fill(INFERENCE) == 2 * PART  # from now on it leaves KV its part
    assert link.fill(KV) == PART


def test_a_part_that_is_not_used_any_more_can_be_borrowed_again() -> None:
    link = Link()
    link.fill(KV)
    link.read_all(KV)
    assert link.fill(INFERENCE) == 3 * PART


def test_the_unreported_rest_of_a_priority_counts_and_reserves_nothing() -> None:
    link = Link()
    link.take(KV, FLOW.credit_bytes)
    assert link.fill(INFERENCE) == 3 * PART - FLOW.credit_bytes


EVENTS = st.one_of(
    st.tuples(st.just("take"), st.sampled_from(Priority), st.integers(1, PART)),
    st.tuples(st.just("read"), st.sampled_from(Priority), st.integers(0, 3 * PART)),
    st.tuples(st.sampled_from(["begin", "end"]), st.sampled_from(Priority), st.just(0)),
)


@given(st.lists(EVENTS, max_size=60))
def test_in_every_history_the_parts_hold_and_nobody_waits_for_a_lower_priority(
    events: list[tuple[str, Priority, int]],
) -> None:
    link, sending = Link(), dict.fromkeys(Priority, 0)
    for what, priority, n_bytes in events:
        mine = link.ahead(priority)
        borrowed = any(link.ahead(p) > PART for p in Priority if p < priority)
        if what == "take":
            took = link.take(priority, n_bytes)
            assert took or mine + n_bytes > PART or borrowed or link.ahead(*Priority) + n_bytes > 3 * PART
            if priority is INFERENCE and mine + n_bytes <= PART:
                assert took
        elif what == "read":
            link.read[priority] += min(n_bytes, mine)
            link.quota.report(priority, link.read[priority])
        elif what == "begin":
            link.quota.begin(priority)
            sending[priority] += 1
        elif sending[priority]:
            link.quota.end(priority)
            sending[priority] -= 1
        assert link.ahead(*Priority) <= 3 * PART
        assert link.ahead(KV, BULK) <= 2 * PART
        assert link.ahead(BULK) <= PART
        assert link.quota.unread_bytes == link.ahead(*Priority)
