"""The route table and the waiting room, tested without a gateway process."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gateway.serving.routing.routes import RouteTable
from gateway.serving.routing.waiting_room import Ticket, WaitingRoom
from thaw.errors import InitFailed, WorkerLost
from thaw.ids import ActionName, ActivationId, GroupId, HostId, InstanceId
from thaw.instance import InstanceRecord, InstanceState, StartMode

CHAT = ActionName("guest/chat")


def record(
    instance: str, *, slots: int = 2, version: str = "0.0.1", group: str = "", stage: int = 0, n_stages: int = 1
) -> InstanceRecord:
    return InstanceRecord(
        InstanceId(instance),
        HostId("h0"),
        CHAT,
        version,
        GroupId(group or instance),
        InstanceState.READY,
        "127.0.0.1:1",
        slots,
        0,
        "cpu",
        StartMode.COLD,
        stage=stage,
        n_stages=n_stages,
    )


def enter(room: WaitingRoom, name: str, since_s: float | None = None) -> Ticket:
    ticket = Ticket(ActivationId(name), CHAT, "0.0.1", *(() if since_s is None else (since_s,)))
    room.enter(ticket)
    return ticket


def test_the_least_loaded_instance_is_taken_until_no_slot_is_left() -> None:
    table = RouteTable()
    table.apply(record("a", slots=1), 0)
    table.apply(record("b", slots=2), 0)
    taken = [table.take(CHAT, "0.0.1") for _ in range(4)]
    assert sorted(r.record.instance_id for r in taken if r is not None) == ["a", "b", "b"]
    assert taken[3] is None
    assert taken[0] is not None
    table.release(taken[0])
    assert table.take(CHAT, "0.0.1") is taken[0]


def test_an_older_version_is_no_route_and_a_later_one_is() -> None:
    table = RouteTable()
    table.apply(record("a", version="0.0.9"), 0)
    assert table.take(CHAT, "0.0.10") is None
    assert table.take(CHAT, "0.0.8") is not None


def test_an_instance_that_refused_is_left_alone_until_a_slot_of_it_is_released() -> None:
    table = RouteTable()
    table.apply(record("a"), 0)
    first, second = table.take(CHAT, "0.0.1"), table.take(CHAT, "0.0.1")
    assert first is not None
    assert second is not None
    table.release(second, ran=False)
    second.full = True
    assert table.take(CHAT, "0.0.1") is None
    table.release(first)
    assert table.take(CHAT, "0.0.1") is first


def test_a_deleted_actions_instances_never_come_back() -> None:
    table = RouteTable()
    table.apply(record("a"), 0)
    table.retire(CHAT)
    assert not table.apply(record("a"), 1)
    assert table.take(CHAT, "0.0.1") is None
    table.apply(replace(record("a"), state=InstanceState.GONE), 2)
    assert table.count() == 0


def test_a_reload_keeps_counts_and_forgets_what_left() -> None:
    table = RouteTable()
    table.apply(record("a", slots=1), 0)
    table.apply(record("b", slots=1), 0)
    route = table.take(CHAT, "0.0.1")
    assert route is not None
    kept = route.record.instance_id
    table.replace([record(kept, slots=1)], 1)
    assert table.count() == 1
    assert table.take(CHAT, "0.0.1") is None
    table.release(route)
    assert table.take(CHAT, "0.0.1") is route


def test_slots_are_handed_on_in_the_order_of_arrival() -> None:
    room = WaitingRoom()
    tickets = [enter(room, str(n)) for n in range(4)]
    room.instance_changed(record("a", slots=2))
    assert [t.route is not None for t in tickets] == [True, True, False, False]
    late = enter(room, "late")
    room.leave(tickets[2])
    assert tickets[1].route is not None
    room.release(tickets[1].route)
    assert tickets[3].route is not None
    assert late.route is None
    assert room.counts() == (1, 1)


def test_leaving_with_a_route_in_hand_gives_it_to_the_next() -> None:
    room = WaitingRoom()
    first, second = (enter(room, n) for n in "ab")
    room.instance_changed(record("a", slots=1))
    given = first.route
    assert given is not None
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
    room = WaitingRoom()
    room.instance_changed(record("a", slots=1))
    first = enter(room, "a", 1.0)
    second = enter(room, "b", 2.0)
    assert first.route is not None
    room.refused(first.route, gone=False)
    again = enter(room, "a", 1.0)
    assert again.route is None
    room.retry(CHAT)
    assert again.route is not None
    assert second.route is None


def test_only_who_is_next_asks_an_instance_again_that_refused() -> None:
    room = WaitingRoom()
    room.instance_changed(record("a", slots=2))
    tickets = [enter(room, name, since_s) for name, since_s in (("a", 1.0), ("b", 2.0), ("c", 3.0), ("d", 4.0))]
    assert not room.must_ask(tickets[2])
    for ticket in tickets[:2]:
        assert ticket.route is not None
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
    room = WaitingRoom()
    room.instance_changed(record("a", slots=2))
    for name, since_s in (("first", 1.0), ("second", 2.0)):
        ticket = enter(room, name, since_s)
        assert ticket.route is not None
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
    assert table.take(CHAT, "0.0.1") is None
    first = record("a", slots=4, group="g", n_stages=2)
    assert table.apply(first, 0)
    route = table.take(CHAT, "0.0.1")
    assert route is not None
    assert route.record is first
    table.replace([first, follower], 1)
    assert table.count() == 1


def test_a_lost_stage_takes_its_groups_route_along_and_no_other() -> None:
    table = RouteTable()
    table.apply(record("a", group="g", n_stages=2), 0)
    table.apply(record("c", group="h", n_stages=2), 0)
    lost = record("b", slots=0, group="g", stage=1, n_stages=2)
    table.apply(replace(lost, state=InstanceState.GONE, error=WorkerLost("killed").info()), 1)
    assert table.count() == 1
    route = table.take(CHAT, "0.0.1")
    assert route is not None
    assert route.record.instance_id == "c"


def test_a_stage_that_was_released_leaves_the_route_of_its_group_alone() -> None:
    table = RouteTable()
    table.apply(record("a", group="g", n_stages=2), 0)
    table.apply(replace(record("b", slots=0, group="g", stage=1, n_stages=2), state=InstanceState.GONE), 1)
    assert table.take(CHAT, "0.0.1") is not None


def test_a_group_that_became_one_worker_gets_a_request_when_it_holds_fewer_than_its_slots() -> None:
    table = RouteTable()
    table.apply(record("a", slots=4, group="g", n_stages=2), 0)
    taken = [table.take(CHAT, "0.0.1") for _ in range(4)]
    table.apply(record("a", slots=2, group="g"), 1)
    for route in taken[:2]:
        assert route is not None
        table.release(route)
        assert table.take(CHAT, "0.0.1") is None
    assert taken[2] is not None
    table.release(taken[2])
    assert table.take(CHAT, "0.0.1") is taken[0]


@pytest.mark.parametrize("heard", ["before the loss", "after it"])
def test_a_group_that_became_one_worker_misses_no_other_stage(heard: str) -> None:
    table = RouteTable()
    table.apply(record("a", group="g", n_stages=2), 0)
    if heard == "before the loss":
        table.apply(record("a", group="g"), 1)
    lost = record("b", slots=0, group="g", stage=1, n_stages=2)
    table.apply(replace(lost, state=InstanceState.GONE, error=WorkerLost("killed").info()), 2)
    if heard == "after it":
        table.apply(record("a", group="g"), 3)
    assert table.take(CHAT, "0.0.1") is not None


def test_who_waits_is_told_which_stage_starts_where() -> None:
    room = WaitingRoom()
    ticket = enter(room, "a")
    room.instance_changed(replace(record("b", group="g", stage=1, n_stages=4), state=InstanceState.STARTING))
    assert list(ticket.notices) == ["starting on h0 (stage 2 of 4)"]


@pytest.mark.parametrize("lost", ["it left", "a sibling was lost"])
def test_a_route_that_was_dropped_under_a_run_is_the_same_route_again_and_may_leave(lost: str) -> None:
    room = WaitingRoom()
    room.instance_changed(record("a"))
    running, other = (enter(room, n).route for n in "ab")
    assert running is not None
    assert other is running
    room.refused(other, gone=True) if lost == "it left" else room.lost(other)
    if lost == "a sibling was lost":
        room.instance_changed(record("a"))  # its invoker's next report
        assert enter(room, "c").route is running
        assert running.inflight == 2  # and none of its slots is given twice
    room.instance_changed(replace(record("a"), state=InstanceState.DRAINING, drained=True))
    assert running.leaves


@pytest.mark.parametrize("state", [InstanceState.DRAINING, InstanceState.GONE])
def test_a_pipeline_that_lost_a_request_gets_no_other_before_its_end_could_be_reported(state: InstanceState) -> None:
    """It reports the end of the lost request first, as any instance does."""
    room = WaitingRoom()
    pipeline = record("a", n_stages=2)
    room.instance_changed(pipeline)
    for _ in range(2):
        route = enter(room, "first").route
        assert route is not None
        room.lost(route)
        room.instance_changed(pipeline)
        waits = enter(room, "again")
        assert waits.route is None
        room.trust(pipeline)  # the time is over, and the pipeline has not ended
        assert waits.route is not None
        room.release(waits.route)
    route = enter(room, "last").route
    assert route is not None
    room.lost(route)
    room.instance_changed(pipeline)
    room.instance_changed(replace(pipeline, state=state))
    room.trust(pipeline)
    assert enter(room, "nobody").route is None


def test_a_pipeline_in_doubt_that_reported_nothing_since_is_no_route_until_it_does() -> None:
    room = WaitingRoom()
    pipeline = record("a", n_stages=2)
    room.instance_changed(pipeline)
    route = enter(room, "first").route
    assert route is not None
    room.lost(route)
    room.trust(pipeline)
    assert enter(room, "waits").route is None
    room.reload([pipeline])
    assert enter(room, "goes on").route is not None


@pytest.mark.parametrize("reports_first", [True, False])
def test_a_pipeline_in_doubt_of_a_deleted_action_is_no_route_of_a_new_one(reports_first: bool) -> None:
    table = RouteTable()
    pipeline = record("a", n_stages=2)
    table.apply(pipeline, 0)
    route = table.take(CHAT, "0.0.1")
    assert route is not None
    assert table.doubt(route)
    table.release(route, ran=False)
    if reports_first:
        table.apply(pipeline, 1)
    table.retire(CHAT)
    assert not table.trust(pipeline.instance_id, 2)
    assert not table.apply(pipeline, 2)
    assert table.take(CHAT, "0.0.1") is None
    table.apply(replace(pipeline, state=InstanceState.GONE), 3)
    assert not table._retired


def test_an_entry_without_runs_and_of_no_route_is_forgotten() -> None:
    table = RouteTable()
    table.apply(record("a"), 0)
    route = table.take(CHAT, "0.0.1")
    assert route is not None
    table.drop(route)
    table.release(route)
    assert not table._aside
    table.apply(replace(record("a"), state=InstanceState.DRAINING, drained=True), 1)
    assert not route.leaves


def test_the_instance_of_a_deleted_action_does_not_leave_and_is_no_route_again() -> None:
    table = RouteTable()
    table.apply(record("a"), 0)
    route = table.take(CHAT, "0.0.1")
    assert route is not None
    table.apply(replace(record("a"), state=InstanceState.DRAINING, drained=True), 1)
    assert route.leaves
    table.retire(CHAT)
    assert not route.leaves
    table.apply(replace(record("a"), state=InstanceState.DRAINING, drained=True, inflight=1), 2)
    assert not route.leaves
    assert not table.apply(record("a"), 3)  # its host was taken back
    assert table.count() == 0


def test_who_waits_for_one_version_gets_no_other_and_does_not_hold_up_the_others() -> None:
    room = WaitingRoom()
    exact = Ticket(ActivationId("a"), CHAT, "0.0.1", 1.0, exact=True)
    room.enter(exact)
    room.instance_changed(record("b", version="0.0.2", slots=1))
    assert exact.route is None
    other = enter(room, "b")
    assert other.route is not None
    waiting = enter(room, "c")
    room.release(other.route)
    assert waiting.route is not None
    room.instance_changed(record("a", version="0.0.1"))
    assert exact.route is not None
    assert exact.route.record.instance_id == "a"


def test_a_run_that_moves_finds_no_slot_on_a_host_that_is_emptied() -> None:
    room = WaitingRoom()
    room.instance_changed(record("a"))
    assert enter(room, "a").route is not None
    room.instance_changed(replace(record("a"), state=InstanceState.DRAINING, drained=True))
    moving = Ticket(ActivationId("m"), CHAT, "0.0.1", exact=True, moves=True)
    room.enter(moving)
    room.instance_changed(record("b"))  # a start that was under way on the same host
    assert moving.route is None
    assert enter(room, "c").route is not None  # it serves the request that waited for it
    room.instance_changed(replace(record("d"), host_id=HostId("h1")))
    assert moving.route is not None


def test_runs_that_move_are_not_counted_as_requests_that_wait() -> None:
    room = WaitingRoom()
    moving = [Ticket(ActivationId(n), CHAT, "0.0.1", 1.0, exact=True, moves=True) for n in "ab"]
    for ticket in moving:
        room.enter(ticket)
    found = room.queue(CHAT)
    assert (found.n_waiting, found.n_in_namespace, found.oldest_s) == (0, 0, None)
    enter(room, "c", 5.0)
    room.leave(moving[0])
    found = room.queue(CHAT)
    assert (found.n_waiting, found.n_in_namespace, found.oldest_s) == (1, 1, 5.0)


def resumed(room: WaitingRoom, name: str, model_version: str) -> Ticket:
    ticket = Ticket(ActivationId(name), CHAT, "0.0.1", 1.0, model_version=model_version)
    room.enter(ticket)
    return ticket


def of_model(instance: str, model_version: str, **fields: int) -> InstanceRecord:
    return replace(record(instance, **fields), model_version=model_version)


def test_an_answer_goes_on_only_with_the_version_of_the_model_that_began_it() -> None:
    room = WaitingRoom()
    room.instance_changed(of_model("old", "v1", slots=1))
    room.instance_changed(of_model("new", "v2", slots=8))
    first, second = resumed(room, "first", "v1"), resumed(room, "second", "v1")
    assert first.route is not None
    assert (first.route.record.instance_id, second.route, second.error) == ("old", None, None)
    assert enter(room, "newcomer", 2.0).route is not None, "it does not wait behind who can use only some instances"
    room.release(first.route)
    assert second.route is first.route


def test_a_slot_passes_by_who_cannot_use_it() -> None:
    room = WaitingRoom()
    room.instance_changed(of_model("old", "v1", slots=1))
    room.instance_changed(of_model("new", "v2", slots=1))
    held = [enter(room, "x"), enter(room, "y")]
    picky, other = resumed(room, "picky", "v1"), enter(room, "other", 2.0)
    (new,) = (t.route for t in held if t.route is not None and t.route.record.instance_id == "new")
    room.release(new)
    assert (picky.route, other.route) == (None, new)


@pytest.mark.parametrize("when", ["before", "while"])
def test_an_answer_fails_when_every_instance_runs_another_version(when: str) -> None:
    room = WaitingRoom()
    room.instance_changed(of_model("new", "v2"))
    if when == "while":
        room.instance_changed(of_model("old", "v1", slots=1))
        assert resumed(room, "holder", "v1").route is not None
    ticket = resumed(room, "a", "v1")
    if when == "while":
        assert ticket.error is None
        room.instance_changed(replace(of_model("old", "v1", slots=1), state=InstanceState.GONE))
    assert isinstance(ticket.error, WorkerLost)
    assert room.counts()[0] == 0
    assert resumed(WaitingRoom(), "a", "v1").error is None, "a start may bring its version back"
