"""Streams that go from one gateway to another through a real state server."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import redis

from relay.protocol.messages import RunFinished, RunToken, StreamWanted, TokenLogprob
from relay.state import keys, redis_link, streams
from relay.state.bus import EventReader
from relay.state.streams import HandedOver, StreamHomes
from thaw.errors import Conflict
from thaw.ids import ActivationId, GatewayId
from thaw.logs import Log

STREAM = ActivationId("a" * 32)
ONE, TWO, THREE = (GatewayId(name) for name in ("one", "two", "three"))
TOKENS = (RunToken(0, 100, "ä "), RunToken(1, 101, "", TokenLogprob("b", -0.5, (("b", -0.5),))))
HANDED = HandedOver(TOKENS, None, 1500, 1)
KEPT_S = 360.0
Homes = Callable[[GatewayId], StreamHomes]
"""Makes the client of a gateway."""
Asked = Callable[[Callable[[StreamWanted], object]], None]
"""Calls a function for each stream that is requested."""


@pytest.fixture
def homes(valkey_url: str) -> Iterator[Homes]:
    with redis_link.connect(valkey_url) as client, redis_link.connect(valkey_url) as waiting:
        yield lambda gateway: StreamHomes(client, waiting, gateway)


@pytest.fixture
def asked(valkey_url: str) -> Iterator[Asked]:
    readers: list[EventReader] = []

    def listen(answer: Callable[[StreamWanted], object]) -> None:
        up = threading.Event()
        readers.append(EventReader(valkey_url, answer, up.set, Log("gateway")))
        readers[-1].start()
        assert up.wait(60)

    yield listen
    for reader in readers:
        reader.stop()
        reader.join(60)


def test_a_stream_is_noted_for_as_long_as_it_is_kept(homes: Homes, client: redis.Redis) -> None:
    assert homes(TWO).home(STREAM) is None
    homes(ONE).note(STREAM, 59.2)
    assert homes(TWO).home(STREAM) == ONE
    assert 0 < client.ttl(keys.stream(STREAM)) <= 60


def test_a_note_does_not_replace_what_another_gateway_has_claimed(homes: Homes) -> None:
    assert homes(ONE).note(STREAM, KEPT_S)
    assert homes(ONE).note(STREAM, KEPT_S)
    assert homes(TWO).claim(STREAM, ONE, KEPT_S)
    assert not homes(ONE).note(STREAM, KEPT_S)
    assert homes(THREE).home(STREAM) == TWO


def test_who_finds_too_many_waiting_claims_the_stream_at_once(
    homes: Homes, asked: Asked, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its gateway hears of it, and finds that the stream is no longer its own."""
    monkeypatch.setattr(streams, "_ASKING", 0)
    homes(ONE).note(STREAM, KEPT_S)
    late: queue.SimpleQueue[bool] = queue.SimpleQueue()
    asked(lambda wanted: late.put(homes(ONE).hand(wanted, HANDED, KEPT_S)))
    assert homes(TWO).take(STREAM, ONE, KEPT_S) is None
    assert not late.get(timeout=60)
    assert homes(THREE).home(STREAM) == TWO
    with pytest.raises(Conflict):
        homes(THREE).take(STREAM, ONE, KEPT_S)


def test_those_that_wait_for_gateways_take_no_connection_from_other_calls(valkey_url: str, asked: Asked) -> None:
    heard: queue.SimpleQueue[StreamWanted] = queue.SimpleQueue()
    asked(heard.put)
    pool = redis.BlockingConnectionPool.from_url(valkey_url, max_connections=1, timeout=streams._ASK_S - 0.5)
    calls, waiting = redis.Redis.from_pool(pool), redis_link.connect(valkey_url)
    assert waiting.connection_pool.max_connections > streams._ASKING
    homes = StreamHomes(calls, waiting, TWO)
    names = [ActivationId(f"{n:032x}") for n in range(streams._ASKING)]
    with calls, waiting, ThreadPoolExecutor(len(names)) as threads:
        for name in names:
            assert homes.claim(name, None, KEPT_S)
        taking = [threads.submit(homes.take, name, TWO, KEPT_S) for name in names]
        wanted = [heard.get(timeout=60) for _ in names]
        assert homes.note(STREAM, KEPT_S)
        for one in wanted:
            homes.refuse(one)
        assert [one.result(60) for one in taking] == [None] * len(names)


