"""The route table and the waiting room, tested without a gateway process."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from gateway.serving.routing.routes import RouteTable
from gateway.serving.routing.waiting_room import Ticket, WaitingRoom
from tests.gateway.calls import CHAT, instance_of
from thaw.errors import InitFailed, WorkerLost
from thaw.ids import ActivationId, HostId
from thaw.instance import InstanceRecord, InstanceState

KILLED = WorkerLost("killed").info()
record = partial(instance_of, action=CHAT, slots=2)


def gone(instance: InstanceRecord, **fields: Any) -> InstanceRecord:
    return replace(instance, state=InstanceState.GONE, **fields)


def leaving(instance: str, **fields: Any) -> InstanceRecord:
    """An instance whose host is being emptied."""
    return record(instance, state=InstanceState.DRAINING, drained=True, **fields)


def table_of(*records: InstanceRecord) -> RouteTable:
    table = RouteTable()
    for one in records:
        table.apply(one, 0)
    return table


def room_of(*records: InstanceRecord) -> WaitingRoom:
    room = WaitingRoom()
    for one in records:
        room.instance_changed(one)
    return room


def take(table: RouteTable) -> Any:
    """The route of a request, or None."""
    return table.take(CHAT, "0.0.1")


def enter(room: WaitingRoom, name: str, since_s: float | None = None, **fields: Any) -> Ticket:
    times = {} if since_s is None else {"since_s": since_s}
    ticket = Ticket(ActivationId(name), CHAT, "0.0.1", **times, **fields)
    room.enter(ticket)
    return ticket


def test_the_least_loaded_instance_is_taken_until_no_slot_is_left() -> None:
    table = table_of(record("a", slots=1), record("b", slots=2))
    taken = [take(table) for _ in range(4)]
    assert sorted(r.record.instance_id for r in taken if r is not None) == ["a", "b", "b"]
    assert taken[3] is None
    table.release(taken[0])
    assert take(table) is taken[0]


def test_an_older_version_is_no_route_and_a_later_one_is() -> None:
    table = table_of(record("a", version="0.0.9"))
    assert table.take(CHAT, "0.0.10") is None
    assert table.take(CHAT, "0.0.8") is not None


def test_an_instance_that_refused_is_left_alone_until_a_slot_of_it_is_released() -> None:
    table = table_of(record("a"))
    first, second = take(table), take(table)
    table.release(second, ran=False)
    second.full = True
    assert take(table) is None
    table.release(first)
    assert take(table) is first


def test_a_deleted_actions_instances_never_come_back() -> None:
    table = table_of(record("a"))
    table.retire(CHAT)
    assert not table.apply(record("a"), 1)
    assert take(table) is None
    table.apply(gone(record("a")), 2)
    assert table.count() == 0


def test_a_reload_keeps_counts_and_forgets_what_left() -> None:
    table = table_of(record("a", slots=1), record("b", slots=1))
    route = take(table)
    kept = route.record.instance_id
    table.replace([record(kept, slots=1)], 1)
    assert table.count() == 1
    assert take(table) is None
    table.release(route)
    assert take(table) is route


def test_slots_are_handed_on_in_the_order_of_arrival() -> None:
    room = WaitingRoom()
    tickets = [enter(room, str(n)) for n in range(4)]
    room.instance_changed(record("a", slots=2))
    assert [t.route is not None for t in tickets] == [True, True, False, False]
    late = enter(room, "late")
    room.leave(tickets[2])
    room.release(tickets[1].route)
    assert tickets[3].route is not None
    assert late.route is None
    assert room.counts() == (1, 1)


def test_leaving_with_a_route_in_hand_gives_it_to_the_next() -> None:
    room = WaitingRoom()
    first, second = (enter(room, n) for n in "ab")
    room.instance_changed(record("a", slots=1))
    given = first.route
    for _ in range(2):  # it is given up once, however often this is said
        room.leave(first)
    assert second.route is given
    assert given.inflight == 1
    assert second.event.is_set()


def test_a_failed_start_ends_the_named_and_no_other() -> None:
    room = WaitingRoom()
    first, second = (enter(room, n) for n in "ab")
    room.fail(CHAT, [ActivationId("a")], InitFailed("no"))
    assert first.error is not None
    assert second.error is None
    assert room.counts() == (1, 0)


def test_who_was_refused_keeps_its_turn() -> None:
    room = room_of(record("a", slots=1))
    first = enter(room, "a", 1.0)
    second = enter(room, "b", 2.0)
    room.refused(first.route, gone=False)
    again = enter(room, "a", 1.0)
    assert again.route is None
    room.retry(CHAT)
    assert again.route is not None
    assert second.route is None


def test_only_who_is_next_asks_an_instance_again_that_refused() -> None:
    room = room_of(record("a", slots=2))
    tickets = [enter(room, name, since_s) for name, since_s in (("a", 1.0), ("b", 2.0), ("c", 3.0), ("d", 4.0))]
    assert not room.must_ask(tickets[2])
    for ticket in tickets[:2]:
        room.refused(ticket.route, gone=False)
    assert room.must_ask(tickets[2])
    assert tickets[2].event.is_set()  # the ticket that could be next is told
    again = [enter(room, name, since_s) for name, since_s in (("b", 2.0), ("a", 1.0))]
    waiting = [*reversed(again), *tickets[2:]]
    assert [room.must_ask(t) for t in waiting] == [True, False, False, False]
    room.leave(waiting[0])
    assert waiting[1].event.is_set()  # the client of the first went away, so the next one asks
    assert [room.must_ask(t) for t in waiting] == [False, True, False, False]
    room.retry(CHAT)
    assert [t.route is not None for t in waiting] == [False, True, True, False]
    assert not room.must_ask(waiting[3])


def test_several_that_lost_their_worker_come_back_in_the_order_they_came_in() -> None:
    room = room_of(record("a", slots=2))
    for name, since_s in (("first", 1.0), ("second", 2.0)):
        ticket = enter(room, name, since_s)
        route = ticket.route
    later = enter(room, "third", 3.0)
    room.lost(route)
    again = [enter(room, "second", 2.0), enter(room, "first", 1.0)]  # they may notice the loss in any order
    served = []
    for name in "bcd":
        room.instance_changed(record(name, slots=1))
        served.append([t.activation_id for t in (*again, later) if t.route is not None])
    assert served == [["first"], ["second", "first"], ["second", "first", "third"]]


def test_requests_go_to_the_first_stage_of_a_group_only() -> None:
    table = RouteTable()
    follower = record("b", slots=0, group="g", stage=1, n_stages=2)
    assert not table.apply(follower, 0)
    assert take(table) is None
    first = record("a", slots=4, group="g", n_stages=2)
    assert table.apply(first, 0)
    assert take(table).record is first
    table.replace([first, follower], 1)
    assert table.count() == 1


def test_a_lost_stage_takes_its_groups_route_along_and_no_other() -> None:
    table = table_of(record("a", group="g", n_stages=2), record("c", group="h", n_stages=2))
    lost = record("b", slots=0, group="g", stage=1, n_stages=2)
    table.apply(gone(lost, error=KILLED), 1)
    assert table.count() == 1
    assert take(table).record.instance_id == "c"


def test_a_stage_that_was_released_leaves_the_route_of_its_group_alone() -> None:
    table = table_of(record("a", group="g", n_stages=2))
    table.apply(gone(record("b", slots=0, group="g", stage=1, n_stages=2)), 1)
    assert take(table) is not None


def test_a_group_that_became_one_worker_gets_a_request_when_it_holds_fewer_than_its_slots() -> None:
    table = table_of(record("a", slots=4, group="g", n_stages=2))
    taken = [take(table) for _ in range(4)]
    table.apply(record("a", slots=2, group="g"), 1)
    for route in taken[:2]:
        table.release(route)
        assert take(table) is None
    table.release(taken[2])
    assert take(table) is taken[0]


@pytest.mark.parametrize("heard", ["before the loss", "after it"])
def test_a_group_that_became_one_worker_misses_no_other_stage(heard: str) -> None:
    table = table_of(record("a", group="g", n_stages=2))
    if heard == "before the loss":
        table.apply(record("a", group="g"), 1)
    lost = record("b", slots=0, group="g", stage=1, n_stages=2)
    table.apply(gone(lost, error=KILLED), 2)
    if heard == "after it":
        table.apply(record("a", group="g"), 3)
    assert take(table) is not None


def test_who_waits_is_told_which_stage_starts_where() -> None:
    room = WaitingRoom()
    ticket = enter(room, "a")
    room.instance_changed(record("b", group="g", stage=1, n_stages=4, state=InstanceState.STARTING))
    assert list(ticket.notices) == ["starting on h0 (stage 2 of 4)"]


@pytest.mark.parametrize("lost", ["it left", "a sibling was lost"])
def test_a_route_that_was_dropped_under_a_run_is_the_same_route_again_and_may_leave(lost: str) -> None:
    room = room_of(record("a"))
    running, other = (enter(room, n).route for n in "ab")
    assert other is running
    room.refused(other, gone=True) if lost == "it left" else room.lost(other)
    if lost == "a sibling was lost":
        room.instance_changed(record("a"))  # its invoker's next report
        assert enter(room, "c").route is running
        assert running.inflight == 2  # and none of its slots is given twice
    room.instance_changed(leaving("a"))
    assert running.leaves


@pytest.mark.parametrize("state", [InstanceState.DRAINING, InstanceState.GONE])
def test_a_pipeline_that_lost_a_request_gets_no_other_before_its_end_could_be_reported(state: InstanceState) -> None:
    """It reports the end of the lost request first, as any instance does."""
    pipeline = record("a", n_stages=2)
    room = room_of(pipeline)
    for _ in range(2):
        route = enter(room, "first").route
        room.lost(route)
        room.instance_changed(pipeline)
        waits = enter(room, "again")
        assert waits.route is None
        room.trust(pipeline)  # the time is over, and the pipeline has not ended
        assert waits.route is not None
        room.release(waits.route)
    route = enter(room, "last").route
    room.lost(route)
    room.instance_changed(pipeline)
    room.instance_changed(replace(pipeline, state=state))
    room.trust(pipeline)
    assert enter(room, "nobody").route is None


def test_a_pipeline_in_doubt_that_reported_nothing_since_is_no_route_until_it_does() -> None:
    pipeline = record("a", n_stages=2)
    room = room_of(pipeline)
    route = enter(room, "first").route
    room.lost(route)
    room.trust(pipeline)
    assert enter(room, "waits").route is None
    room.reload([pipeline])
    assert enter(room, "goes on").route is not None


@pytest.mark.parametrize("reports_first", [True, False])
def test_a_pipeline_in_doubt_of_a_deleted_action_is_no_route_of_a_new_one(reports_first: bool) -> None:
    pipeline = record("a", n_stages=2)
    table = table_of(pipeline)
    route = take(table)
    assert table.doubt(route)
    table.release(route, ran=False)
    if reports_first:
        table.apply(pipeline, 1)
    table.retire(CHAT)
    assert not table.trust(pipeline.instance_id, 2)
    assert not table.apply(pipeline, 2)
    assert take(table) is None
    table.apply(gone(pipeline), 3)
    assert not table._retired


def test_an_entry_without_runs_and_of_no_route_is_forgotten() -> None:
    table = table_of(record("a"))
    route = take(table)
    table.drop(route)
    table.release(route)
    assert not table._aside
    table.apply(leaving("a"), 1)
    assert not route.leaves


def test_the_instance_of_a_deleted_action_does_not_leave_and_is_no_route_again() -> None:
    table = table_of(record("a"))
    route = take(table)
    table.apply(leaving("a"), 1)
    assert route.leaves
    table.retire(CHAT)
    assert not route.leaves
    table.apply(leaving("a", inflight=1), 2)
    assert not route.leaves
    assert not table.apply(record("a"), 3)  # its host was taken back
    assert table.count() == 0


def test_who_waits_for_one_version_gets_no_other_and_does_not_hold_up_the_others() -> None:
    room = WaitingRoom()
    exact = enter(room, "a", 1.0, exact=True)
    room.instance_changed(record("b", version="0.0.2", slots=1))
    assert exact.route is None
    other = enter(room, "b")
    waiting = enter(room, "c")
    room.release(other.route)
    assert waiting.route is not None
    room.instance_changed(record("a", version="0.0.1"))
    assert exact.route.record.instance_id == "a"


def test_a_run_that_moves_finds_no_slot_on_a_host_that_is_emptied() -> None:
    room = room_of(record("a"))
    assert enter(room, "a").route is not None
    room.instance_changed(leaving("a"))
    moving = enter(room, "m", exact=True, moves=True)
    room.instance_changed(record("b"))  # a start that was under way on the same host
    assert moving.route is None
    assert enter(room, "c").route is not None  # it serves the request that waited for it
    room.instance_changed(record("d", host_id=HostId("h1")))
    assert moving.route is not None


def test_runs_that_move_are_not_counted_as_requests_that_wait() -> None:
    room = WaitingRoom()
    moving = [enter(room, n, 1.0, exact=True, moves=True) for n in "ab"]
    found = room.queue(CHAT)
    assert (found.n_waiting, found.n_in_namespace, found.oldest_s) == (0, 0, None)
    enter(room, "c", 5.0)
    room.leave(moving[0])
    found = room.queue(CHAT)
    assert (found.n_waiting, found.n_in_namespace, found.oldest_s) == (1, 1, 5.0)


def test_an_answer_goes_on_only_with_the_version_of_the_model_that_began_it() -> None:
    room = room_of(record("old", model_version="v1", slots=1), record("new", model_version="v2", slots=8))
    first, second = enter(room, "first", 1.0, model_version="v1"), enter(room, "second", 1.0, model_version="v1")
    assert (first.route.record.instance_id, second.route, second.error) == ("old", None, None)
    assert enter(room, "newcomer", 2.0).route is not None, "it does not wait behind who can use only some instances"
    room.release(first.route)
    assert second.route is first.route


def test_a_slot_passes_by_who_cannot_use_it() -> None:
    room = room_of(record("old", model_version="v1", slots=1), record("new", model_version="v2", slots=1))
    held = [enter(room, "x"), enter(room, "y")]
    picky, other = enter(room, "picky", 1.0, model_version="v1"), enter(room, "other", 2.0)
    (new,) = (t.route for t in held if t.route is not None and t.route.record.instance_id == "new")
    room.release(new)
    assert (picky.route, other.route) == (None, new)


@pytest.mark.parametrize("when", ["before", "while"])
def test_an_answer_fails_when_every_instance_runs_another_version(when: str) -> None:
    room = room_of(record("new", model_version="v2"))
    if when == "while":
        room.instance_changed(record("old", model_version="v1", slots=1))
        assert enter(room, "holder", 1.0, model_version="v1").route is not None
    ticket = enter(room, "a", 1.0, model_version="v1")
    if when == "while":
        assert ticket.error is None
        room.instance_changed(gone(record("old", model_version="v1", slots=1)))
    assert isinstance(ticket.error, WorkerLost)
    assert room.counts()[0] == 0
    assert enter(WaitingRoom(), "a", 1.0, model_version="v1").error is None, "a start may bring its version back"
