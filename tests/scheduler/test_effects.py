"""The effects of decisions in a real state server."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace

import pytest
import redis

from gateway.scheduler.decisions import (
    ConsolidateInstance,
    Forget,
    InspectModelOn,
    LearnFrom,
    RewritePlan,
    StageStart,
    StartGroup,
)
from gateway.scheduler.io.effects import Arrival, Effects, load_history
from gateway.scheduler.io.group_admission import RelayWork
from gateway.scheduler.io.group_credentials import GroupCredentials
from gateway.scheduler.placement.predict import f_factor
from gateway.scheduler.view.history import History, Learned
from gateway.scheduler.view.shortest_times import Least
from relay.protocol.messages import Command, Consolidate, ModelInspected
from relay.state import bus, keys, redis_link
from relay.state.clock import StateClock
from relay.state.records import Records
from relay.state.registry import Registry
from tests.relay.samples import GROUP, PLAN, record
from tests.scheduler.facts import CHAT, FACTS, demand
from tests.scheduler.starts import event, phase
from thaw import wire
from thaw.ids import ActivationId, CommandId, GroupId, HostId, InstanceId
from thaw.instance import StartMode
from thaw.logs import Log
from thaw.tracing.bound import Part, Source, Term
from thaw.tracing.trace import Phase, TraceEvent

STAGES = (StageStart(0, HostId("h"), InstanceId("i"), CommandId("c")),)


@pytest.fixture
def client(valkey_url: str) -> Iterator[redis.Redis]:
    with redis_link.connect(valkey_url) as connected:
        yield connected


def told(client: redis.Redis) -> Command:
    """The one command to the host."""
    ((_, fields),) = client.xrange(keys.commands(HostId("h")))
    command: Command = bus.unpack(fields[b"f"])
    return command


def has_run(client: redis.Redis, served: ActivationId, trace: list[TraceEvent]) -> None:
    """Let a request end with eleven tokens."""
    Records(client).add_trace(CHAT, served, trace)
    assert Records(client).end(replace(record(served), usage={"completion_tokens": 11}))


def effects_on(client: redis.Redis) -> Effects:
    return Effects(
        client, 1, Log("test"), RelayWork(GroupCredentials(client, ""), lambda item: None, Log("test")), StateClock()
    )


def test_what_a_start_took_is_kept_for_the_next_scheduler(client: redis.Redis) -> None:
    Records(client).add_trace(CHAT, "g1", phase("container", 0, 0.25))
    effects_on(client).learn(History(), LearnFrom(GroupId("g1"), CHAT, "cpu", StartMode.COLD))
    assert load_history(client, Log("test")).times(CHAT, "cpu", StartMode.COLD, 1).t_cc == pytest.approx(0.25)


def test_the_best_that_a_start_has_shown_is_kept_for_the_next_scheduler_until_the_function_is_deleted(
    client: redis.Redis,
) -> None:
    served = ActivationId("a" * 32)
    begun = [*phase("container", 0, 0.25, mode="cold"), *phase("engine", 1.0, 1.5), event(Phase.READY, 1.5)]
    Records(client).add_trace(CHAT, "g1", begun)
    prefill = [event(Phase.PREFILL_BEGIN, 2.0, prompt_tokens=60), event(Phase.PREFILL_END, 2.3)]
    has_run(client, served, [event(Phase.RECEIVED), *prefill, event(Phase.FIRST_TOKEN, 2.4), event(Phase.RUN_END, 3.0)])
    learn = LearnFrom(GroupId("g1"), CHAT, "cpu", StartMode.COLD, served=(served,), device_kinds=("cpu",))
    effects_on(client).learn(History(), learn)
    best = load_history(client, Log("test")).best
    assert best.part(Part.CONTAINER, "guest/other", "cpu", StartMode.COLD, 4) == Least(0.25, 1)
    assert best.part(Part.ENGINE, CHAT, "cpu", StartMode.COLD, 1) == Least(0.5, 1)
    assert list(best.prefills(CHAT, "cpu", 1)) == [(64, Least(pytest.approx(0.3), 1))]
    gone = tuple(str(key) for key in best.forget(CHAT))
    effects_on(client).apply(Forget((), (), gone), Arrival.now())
    assert load_history(client, Log("test")).best.actions() == set()


def test_an_entry_of_the_best_of_another_version_is_passed_over(client: redis.Redis) -> None:
    client.hset("thaw:best", mapping={"link|h0": b'{"value":1.0,"n_starts":1}', "link||||0|h0": b"{"})
    assert load_history(client, Log("test")).best.link("h0") is None


def test_what_was_learned_of_a_deleted_action_leaves_the_registry(client: redis.Redis) -> None:
    learned = {"guest/chat|cpu|cold": wire.dumps(Learned()), "guest/other|cpu|cold": wire.dumps(Learned())}
    client.hset("thaw:history", mapping=learned)
    registry = Registry(client)
    registry.put_model(FACTS)
    effects_on(client).apply(Forget(("guest/chat|cpu|cold",), ("s3://m/other",)), Arrival.now())
    assert (client.hkeys("thaw:history"), registry.models()) == ([b"guest/other|cpu|cold"], [FACTS])
    effects_on(client).apply(Forget((), (FACTS.uri,)), Arrival.now())
    assert registry.models() == []


def test_a_trace_that_cannot_be_read_teaches_nothing_and_stops_nothing(
    client: redis.Redis, capsys: pytest.CaptureFixture[str]
) -> None:
    client.rpush("thaw:trace:g1", b"{")
    effects_on(client).learn(History(), LearnFrom(GroupId("g1"), CHAT, "cpu", StartMode.COLD))
    assert client.hgetall("thaw:history") == {}
    assert '"event": "trace_refused"' in capsys.readouterr().err


def test_a_history_entry_of_another_version_is_passed_over(client: redis.Redis) -> None:
    client.hset("thaw:history", "guest/chat|cpu", b'{"times": 3}')
    times = load_history(client, Log("test")).times(CHAT, "cpu", StartMode.COLD, 1)
    assert times == History().times(CHAT, "cpu", StartMode.COLD, 1)


@pytest.mark.parametrize(("took_s", "explained_s"), [(0.24, 0.24), (0.01, 0.01), (3.0, 0.25), (None, 0.0)])
def test_a_wait_for_a_look_at_a_model_is_explained_by_as_long_as_its_host_looked(
    client: redis.Redis, took_s: float | None, explained_s: float
) -> None:
    effects = effects_on(client)
    came, asked, decided = (Arrival(mono_ns=n, wall_ns=n) for n in (100, 101, 250_000_100))
    effects.seen(ActivationId("a"), came)
    effects.apply(InspectModelOn(HostId("h"), PLAN.model.uri, CommandId("1")), asked)
    if took_s is not None:
        effects.looked(ModelInspected(PLAN.model.uri, HostId("h"), None, took_s=took_s))
    effects.apply(StartGroup(PLAN, (), (ActivationId("a"),), {}), decided)
    begin, end = Records(client).trace(PLAN.group_id)
    assert (begin.name, begin.mono_ns) == (Phase.PLANNED_BEGIN, 100)
    assert (end.attrs["wait_s"], end.attrs["waits_for"]) == (explained_s, "a look at the model's index")


def test_a_demand_that_is_planned_at_once_waited_for_nothing(client: redis.Redis) -> None:
    effects = effects_on(client)
    now = Arrival.now()
    effects.seen(ActivationId("a"), now)
    effects.apply(StartGroup(PLAN, (), (ActivationId("a"),), {}), now)
    assert "wait_s" not in Records(client).trace(PLAN.group_id)[1].attrs


def test_the_terms_stay_beside_the_planned_phase_when_the_plan_goes_with_its_group(client: redis.Redis) -> None:
    predicted = (Term(Part.CONTAINER, 0.2, Source.DEFAULT),)
    bound = (Term(Part.BYTES, 0.1, Source.MEASURED, n_bytes=9),)
    plan = replace(PLAN, predicted_terms=predicted, bound_terms=bound)
    effects_on(client).apply(StartGroup(plan, (), (), {}), Arrival.now())
    attrs = Records(client).trace(PLAN.group_id)[1].attrs
    assert attrs["predicted_terms"] == wire.to_plain(predicted)
    assert attrs["bound_terms"] == wire.to_plain(bound)


def test_a_host_is_told_once_which_adapters_the_requests_want_that_wait_for_a_start(client: redis.Redis) -> None:
    effects, now = effects_on(client), Arrival.now()
    wanted = {"a": "s3://m/x", "b": "s3://m/x", "c": "", "d": "s3://m/y", "gone": "s3://m/z"}
    for name, adapter in wanted.items():
        effects.seen(ActivationId(name), now, adapter)
    effects.gone(ActivationId("gone"))
    effects.apply(StartGroup(PLAN, STAGES, tuple(map(ActivationId, wanted)), {}), now)
    assert told(client).body.adapters == ("s3://m/x", "s3://m/y")


def test_after_a_rebuild_the_demand_that_is_there_says_which_adapters_are_wanted(client: redis.Redis) -> None:
    effects, now = effects_on(client), Arrival.now()
    effects.seen(ActivationId("missed its end"), now, "s3://m/x")
    effects.reloaded([demand("a", PLAN.action, adapter="s3://m/y")])
    names = (ActivationId("missed its end"), ActivationId("a"))
    effects.apply(StartGroup(PLAN, STAGES, names, {}), now)
    assert told(client).body.adapters == ("s3://m/y",)


def test_a_host_is_told_which_instance_is_to_become_one_worker(client: redis.Redis) -> None:
    ask = ConsolidateInstance(HostId("h"), InstanceId("i"), GROUP, CommandId("c"))
    effects_on(client).apply(ask, Arrival.now())
    command = told(client)
    assert (command.command_id, command.epoch, command.body) == ("c", 1, Consolidate(InstanceId("i"), GROUP))


def test_a_plan_that_is_rewritten_keeps_the_time_at_which_it_was_decided(client: redis.Redis) -> None:
    registry = Registry(client)
    registry.put_plan(replace(PLAN, created_wall_ns=12_345))
    effects_on(client).apply(RewritePlan(replace(PLAN, keep=1, created_wall_ns=0)), Arrival.now())
    assert registry.plan(GROUP) == replace(PLAN, keep=1, created_wall_ns=12_345)
    client.hset(keys.PLANS, GROUP, b"{")
    effects_on(client).apply(RewritePlan(PLAN), Arrival.now())
    assert registry.plan(GROUP).created_wall_ns > 12_345


@pytest.mark.parametrize(
    ("switched_s", "knows"),
    [(4.0, (False, False)), (6.5, (True, False)), (8.0, (True, True))],
    ids=["before the prompt", "among the tokens", "after the answer"],
)
def test_what_one_worker_did_teaches_nothing_about_the_pipeline_that_it_was(
    client: redis.Redis, switched_s: float, knows: tuple[bool, bool]
) -> None:
    group, served, history = GroupId("g5"), ActivationId("c" * 32), History()
    Records(client).add_trace(CHAT, group, [event(Phase.CONSOLIDATE_END, switched_s)])
    has_run(client, served, [*phase("prefill", 5.0, 5.99), event(Phase.RUN_END, 7.0)])
    learn = LearnFrom(group, CHAT, "cpu", StartMode.COLD, n_stages=4, factor=f_factor(4, 1), served=(served,))
    effects_on(client).learn(history, learn)
    kept = load_history(client, Log("test")).learned(CHAT, "cpu", StartMode.COLD)
    plain = History().learned(CHAT, "cpu", StartMode.COLD)
    assert (kept.times.t_p != plain.times.t_p, kept.times.t_d != plain.times.t_d) == knows


def test_a_group_teaches_its_pass_and_how_good_its_prediction_was_for_the_next_scheduler(
    client: redis.Redis, capsys: pytest.CaptureFixture[str]
) -> None:
    group, served = GroupId("g4"), ActivationId("a" * 32)
    history = History()
    Records(client).add_trace(CHAT, group, [event(Phase.PLANNED_END, 0, predicted_ttft_s=4.0, bound_ttft_s=3.5)])
    learn = LearnFrom(
        group, CHAT, "cpu", StartMode.PREWARMED, n_stages=4, n_full=1, factor=f_factor(4, 1), served=(served,)
    )
    later = effects_on(client).learn(history, learn)
    assert later.attempt == 1, "its request has not ended"
    run = [event(Phase.RECEIVED, 1.0), *phase("prefill", 5.0, 5.99)]
    has_run(client, served, [*run, event(Phase.FIRST_TOKEN, 6.0), event(Phase.RUN_END, 7.0)])
    assert effects_on(client).learn(history, later) is None
    kept = load_history(client, Log("test")).learned(CHAT, "cpu", StartMode.PREWARMED)
    factor = 4 - 1 + 1 / 4
    assert kept.times.t_p == pytest.approx((0.99 - 4 * 0.005) / factor)
    assert kept.times.t_d == pytest.approx((0.101 - 4 * 0.005) / factor)
    assert kept.ttft_ratio == pytest.approx(1.25)
    told = next(json.loads(line) for line in capsys.readouterr().err.splitlines() if "ttft_foretold" in line)
    assert (told["predicted_s"], told["bound_s"], told["actual_s"], told["stages"]) == (4.0, 3.5, 5.0, 4)


@pytest.mark.parametrize("again", [Phase.DISPATCHED, Phase.MOVE_BEGIN])
def test_a_stream_that_was_continued_by_a_group_or_was_to_be_tells_nothing_of_the_groups_start(
    client: redis.Redis, capsys: pytest.CaptureFixture[str], again: Phase
) -> None:
    """The request's first token came after 0.08 s from an earlier group, and not from this group's start."""
    group, served = GroupId("g5"), ActivationId("b" * 32)
    history = History()
    Records(client).add_trace(CHAT, group, [event(Phase.PLANNED_END, 20, predicted_ttft_s=4.0, bound_ttft_s=3.5)])
    former = [event(Phase.RECEIVED, 10.0), event(Phase.DISPATCHED, 10.01), event(Phase.FIRST_TOKEN, 10.08)]
    later = [event(again, 25.0), *phase("prefill", 25.0, 25.1), event(Phase.RUN_END, 27.0)]
    has_run(client, served, former + later)
    learn = LearnFrom(group, CHAT, "cpu", StartMode.PREWARMED, n_stages=4, n_full=1, served=(served,))
    assert effects_on(client).learn(history, learn) is None
    assert "ttft_foretold" not in capsys.readouterr().err
    assert not history.learned(CHAT, "cpu", StartMode.PREWARMED).ttft_ratio
