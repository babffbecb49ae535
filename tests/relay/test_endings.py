"""Ended calls in their order: losses are always counted, and one connection listens for all followers."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import pytest
import redis

from relay.state import endings, keys, redis_link
from relay.state.endings import Cursor, EndingsListener, cursor_of, endings_after
from relay.state.records import Ended, Records
from relay.state.storage import Storage
from tests.relay.samples import record
from thaw.errors import BadRequest, Unavailable
from thaw.ids import ActionName, ActivationId, Namespace
from thaw.logs import Log
from thaw.quotas import Quotas

GUEST, OTHER = Namespace("guest"), Namespace("other")


def end(client: redis.Redis, *numbers: int, namespace: Namespace = GUEST, start_ms: int = 1) -> None:
    some = [replace(record(ActivationId(f"{n:032x}")), namespace=namespace, start_ms=start_ms) for n in numbers]
    Records(client).end_all([Ended(one) for one in some])


def numbers(found: endings.Endings) -> list[int]:
    return [int(one.activation_id, 16) for one in found.found]


def test_calls_are_told_in_the_order_in_which_they_ended_whenever_they_began(client: redis.Redis) -> None:
    end(client, 1)
    now = endings_after(client, GUEST, None)
    assert numbers(now) == []
    end(client, 2, 3, start_ms=1_000)
    end(client, 4, start_ms=1)
    end(client, 9, namespace=OTHER)
    found = endings_after(client, GUEST, now.cursor)
    assert (numbers(found), found.n_missed, found.has_more) == ([2, 3, 4], 0, False)
    assert numbers(endings_after(client, GUEST, found.found[0].cursor)) == [3, 4]
    assert numbers(endings_after(client, GUEST, cursor_of(str(found.cursor)))) == []
    names = ("chat", "guest/chat", "other/chat", "cha", "")
    assert [found.found[0].is_named(name, GUEST) for name in names] == [True, True, False, False, False]


def test_whoever_is_too_slow_is_told_how_many_were_passed_over(
    client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(endings, "KEPT", 100)
    monkeypatch.setattr(endings, "_PAGE", 300)
    cursor = endings_after(client, GUEST, None).cursor
    for first in range(0, 1_000, 100):
        end(client, *range(first, first + 100))
    seen, n_missed = [], 0
    while (found := endings_after(client, GUEST, cursor)).found:
        seen += numbers(found)
        n_missed += found.n_missed
        cursor = found.cursor
    assert n_missed > 0
    assert seen == list(range(n_missed, 1_000)), "all others, each once"
    assert endings_after(client, GUEST, cursor).n_missed == 0


def test_a_state_server_that_counts_anew_makes_nobody_wait_for_its_old_number(client: redis.Redis) -> None:
    end(client, *range(5))
    cursor = endings_after(client, GUEST, None).cursor
    assert cursor.n == 5
    client.delete(keys.endings(GUEST))
    assert numbers(endings_after(client, GUEST, cursor)) == []
    end(client, 7)
    found = endings_after(client, GUEST, cursor)
    assert (numbers(found), found.n_missed, found.cursor.n) == ([7], 0, 1)


@pytest.mark.parametrize("text", ["", "x", "1-1", "1-1.x", "1-1.1\n", f"{'9' * 30}-1.1"])
def test_a_cursor_that_nobody_gave_is_refused(text: str) -> None:
    with pytest.raises(BadRequest):
        cursor_of(text)


@contextmanager
def listening(url: str, client: redis.Redis) -> Iterator[EndingsListener]:
    listener = EndingsListener(client, url, Log("test"))
    listener.start()
    try:
        yield listener
    finally:
        listener.stop()
        client.publish(listener._own, b"")  # this wakes it
        listener._thread.join(20)


def rung(bell: Any, write: Callable[[], None]) -> bool:
    """Return whether the bell rings for the record that ``write`` writes."""
    event = threading.Event()
    bell.listen(event, time.monotonic())
    write()
    return event.wait(20)


def confirmed(bell: Any, client: redis.Redis) -> None:
    """Wait until the listener has read the confirmation of its subscription, which rings the bell, too.  It comes
    before the records.
    """
    for n in (1, 2):
        assert rung(bell, lambda n=n: end(client, n))  # type: ignore[misc]


def subscribed(client: redis.Redis, *namespaces: Namespace) -> None:
    tick, until_s = threading.Event(), time.monotonic() + 20
    while not all(n for _, n in client.pubsub_numsub(*map(keys.ended, namespaces))) and time.monotonic() < until_s:
        tick.wait(0.01)


def test_one_connection_listens_for_all_and_each_hears_what_it_waits_for(client: redis.Redis, valkey_url: str) -> None:
    with listening(valkey_url, redis_link.connect(valkey_url)) as listener, ExitStack() as held:
        all_of_it = held.enter_context(listener.listening(GUEST))
        one = held.enter_context(listener.listening(GUEST, ActivationId(f"{5:032x}")))
        others = held.enter_context(listener.listening(OTHER))
        for _ in range(8):
            held.enter_context(listener.listening(GUEST))
        subscribed(client, GUEST, OTHER)
        assert len([c for c in client.client_list() if c["sub"] != "0"]) == 1
        confirmed(all_of_it, client)
        quiet = threading.Event()
        one.listen(quiet, time.monotonic())
        assert rung(all_of_it, lambda: end(client, 4))
        assert rung(others, lambda: end(client, 5, namespace=OTHER))
        assert not quiet.is_set(), "neither another call's record nor that of another namespace is the one"
        assert rung(one, lambda: end(client, 5, 6))
    assert listener._wanted == {}


def test_who_listens_is_woken_when_the_connection_is_there_again(client: redis.Redis, valkey_url: str) -> None:
    with listening(valkey_url, redis_link.connect(valkey_url)) as listener, listener.listening(GUEST) as bell:
        subscribed(client, GUEST)
        confirmed(bell, client)

        def cut() -> None:
            for one in client.client_list():
                if one["sub"] != "0":
                    client.client_kill_filter(_id=one["id"])

        assert rung(bell, cut), "something may have been written meanwhile"
        subscribed(client, GUEST)
        assert rung(bell, lambda: end(client, 3))


def test_a_state_server_that_is_silent_holds_no_request_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redis_link, "CALL_TIMEOUT_S", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"redis://127.0.0.1:{silent.getsockname()[1]}/0"
        listener = EndingsListener(redis_link.connect(url, timeout_s=0.1, n_retries=0), url, Log("test"))
        listener.start()
        with pytest.raises(Unavailable), listener.listening(GUEST):
            pass
        assert listener._wanted == {}
        listener.stop()
        listener._thread.join(20)


def test_names_are_those_of_lists(client: redis.Redis, records: Records) -> None:
    now = endings_after(client, GUEST, None).cursor
    bound = replace(record(ActivationId("a" * 32)), action=ActionName("guest/tools/f"), binding="other/mine")
    records.end_all([Ended(bound)])
    (found,) = endings_after(client, GUEST, now).found
    named = ("guest/tools/f", "tools/f", "other/mine/f", "mine/f")
    assert all(found.is_named(name, GUEST) for name in named)
    assert not any(found.is_named(name, GUEST) for name in ("other/tools/f", "f", "guest/f", "tools/f "))
    assert str(Cursor("1-2", 3)) == "1-2.3"


def test_the_longest_names_take_no_more_memory_than_short_ones(client: redis.Redis, records: Records) -> None:
    long = chr(0x20000) * 256  # letters of four bytes
    some = [
        replace(record(ActivationId(f"{n:032x}")), action=ActionName(f"guest/{long}/{long}"), binding=f"other/{long}")
        for n in range(1_000)
    ]
    records.end_all([Ended(one) for one in some])
    assert client.memory_usage(keys.endings(GUEST), samples=0) < 160 * len(some)


def test_a_record_that_was_too_long_is_told_when_it_is_written_with_less(client: redis.Redis) -> None:
    now = endings_after(client, GUEST, None).cursor
    own = Quotas(10, 10**9, 8_000, 10, 10, 10)
    records = Records(client, storage=Storage(client, lambda _: own))
    long = replace(record(ActivationId(f"{1:032x}")), result={"text": "x" * 9_000})
    records.end_all([Ended(long)])
    assert records.activation(long.activation_id) is not None
    found = endings_after(client, GUEST, now)
    assert (numbers(found), found.cursor.n - now.n) == ([1], 1)