@pytest.mark.parametrize("end", [None, RunFinished("stop", 3, 2, "held back")])
def test_a_stream_is_handed_over_with_all_its_tokens(homes: Homes, asked: Asked, end: RunFinished | None) -> None:
    homes(ONE).note(STREAM, KEPT_S)
    handed = HandedOver(TOKENS, end, 1500, 1)
    asked(lambda wanted: homes(ONE).hand(wanted, handed, KEPT_S))
    assert homes(TWO).take(STREAM, ONE, KEPT_S) == handed
    assert homes(THREE).home(STREAM) == TWO


def test_a_gateway_that_does_not_have_the_stream_says_so(homes: Homes, asked: Asked) -> None:
    homes(ONE).note(STREAM, KEPT_S)
    asked(lambda wanted: homes(ONE).refuse(wanted))
    assert homes(TWO).take(STREAM, ONE, KEPT_S) is None
    assert homes(THREE).home(STREAM) == TWO


def test_a_gateway_that_answers_too_late_finds_that_it_has_lost_the_stream(
    homes: Homes, asked: Asked, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams, "_ASK_S", 0.05)
    homes(ONE).note(STREAM, KEPT_S)
    wanted: list[StreamWanted] = []
    heard = threading.Event()
    asked(lambda message: (wanted.append(message), heard.set()))
    assert homes(TWO).take(STREAM, ONE, KEPT_S) is None
    assert heard.wait(60)
    assert not homes(ONE).hand(wanted[0], HANDED, KEPT_S)
    assert homes(THREE).home(STREAM) == TWO


def test_a_stream_that_is_handed_over_at_the_last_moment_is_taken(
    homes: Homes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The wait is over, and before the note is replaced the other gateway replaces it."""
    monkeypatch.setattr(streams, "_ASK_S", 0.01)
    homes(ONE).note(STREAM, KEPT_S)
    taking = homes(TWO)
    claim = taking.claim

    def late(activation_id: ActivationId, home: GatewayId | None, kept_s: float) -> bool:
        assert homes(ONE).hand(StreamWanted(STREAM, ONE, TWO, answer_id), HANDED, KEPT_S)
        return claim(activation_id, home, kept_s)

    answer_id = "f" * 32
    monkeypatch.setattr(streams, "random_hex_id", lambda: answer_id)
    monkeypatch.setattr(taking, "claim", late)
    assert taking.take(STREAM, ONE, KEPT_S) == HANDED


def test_of_two_gateways_that_want_a_stream_at_once_one_gets_it(homes: Homes, asked: Asked) -> None:
    homes(ONE).note(STREAM, KEPT_S)
    given = threading.Event()

    def answer(wanted: StreamWanted) -> None:
        if given.is_set():
            homes(ONE).refuse(wanted)
        else:
            assert homes(ONE).hand(wanted, HANDED, KEPT_S)
            given.set()

    asked(answer)

    def take(gateway: GatewayId) -> HandedOver | str | None:
        try:
            return homes(gateway).take(STREAM, ONE, KEPT_S)
        except Conflict as e:
            return e.message

    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(take, (TWO, THREE)))
    assert HANDED in found
    assert "Another client goes on with this answer." in found


def test_a_stream_without_a_home_is_claimed_once(homes: Homes) -> None:
    assert homes(ONE).claim(STREAM, None, KEPT_S)
    assert not homes(TWO).claim(STREAM, None, KEPT_S)
    assert homes(TWO).claim(STREAM, ONE, KEPT_S)
    assert homes(TWO).home(STREAM) == TWO
