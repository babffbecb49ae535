"""An invoker that leaves its containers to the next one: what stays and what is ended.  tests/kubernetes/test_handover.py
has the functions and the stem cells."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from relay.state import keys
from tests.invoker.llm_host import LlmHost, fake_engine
from tests.invoker.platform import HOST
from thaw.errors import InstanceGone, Unavailable
from thaw.instance import InstanceState

__all__ = ["fake_engine"]

Begin = Callable[..., LlmHost]


@pytest.fixture
def begin(valkey_url: str, run_dir: Path, fake_engine: None) -> Iterator[Begin]:
    """Begins an invoker of the one host, each with a fetchd of its own, as the node pods of a rollout have them."""
    begun: list[LlmHost] = []

    def made(**settings: Any) -> LlmHost:
        host = LlmHost(valkey_url, run_dir, **{"handover_s": 60.0, **settings})
        host.start()
        begun.append(host)
        return host

    yield made
    assert begun[-1].processes() == []


def end_for_good(host: LlmHost) -> None:
    host.registry.drain_host(HOST, drain=True)
    host.stop()


def test_a_models_worker_stays_and_serves_beside_another_fetchd(begin: Begin) -> None:
    first = begin()
    record = first.ready_llm()
    pid = first.pid(record.instance_id)
    first.stop()
    second = begin()
    now = second.events.instance(record.instance_id, InstanceState.READY)
    assert (now.address, now.slots, now.reserve_bytes) == (second.agent.address, record.slots, record.reserve_bytes)
    assert second.pid(record.instance_id) == pid
    assert second.agent.fleet.ledger.holders()[record.instance_id] == record.reserve_bytes
    connection, response = second.open_run(record.instance_id)
    with second.feed(record.instance_id) as feed:
        feed.write("Paris\n")
    assert b"Paris" in response.read()
    connection.close()
    end_for_good(second)


def test_a_models_run_that_outlives_the_drain_is_cut_and_its_worker_stays(begin: Begin) -> None:
    first = begin(drain_s=0.1)
    record = first.ready_llm()
    pid = first.pid(record.instance_id)
    connection, _ = first.open_run(record.instance_id)
    first.stop()
    connection.close()  # as the end of the process does
    second = begin()
    now = second.events.instance(record.instance_id, InstanceState.READY)
    assert (now.inflight, second.pid(record.instance_id)) == (0, pid)
    end_for_good(second)


def test_the_stages_of_a_pipeline_are_ended(begin: Begin) -> None:
    first = begin()
    stages = first.ready_group()
    first.stop()
    assert first.processes() == []
    assert first.fetchd.open == set()
    second = begin()
    assert [second.registry.instance(s.instance_id) for s in stages] == [None, None]
    end_for_good(second)


def test_a_start_in_progress_is_ended(begin: Begin) -> None:
    first = begin()
    starting = first.launch_llm()
    first.agent.stop()
    first.gone(starting)
    first.close()
    assert first.processes() == []
    assert first.fetchd.open == set()


def test_what_the_scheduler_asked_meanwhile_is_carried_out_by_the_next_invoker(begin: Begin) -> None:
    first = begin()
    record = first.ready_llm()
    first.agent.stop()
    first.release(record.instance_id)
    first.close()
    second = begin()
    second.gone(record.instance_id)
    end_for_good(second)


def test_no_run_is_taken_once_the_host_is_being_handed_over(begin: Begin) -> None:
    host = begin()
    record = host.ready_llm()
    host.agent.fleet.take_no_runs()
    with pytest.raises(InstanceGone, match="take this host over"):
        host.agent.fleet.begin_run(record.instance_id)
    end_for_good(host)


def test_a_host_is_handed_over_while_the_state_server_is_away(begin: Begin, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether its operator has drained it cannot be asked then."""
    host = begin()
    assert host.agent._has_successor()

    def away(host_id: str) -> None:
        raise Unavailable("the state server does not answer")

    with monkeypatch.context() as patched:
        patched.setattr(host.agent._registry, "live_host", away)
        assert host.agent._has_successor()
    host.registry.drain_host(HOST, drain=True)
    assert not host.agent._has_successor()
    host.stop()


def test_a_hosts_lease_lasts_until_the_next_invoker_may_be_there(begin: Begin) -> None:
    host = begin(handover_s=300.0)
    host.ready_llm()
    host.agent.stop()
    left_ms = host.client.pttl(keys.host_lease(HOST))
    assert 200_000 < left_ms <= 300_000
    (report,) = host.registry.live_hosts()
    assert report.handing_over
    host.close()
    next_one = begin()
    assert next_one.client.pttl(keys.host_lease(HOST)) <= 10_000
    end_for_good(next_one)
