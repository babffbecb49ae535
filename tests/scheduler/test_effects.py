"""What decisions become in a real state server."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import redis

from gateway.scheduler.decisions import InspectModelOn, LearnFrom, StartGroup
from gateway.scheduler.effects import Arrival, Effects, load_history
from gateway.scheduler.history import History
from relay import redis_link
from relay.records import Records
from tests.relay.samples import PLAN
from thaw.ids import ActionName, ActivationId, CommandId, GroupId, HostId
from thaw.instance import StartMode
from thaw.logs import Log
from thaw.trace import Phase, TraceEvent

CHAT = ActionName("guest/chat")


@pytest.fixture
def client(valkey_url: str) -> Iterator[redis.Redis]:
    with redis_link.connect(valkey_url) as connected:
        yield connected


def test_what_a_start_took_is_kept_for_the_next_scheduler(client: redis.Redis) -> None:
    events = [TraceEvent(Phase.CONTAINER_BEGIN, boot_id="b"), TraceEvent(Phase.CONTAINER_END, boot_id="b",
                                                                         mono_ns=250_000_000)]  # fmt: skip
    Records(client).add_trace("g1", events)
    Effects(client, 1, Log("test")).learn(History(), LearnFrom(GroupId("g1"), CHAT, "cpu", StartMode.COLD))
    assert load_history(client, Log("test")).times(CHAT, "cpu", StartMode.COLD, 1).t_cc == pytest.approx(0.25)


def test_a_trace_that_cannot_be_read_teaches_nothing_and_stops_nothing(
    client: redis.Redis, capsys: pytest.CaptureFixture[str]
) -> None:
    client.rpush("thaw:trace:g1", b"{")
    Effects(client, 1, Log("test")).learn(History(), LearnFrom(GroupId("g1"), CHAT, "cpu", StartMode.COLD))
    assert client.hgetall("thaw:history") == {}
    assert '"event": "trace_refused"' in capsys.readouterr().err


def test_a_history_entry_of_another_version_is_passed_over(client: redis.Redis) -> None:
    client.hset("thaw:history", "guest/chat|cpu", b'{"times": 3}')
    assert load_history(client, Log("test")).times(CHAT, "cpu", StartMode.COLD, 1) == History().times(
        CHAT, "cpu", StartMode.COLD, 1
    )


def test_a_demand_that_waited_for_a_look_at_its_model_is_planned_from_when_it_came(client: redis.Redis) -> None:
    assert PLAN.model is not None
    effects = Effects(client, 1, Log("test"))
    came, looked, decided = (Arrival(mono_ns=n, wall_ns=n) for n in (100, 101, 5_000))
    effects.seen(ActivationId("a"), came)
    effects.apply(InspectModelOn(HostId("h"), PLAN.model.uri, CommandId("1")), looked)
    effects.apply(StartGroup(PLAN, (), (ActivationId("a"),), {}), decided)
    begin, end = Records(client).trace(PLAN.group_id)
    assert (begin.name, begin.mono_ns) == (Phase.PLANNED_BEGIN, 100)
    assert end.attrs["waited_for"] == "a look at the model's index"


def test_a_demand_that_is_planned_at_once_waited_for_nothing(client: redis.Redis) -> None:
    effects = Effects(client, 1, Log("test"))
    now = Arrival.now()
    effects.seen(ActivationId("a"), now)
    effects.apply(StartGroup(PLAN, (), (ActivationId("a"),), {}), now)
    assert "waited_for" not in Records(client).trace(PLAN.group_id)[1].attrs
