"""When a resource of gateway/front/ is full: which connection gives way, and which one is next."""

from __future__ import annotations

import logging
import selectors
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from unittest.mock import Mock

import pytest

from gateway.connections import ConnectionWorker
from gateway.front.bounds import Bounds
from gateway.front.connection import Connection, address_of, whole_bytes
from gateway.front.deadlines import Deadlines
from gateway.front.holdings import Holdings
from gateway.front.memory import LINE_PER_NAMESPACE, Line, SharedMemory
from gateway.front.turns import Turns
from gateway.settings import GatewaySettings
from gateway.worker import Worker
from relay.state.code import UNNAMED_TTL_S
from thaw.ids import Namespace
from thaw.settings import load

A, B = Namespace("a"), Namespace("b")
Make = Callable[..., Connection]


@pytest.fixture
def make() -> Iterator[Make]:
    one, two = socket.socketpair()

    def make(namespace: Namespace | None = None, wants: int = 0) -> Connection:
        connection = Connection(one, None, None, 1.0)
        connection.namespace, connection.wants = namespace, wants
        return connection

    with one, two:
        yield make


def test_the_owner_of_most_gives_way_and_with_its_oldest(make: Make) -> None:
    holdings = Holdings()
    strangers, tenants = [make() for _ in range(2)], [make(A) for _ in range(3)]
    for connection in (*strangers, *tenants, make(B)):
        holdings.set(connection)
    assert list(holdings.heaviest()) == tenants
    holdings.drop(tenants[0])
    assert list(holdings.heaviest()) == strangers  # among equals, those without a key give way
    holdings.set(tenants[2], 10)
    holdings.set(tenants[2], 20)
    assert holdings.total == 24
    assert list(holdings.heaviest()) == tenants[1:]
    assert list(holdings.heaviest(more_than=20)) == tenants[1:]
    assert not list(holdings.heaviest(more_than=21))
    for connection in list(holdings):
        holdings.drop(connection)
        holdings.drop(connection)
    assert (holdings.total, len(holdings), list(holdings.heaviest())) == (0, 0, [])


def test_what_a_connection_holds_follows_its_owner(make: Make) -> None:
    holdings, connection = Holdings(), make()
    holdings.set(connection, 5)
    connection.namespace = A
    holdings.set(connection, 7)
    holdings.set(make(), 6)
    assert holdings.total == 13
    assert list(holdings.heaviest()) == [connection]


def test_namespaces_take_turns_in_the_line_and_no_body_overtakes_within_one(make: Make) -> None:
    memory = SharedMemory(100)
    line = Line(memory)
    assert memory.take(A, 60)
    large, small, other = make(A, 40), make(A, 1), make(B, 45)
    for connection in (large, small, other):
        assert not line.take(connection, connection.namespace or A)
        assert line.join(connection, connection.namespace or A)
    assert not list(line.serve())
    memory.give_back(A, 20)
    assert list(line.serve()) == [other]
    memory.give_back(A, 40)
    memory.give_back(B, 45)
    assert list(line.serve()) == [large, small]


def test_a_body_in_steps_may_have_what_one_with_a_length_may_have(make: Make) -> None:
    memory = SharedMemory(100)
    line, connection = Line(memory), make(A, 25)
    for n_before in (0, 25, 50, 75):
        connection.reserved = (A, n_before) if n_before else None
        assert line.take(connection, A)


def test_a_namespace_may_have_so_many_in_the_line(make: Make) -> None:
    line = Line(SharedMemory(1))
    crowd = [make(A, 2) for _ in range(LINE_PER_NAMESPACE)]
    assert all(line.join(c, A) for c in crowd)
    assert not line.join(make(A, 2), A)
    assert line.join(make(B, 2), B)
    line.leave(crowd[0], A)
    assert line.join(make(A, 2), A)


def test_who_waits_for_a_thread_can_leave(make: Make) -> None:
    turns = Turns(ThreadPoolExecutor(1), 1)
    one, two = make(), make()
    assert turns.take()
    assert not turns.take()
    turns.join(one, one.namespace)
    turns.join(two, two.namespace)
    turns.leave(one)
    assert turns.pass_on() is two
    assert not turns.take()
    assert turns.pass_on() is None
    assert turns.take()


