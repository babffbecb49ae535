"""The route table and the waiting room, without a process around them."""

from __future__ import annotations

from dataclasses import replace

from gateway.routes import RouteTable
from gateway.waiting import WaitingRoom
from thaw.errors import InitFailed
from thaw.ids import ActionName, ActivationId, GroupId, HostId, InstanceId
from thaw.instance import InstanceRecord, InstanceState, StartMode

CHAT = ActionName("guest/chat")


def record(instance: str, *, slots: int = 2, version: str = "0.0.1") -> InstanceRecord:
    return InstanceRecord(
        InstanceId(instance), HostId("h0"), CHAT, version, GroupId("g"), InstanceState.READY, "127.0.0.1:1", slots,
        0, "cpu", StartMode.COLD,
    )  # fmt: skip


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
    tickets = [room.enter(ActivationId(str(n)), CHAT, "0.0.1") for n in range(4)]
    room.instance_changed(record("a", slots=2))
    assert [t.route is not None for t in tickets] == [True, True, False, False]
    late = room.enter(ActivationId("late"), CHAT, "0.0.1")
    room.leave(tickets[2])
    assert tickets[1].route is not None
    room.release(tickets[1].route)
    assert tickets[3].route is not None
    assert late.route is None
    assert room.counts() == (1, 1)


def test_leaving_with_a_route_in_hand_gives_it_to_the_next() -> None:
    room = WaitingRoom()
    first, second = (room.enter(ActivationId(n), CHAT, "0.0.1") for n in "ab")
    room.instance_changed(record("a", slots=1))
    assert first.route is not None
    room.leave(first)
    assert second.route is first.route
    assert second.event.is_set()


def test_a_failed_start_ends_the_named_and_no_other() -> None:
    room = WaitingRoom()
    first, second = (room.enter(ActivationId(n), CHAT, "0.0.1") for n in "ab")
    room.fail(CHAT, [ActivationId("a")], InitFailed("no"))
    assert first.error is not None
    assert second.error is None
    assert room.counts() == (1, 0)


def test_who_was_refused_keeps_its_turn() -> None:
    room = WaitingRoom()
    room.instance_changed(record("a", slots=1))
    first = room.enter(ActivationId("a"), CHAT, "0.0.1")
    second = room.enter(ActivationId("b"), CHAT, "0.0.1")
    assert first.route is not None
    room.refused(first.route, gone=False)
    again = room.enter(ActivationId("a"), CHAT, "0.0.1", first=True)
    assert again.route is None
    room.retry(CHAT)
    assert again.route is not None
    assert second.route is None
