"""A full queue refuses a request at once, and says when a request that came now would be served."""

from __future__ import annotations

import time
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest

from gateway.serving.routing import expected_wait
from gateway.serving.routing.expected_wait import Expectation
from gateway.serving.routing.throttle import QueueCaps
from gateway.serving.routing.waiting_room import Queue, Ticket, WaitingRoom
from tests.gateway.calls import CHAT, HELLO, action_of
from tests.gateway.conftest import Start
from tests.relay.samples import PLAN
from thaw.action import KIND_LLM
from thaw.errors import Throttled, Unavailable
from thaw.ids import ActionName, ActivationId, GroupId
from thaw.plan import Plan

NOW_S = 1_800_000_000.0


@pytest.fixture
def _at_now(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stop the wall clock, with which the ages of plans are computed."""
    monkeypatch.setattr(expected_wait, "time", SimpleNamespace(time=lambda: NOW_S))


def plan(group: str = "g", ttft_s: float | None = 40.0, made_s_ago: float = 0.0, *, now_s: float | None = None) -> Plan:
    created_wall_ns = int(((now_s or time.time()) - made_s_ago) * 1e9)
    return replace(PLAN, group_id=GroupId(group), created_wall_ns=created_wall_ns, predicted_ttft_s=ttft_s)


def test_a_full_queue_of_an_action_is_a_429_that_says_when_its_start_will_be_ready(start_gateway: Start) -> None:
    gateway = start_gateway(THAW_QUEUE_PER_ACTION="1", THAW_GATEWAY_DRAIN_S="1")  # a 202 still waits when it stops
    gateway.put_llm()
    gateway.put_python()
    waiting = gateway.soon(gateway.chat, max_tokens=1)
    gateway.invoker.wait_for_demand()
    gateway.invoker.registry.put_plan(plan())
    refused = gateway.chat(max_tokens=1)
    assert refused.status_code == 429
    error = refused.json()["error"]
    assert error["message"] == "Too many requests wait for guest/chat (count: 1, allowed: 1)."
    assert error["code"] == "rate_limit_exceeded"
    assert 30 <= int(refused.headers["Retry-After"]) <= 40
    assert gateway.invoke("chat", "", prompt="x").status_code == 429
    assert gateway.invoke("hello", "").status_code == 202  # another action's queue is empty
    gateway.invoker.ready("guest/chat")
    assert waiting.result().status_code == 200
    assert gateway.chat(max_tokens=1).status_code == 200


def test_a_namespace_has_a_cap_of_its_own_and_others_do_not_feel_it(start_gateway: Start) -> None:
    gateway = start_gateway(THAW_QUEUE_PER_NAMESPACE="1")
    gateway.put_llm()
    gateway.put_python()
    waiting = gateway.soon(gateway.chat, max_tokens=1)
    gateway.invoker.wait_for_demand()
    refused = gateway.invoke()
    assert refused.status_code == 429
    assert refused.json()["error"] == "Too many requests wait for namespace guest (count: 1, allowed: 1)."
    gateway.invoker.ready("guest/chat")
    assert waiting.result().status_code == 200


def test_one_namespace_leaves_threads_to_others(start_gateway: Start) -> None:
    gateway = start_gateway(THAW_GATEWAY_THREADS="8")
    gateway.put_llm()
    limits = gateway.read("limits")
    assert limits["concurrentInvocations"] == 7
    held = [gateway.soon(gateway.chat, max_tokens=1) for _ in range(7)]
    gateway.invoker.wait_for_demand(7)
    refused = gateway.chat(max_tokens=1)
    assert refused.status_code == 429
    assert refused.json()["error"]["message"] == "Too many concurrent requests in flight (count: 8, allowed: 7)."
    gateway.invoker.ready("guest/chat")
    assert {reply.result().status_code for reply in held} == {200}


class Plans:
    """A registry that has these plans, or does not answer."""

    def __init__(self, *plans: Plan, away: bool = False) -> None:
        self._plans, self._away, self.n_reads = plans, away, 0

    def plans(self) -> list[Plan]:
        self.n_reads += 1
        if self._away:
            raise Unavailable("no state server")
        return list(self._plans)


def expected(plans: Plans, queue: Queue, now_s: float = 100.0) -> float:
    return Expectation(plans, lambda: now_s).wait_s(CHAT, queue)  # type: ignore[arg-type]


def queue(n: int = 4, age_s: float = 8.0, handed_s: tuple[float, ...] = (), serving: tuple[str, ...] = ()) -> Queue:
    return Queue(n, n, 100.0 - age_s, handed_s, frozenset(map(GroupId, serving)))


made = partial(plan, now_s=NOW_S)


@pytest.mark.usefixtures("_at_now")
@pytest.mark.parametrize(
    ("plans", "waiting", "want"),
    [
        ((made(ttft_s=40),), queue(age_s=8), 32.0),  # the plan predicts the first token of its oldest request
        ((made(ttft_s=40, made_s_ago=30),), queue(age_s=8), 10.0),  # the oldest request waits at another gateway
        ((made(ttft_s=40), made("h", ttft_s=20)), queue(age_s=8), 12.0),  # the earlier of two starts counts
        ((made(ttft_s=4),), queue(age_s=8), 0.0),  # the start is overdue and may end at any moment
        ((made("ready"),), queue(age_s=8, serving=("ready",)), 8.0),  # no start is in progress: as long again
        ((made(ttft_s=None),), queue(age_s=8), 8.0),  # the plan of an ordinary function predicts nothing
        ((), queue(n=4, handed_s=(80.0, 90.0, 95.0, 98.0)), 20.0),  # four left the queue in 20 s, and four wait
        ((), queue(n=4, handed_s=(50.0, 52.0)), 100.0),  # no request leaves the queue any more
    ],
)
def test_the_wait_is_foretold_from_starts_then_from_the_queues_pace_then_from_its_age(
    plans: tuple[Plan, ...], waiting: Queue, want: float
) -> None:
    assert expected(Plans(*plans), waiting) == pytest.approx(want, abs=0.001)


def test_without_a_state_server_the_age_of_the_queue_answers() -> None:
    assert expected(Plans(away=True), queue(age_s=3.0)) == pytest.approx(3.0)


def test_a_crowd_that_is_refused_reads_the_plans_once() -> None:
    plans, now = Plans(plan()), [100.0]
    expectation = Expectation(plans, lambda: now[0])  # type: ignore[arg-type]
    for _ in range(100):
        expectation.wait_s(CHAT, queue())
    assert plans.n_reads == 1
    now[0] += 2.0
    expectation.wait_s(CHAT, queue())
    assert plans.n_reads == 2


def test_the_room_tells_of_its_queues() -> None:
    room = WaitingRoom()
    for i, action in enumerate((CHAT, CHAT, ActionName("guest/hello"), ActionName("guests/x"))):
        room.enter(Ticket(ActivationId(str(i)), action, "0.0.1", since_s=float(i)))
    found = room.queue(CHAT)
    assert found == Queue(2, 3, 0.0, (), frozenset())
    assert room.queue(ActionName("guest/nobody")) == Queue(0, 3, None, (), frozenset())
    room.fail(ActionName("guest/nobody"), (ActivationId("0"),), Unavailable("of another action"))
    assert room.queue(CHAT) == found


class Room:
    """A waiting room with this queue for CHAT and an empty queue for any other action."""

    def __init__(self, queue: Queue) -> None:
        self._queue = queue

    def queue(self, action: ActionName) -> Queue:
        return self._queue if action == CHAT else Queue(0, 0, None, (), frozenset())


@pytest.mark.parametrize(
    ("n_waiting", "n_in_namespace", "n", "is_refused"),
    [(0, 0, 3, False), (0, 0, 4, True), (1, 1, 3, True), (0, 3, 2, False), (0, 4, 2, True)],
)
def test_all_choices_of_a_request_count_where_they_would_wait(
    n_waiting: int, n_in_namespace: int, n: int, is_refused: bool
) -> None:
    found = Queue(n_waiting, n_in_namespace, None, (), frozenset([GroupId("g")]))
    expectation = Expectation(Plans(plan(ttft_s=40)), lambda: 100.0)  # type: ignore[arg-type]
    caps = QueueCaps(3, 5, Room(found), expectation)  # type: ignore[arg-type]
    with pytest.raises(Throttled) if is_refused else nullcontext():
        caps.check(action_of(CHAT, KIND_LLM), n)


@pytest.mark.usefixtures("_at_now")
@pytest.mark.parametrize(
    ("n_waiting", "n_in_namespace", "serving", "refused"),
    [
        (0, 0, (), ""),
        (2, 4, (), ""),
        (3, 4, (), r"wait for guest/chat \(count: 3, allowed: 3\)"),
        (4, 9, ("g",), r"wait for guest/chat \(count: 4, allowed: 3\)"),
        (2, 5, (), r"wait for namespace guest \(count: 5, allowed: 5\)"),
        (2, 6, ("g",), r"wait for namespace guest \(count: 6, allowed: 5\)"),
        (0, 5, (), r"wait for namespace guest \(count: 5, allowed: 5\)"),
        (0, 5, ("g",), ""),  # an instance serves and no request waits for it, so this one most likely finds a slot
    ],
)
def test_a_request_is_refused_where_its_actions_or_its_namespaces_queue_is_full(
    n_waiting: int, n_in_namespace: int, serving: tuple[str, ...], refused: str
) -> None:
    found = Queue(n_waiting, n_in_namespace, 92.0, (), frozenset(map(GroupId, serving)))
    expectation = Expectation(Plans(plan(ttft_s=40, now_s=NOW_S)), lambda: 100.0)  # type: ignore[arg-type]
    caps = QueueCaps(3, 5, Room(found), expectation)  # type: ignore[arg-type]
    caps.check(action_of(HELLO, KIND_LLM))
    if not refused:
        caps.check(action_of(CHAT, KIND_LLM))
        return
    with pytest.raises(Throttled, match=refused) as caught:
        caps.check(action_of(CHAT, KIND_LLM))
    assert caught.value.retry_after_s == pytest.approx(8.0 if serving == ("g",) else 32.0, abs=0.001)