def test_who_waits_for_a_thread_waits_for_one_request_of_each_other_namespace(make: Make) -> None:
    turns = Turns(ThreadPoolExecutor(1), 1)
    assert turns.take()
    crowd = [make(A) for _ in range(20)]
    for connection in crowd:
        turns.join(connection, connection.namespace)
    strangers, honest = [make() for _ in range(20)], make(B)
    for connection in (*strangers, honest):
        turns.join(connection, connection.namespace)
    first_request = make()  # its connection has B's key
    turns.join(first_request, B)
    turns.leave(honest)
    turns.join(honest, B)
    crowd[1].namespace = B  # it was A's when it came
    turns.leave(crowd[1])
    assert [turns.pass_on() for _ in range(4)] == [crowd[0], strangers[0], first_request, crowd[2]]


@pytest.mark.parametrize(
    ("client", "address"),
    [
        (("192.0.2.1", 80), "192.0.2.1"),
        (("2001:db8:1:2:3:4:5:6", 80, 0, 0), "2001:db8:1:2::/64"),
        (("2001:db8:1:2::1", 80, 0, 0), "2001:db8:1:2::/64"),
        (("::ffff:192.0.2.1", 80, 0, 0), "192.0.2.1"),
        (("fe80::1%eth0", 80, 0, 2), "fe80::/64"),
        ("", ""),
    ],
)
def test_the_addresses_that_one_customer_has_are_one(client: object, address: str) -> None:
    assert address_of(client) == address


def test_a_part_of_an_answer_keeps_the_whole() -> None:
    assert whole_bytes(memoryview(bytes(100))[99:]) == 100


@pytest.fixture
def worker() -> Worker:
    made = Worker.__new__(Worker)  # gunicorn's arbiter makes whole ones
    made.bounds, made._deadlines, made.app = Bounds(answer_s=60.0, rate=2.0), Deadlines(), Mock()
    made._waiting, made._unread, made.poller = Holdings(), Holdings(), selectors.DefaultSelector()
    return made


def test_the_time_for_an_answer_does_not_begin_anew_with_each_part(make: Make, worker: Worker) -> None:
    turns: list[Connection] = []
    worker._take_turn = lambda _turns, connection: turns.append(connection)  # type: ignore[method-assign]
    worker._continuations = Turns(ThreadPoolExecutor(1), 1)
    connection = make(A)
    connection.out.left, connection.out.more = memoryview(bytes(100)), Mock()
    worker._leave_to_read(connection, connection.out.left)
    first_s = connection.deadline_s
    worker._write_on(connection)
    assert turns == [connection]
    connection.out.left = memoryview(bytes(100))
    worker._leave_to_read(connection, connection.out.left)
    assert connection.deadline_s == pytest.approx(first_s + 100 / 2.0, abs=5.0)
    assert worker._seconds_behind(first_s, connection) == pytest.approx(60.0 - 100 / 2.0, abs=5.0)
    worker.poller.close()


def test_a_worker_that_stops_gives_an_answer_that_has_begun_its_time(make: Make, worker: Worker) -> None:
    idle, begun = make(A), make(A)
    begun.out.more = Mock()
    for connection in (idle, begun):
        connection.deadline_s = 100.0
        worker._waiting.set(connection)
    worker._cap_keepalive(2.0)
    assert (idle.deadline_s, begun.deadline_s) == (2.0, 100.0)
    worker.app.ends.assert_called_once_with()  # no request is held any more


def test_code_that_no_action_names_outlasts_its_slowest_reader() -> None:
    settings = load(GatewaySettings, {"THAW_STATE_URL": "redis://x"})
    bounds = Bounds(answer_s=settings.answer_s, rate=settings.client_rate)
    assert bounds.answer_deadline_s(0.0, settings.action_bytes) < 0.8 * UNNAMED_TTL_S


def test_a_bug_costs_one_connection(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    worker = ConnectionWorker.__new__(ConnectionWorker)  # gunicorn's arbiter makes whole ones
    closed: list[Connection] = []
    worker.log, worker._close = logging.getLogger(), closed.append  # type: ignore[method-assign]

    def act(connection: Connection) -> None:
        raise RuntimeError("a bug")

    connection = make()
    worker._guard(connection, act)
    assert closed == [connection]
    assert "a bug" in caplog.text
