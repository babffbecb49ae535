"""The order in which actions are served when there is not enough room for all."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.scheduler.decisions import FailDemand, StartGroup, TimerKind, Wake
from gateway.scheduler.events import ActionSeen, QuotasSeen
from gateway.scheduler.view.waiting_line import Turn, Turns
from relay.protocol.messages import DemandRemoved
from tests.scheduler.facts import GONE, HELLO, MIB, demand, function, hello, report
from tests.scheduler.world import World, of, world
from thaw.ids import ActionName, HostId, Namespace
from thaw.quotas import OwnQuotas

TIGHT_S, LOOSE_S, SERVED_S = 2.0, 20.0, 1.0


def one_slot(objectives: dict[str, float]) -> World:
    """A host that has room for one of these functions at a time."""
    w = World(report("h0", 256))
    for name, slo_s in objectives.items():
        w.deploy(function(name, slo_ttft_s=slo_s, keep_alive_s=0.0))
    return w


def serve(w: World, start: StartGroup) -> list[StartGroup]:
    """Let an instance answer its request and leave.  Return the starts that follow."""
    w.ready(start)
    w.now += SERVED_S
    return of(w.gone(start), StartGroup)


def order_of(w: World, running: list[StartGroup], n: int) -> list[str]:
    """Serve the one that runs ``n`` times.  Return the actions that start one after another."""
    order = []
    for _ in range(n):
        running = serve(w, running[0])
        order += [s.plan.action for s in running]
    return order


@settings(max_examples=60)
@given(wanted=st.lists(st.tuples(st.floats(0.0, 3.0), st.floats(0.5, 30.0)), min_size=2, max_size=8))
def test_room_goes_to_whoever_is_due_first(wanted: list[tuple[float, float]]) -> None:
    names = [f"guest/f{i}" for i in range(len(wanted))]
    w = one_slot(dict(zip(names, (slo for _, slo in wanted), strict=True)) | {"guest/first": 1.0})
    running = of(w.ask(ActionName("guest/first")), StartGroup)
    due: dict[str, float] = {}
    for name, (pause, slo) in zip(names, wanted, strict=True):
        w.now += pause
        assert of(w.ask(ActionName(name)), StartGroup) == []
        due[name] = w.now + slo
    assert order_of(w, running, len(due)) == sorted(due, key=lambda name: (due[name], name))
    assert list(w.view.blocked) == []


def test_a_loose_request_is_not_starved_by_a_stream_of_tight_ones() -> None:
    w = one_slot({"guest/loose": LOOSE_S, "guest/a": TIGHT_S, "guest/b": TIGHT_S})
    running = of(w.ask(ActionName("guest/a")), StartGroup)
    asked_s = w.now
    w.ask(ActionName("guest/loose"))
    tight: list[Any] = [ActionName("guest/b"), ActionName("guest/a")]
    for turn in range(60):
        w.ask(tight[turn % 2])  # so one of these always waits
        running = serve(w, running[0])
        if running[0].plan.action == "guest/loose":
            break
    assert running[0].plan.action == "guest/loose"
    assert LOOSE_S - TIGHT_S - SERVED_S <= w.now - asked_s <= LOOSE_S + SERVED_S


@given(
    changes=st.lists(
        st.tuples(st.sampled_from("abcd"), st.none() | st.tuples(st.sampled_from([1.0, 2.0, 3.0]), st.integers(1, 3)))
    )
)
def test_turns_are_a_list_in_order_in_which_each_action_stands_once(
    changes: list[tuple[str, tuple[float, int] | None]],
) -> None:
    """In ``changes``, None means that the action no longer waits.  An action that is put again has its new place and
    need."""
    turns, held = Turns(), dict[str, Turn]()
    assert turns.first is None
    for name, wanted in changes:
        if wanted is None:
            turns.drop(ActionName(name))
            held.pop(name, None)
        else:
            held[name] = Turn(wanted[0], ActionName(name), wanted[1])
            turns.put(held[name])
        in_order = sorted(held.values())
        assert list(turns) == in_order
        assert len(turns) == len(in_order)
        assert [n in turns for n in "abcd"] == [n in held for n in "abcd"]
        assert turns.first == (in_order[0].name if in_order else None)
        if held:
            assert turns.least_need == min(turn.need_bytes for turn in held.values())
        else:
            with pytest.raises(ValueError, match="empty"):
                _ = turns.least_need


SMALL, LARGE = ActionName("guest/small"), ActionName("guest/large")


def small_and_large(n_hosts: int = 1) -> World:
    """Hosts with room for four small functions.  A large function takes the room of three."""
    w = World(*(report(f"h{i}", 1024) for i in range(n_hosts)))
    for name, mb in ((LARGE, 768), (SMALL, 256)):
        w.deploy(hello(name=name, need_bytes=mb * MIB, slo_ttft_s=TIGHT_S, keep_alive_s=0.0))
    return w


def test_a_large_start_is_not_starved_by_a_stream_of_small_ones_that_always_fit() -> None:
    w = small_and_large()
    running = [start for _ in range(4) for start in of(w.ask(SMALL), StartGroup)]
    assert len(running) == 4
    assert of(w.ask(LARGE), StartGroup) == []
    for _ in range(12):  # each time one leaves and another one is requested, so three places are never free
        w.ask(SMALL)
        started = serve(w, running.pop(0))
        running += started
        if any(s.plan.action == LARGE for s in started):
            break
    assert running[-1].plan.action == LARGE


def test_what_one_keeps_is_free_for_all_when_it_waits_no_more() -> None:
    w = small_and_large()
    running = [start for _ in range(3) for start in of(w.ask(SMALL), StartGroup)]
    assert of(w.ask(LARGE), StartGroup) == []
    (waiting,) = w.view.action(LARGE).waiting
    assert of(w.ask(SMALL), StartGroup) == []  # the fourth place is kept free
    w.do(DemandRemoved(waiting, LARGE))
    assert len(of(w.later(2.0), StartGroup)) == 1
    assert w.view.keeper is None
    assert len(running) == 3


def test_only_one_device_is_kept_and_the_others_go_on() -> None:
    w = small_and_large(n_hosts=2)
    running = [start for _ in range(7) for start in of(w.ask(SMALL), StartGroup)]
    assert len(running) == 7  # one place is left, on h1
    for _ in range(2):
        assert of(w.ask(LARGE), StartGroup) == []
    assert w.view.keeper == (LARGE, (HostId("h1"), "cpu"))
    (here,) = [s for s in running[:1] if s.plan.stages[0].host == "h0"]
    w.ask(SMALL)
    assert [s.plan.action for s in serve(w, here)] == [SMALL]


def between(world: World, owners: dict[str, int]) -> list[StartGroup]:
    """A host that is full, and so many functions of each namespace that wait."""
    running = of(world.ask(ActionName("guest/first")), StartGroup)
    for owner, n in owners.items():
        for i in range(n):
            name = ActionName(f"{owner}/f{i}")
            world.deploy(hello(name=name, slo_ttft_s=TIGHT_S, keep_alive_s=0.0))
            assert of(world.ask(name), StartGroup) == []
    return running


def start_elsewhere(world: World, owners: list[str]) -> None:
    for owner in owners:
        world.gone(world.serving(ActionName(f"{owner}/small")))


def take_first(turns: Turns) -> ActionName:
    """Let the first in the line start."""
    first = ActionName(turns.first or "")
    turns.lift(first)
    turns.started(first, 8)
    turns.settle(first)
    return first


@given(
    elsewhere=st.lists(st.tuples(st.sampled_from("xyz"), st.integers(1, 9)), max_size=9),
    x_has=st.integers(0, 12),
)
def test_a_check_that_finds_no_room_costs_no_turn(elsewhere: list[tuple[str, int]], x_has: int) -> None:
    turns = Turns()
    for name in ("honest/f", *(f"{o}/f{i}" for o in "wx" for i in range(x_has))):
        turns.put(Turn(0.0, ActionName(name), 8))
    order: list[str] = []
    while "honest/f" not in order:
        for owner, n in elsewhere:
            turns.started(ActionName(f"{owner}/small"), n)
        for turn in list(turns):
            turns.lift(turn.name)
            turns.put(turn)
            turns.settle(turn.name)
        order.append(take_first(turns))
    owners = [name.partition("/")[0] for name in order]
    assert len(set(owners)) == len(owners)


def test_one_who_has_had_much_beside_the_line_owes_one_turn() -> None:
    turns = Turns()
    for i in range(9):
        turns.put(Turn(0.0, ActionName(f"x/f{i}"), 8))
    for _ in range(100):
        turns.started(ActionName("z/f"), 8)
    turns.put(Turn(0.0, ActionName("z/f"), 8))
    assert [take_first(turns) for _ in range(3)] == ["x/f0", "x/f1", "z/f"]


@settings(max_examples=40, deadline=None)
@given(
    crowd=st.dictionaries(st.sampled_from("abc"), st.integers(1, 12), max_size=3),
    n_before=st.integers(0, 6),
    weights=st.dictionaries(st.sampled_from("abc"), st.sampled_from([0.5, 2.0, 10.0])),
    elsewhere=st.lists(st.sampled_from("abz"), max_size=4),
)
def test_a_namespace_that_asks_for_one_start_waits_for_at_most_one_of_each_other(
    crowd: dict[str, int], n_before: int, weights: dict[str, float], elsewhere: list[str]
) -> None:
    """This holds no matter how early and how many the others' requests are.  It also holds while others start functions
    ``elsewhere``, on hosts that have no room for the waiting requests."""
    w = World(report("h0", 256), report("h1", 128))
    for owner in "abz":
        w.deploy(function(f"{owner}/small", need_bytes=128 * MIB, keep_alive_s=0.0))
    w.deploy(function("guest/first", keep_alive_s=0.0))
    for owner, weight in weights.items():
        w.do(QuotasSeen(Namespace(owner), OwnQuotas(weight=weight)))
    running = between(w, crowd)
    for _ in range(n_before):
        start_elsewhere(w, elsewhere)
        running = serve(w, running[0]) if running else []
    w.deploy(function("honest/f", slo_ttft_s=60.0, keep_alive_s=0.0))
    others = {turn.name.partition("/")[0] for turn in w.view.blocked}
    order = [s.plan.action for s in of(w.ask(ActionName("honest/f")), StartGroup)]
    while "honest/f" not in order:
        start_elsewhere(w, elsewhere)
        running = serve(w, running[0])
        order += [s.plan.action for s in running]
    before = [name.partition("/")[0] for name in order[: order.index(ActionName("honest/f"))]]
    assert len(set(before)) == len(before)
    assert set(before) <= others


def test_ten_thousand_requests_of_one_namespace_delay_another_ones_start_by_one() -> None:
    w = one_slot({"guest/first": 1.0, "flood/f": TIGHT_S, "honest/f": LOOSE_S})
    running = of(w.ask(ActionName("guest/first")), StartGroup)
    flood = [demand(f"x{i}", ActionName("flood/f"), waited_ms=60_000) for i in range(10_000)]
    assert of(w.do(*flood), StartGroup) == []
    assert of(w.ask(ActionName("honest/f")), StartGroup) == []
    assert order_of(w, running, 4) == ["flood/f", "honest/f", "flood/f", "flood/f"]


def test_namespaces_that_always_wait_start_by_their_weights() -> None:
    w = one_slot({"guest/first": 1.0})
    w.do(QuotasSeen(Namespace("b"), OwnQuotas(weight=3.0)))
    order = order_of(w, between(w, {"a": 12, "b": 12}), 12)
    assert [name[0] for name in order].count("b") in (9, 8)


def test_a_namespace_has_no_more_starts_in_progress_than_its_quota() -> None:
    w = World(report("h0", 4096))
    w.do(QuotasSeen(Namespace("guest"), OwnQuotas(starts=2)))
    w.deploy(hello(), function("other/f"))
    running = [start for _ in range(4) for start in of(w.ask(), StartGroup)]
    assert len(running) == 2
    assert len(of(w.ask(ActionName("other/f")), StartGroup)) == 1, "another namespace has its own"
    assert of(w.later(2.0), StartGroup) == []
    assert len(of(w.ready(running[0]), StartGroup)) == 1, "one of the two is ready now"
    assert of(w.said(running[1], GONE), StartGroup) == []
    assert len(of(w.later(1.0), StartGroup)) == 1, "one has failed, and its action has paused"


def test_a_quota_of_starts_that_is_raised_is_used_at_once_in_the_order_of_the_line() -> None:
    w = World(report("h0", 4096))
    w.do(QuotasSeen(Namespace("guest"), OwnQuotas(starts=0)))
    for i in range(4):
        w.deploy(function(f"guest/f{i}"))
        assert of(w.ask(ActionName(f"guest/f{i}")), StartGroup) == []
    assert [wake.key for wake in w.timers if wake.at_s < w.now + 60] == [], "nobody looks every second"
    assert of(w.ask(ActionName("guest/f0")), StartGroup) == []  # this request keeps its place
    started = of(w.do(QuotasSeen(Namespace("guest"), OwnQuotas(starts=2))), StartGroup)
    assert [s.plan.action for s in started] == ["guest/f0", "guest/f0"]
    assert [s.plan.action for s in of(w.ready(started[0]), StartGroup)] == ["guest/f1"]


def test_a_request_that_waited_for_its_namespaces_starts_is_told_so_before_its_time_limit() -> None:
    w = World(report("h0", 4096))
    w.do(QuotasSeen(Namespace("guest"), OwnQuotas(starts=0)), ActionSeen(replace(hello(), timeout_s=30.0)))
    w.ask()
    assert of(w.later(27.0), FailDemand) == []
    (told,) = of(w.later(2.0), FailDemand)
    assert "as many in progress as allowed (0). THAW_QUOTA_STARTS is" in told.error.message
    assert of(w.do(QuotasSeen(Namespace("guest"), OwnQuotas(starts=1))), StartGroup) == []


def test_a_timer_that_an_earlier_one_has_replaced_decides_nothing_and_sets_no_other() -> None:
    w = world(report(memory_mb=300))
    w.ask(HELLO)
    w.ask(HELLO)  # waits for room
    (timer,) = (t for t in w.timers if t.kind is TimerKind.RESCALE)
    assert w.view.action(HELLO).wake_s == timer.at_s
    w.now = timer.at_s - 0.25
    assert w.fire(timer) == []
    assert w.view.action(HELLO).wake_s == timer.at_s
    w.now = timer.at_s
    (following,) = w.fire(timer)
    assert isinstance(following, Wake)
    assert following.at_s > timer.at_s
