"""The reports on an instance, and their order."""

from __future__ import annotations

import threading

import pytest

from invoker.containers.fleet import Fleet
from invoker.containers.instance import Effect, Event
from invoker.containers.live import Live, Run
from invoker.containers.memory_ledger import Ledger
from tests.invoker.platform import WAIT_S
from tests.invoker.test_cells import Containers, fleet_of, idle
from thaw.errors import InstanceBusy
from thaw.instance import InstanceRecord, InstanceState


class Interrupted:
    """A registry in which an instance ends while it is being reported as idle."""

    def __init__(self) -> None:
        self.heard: list[InstanceState] = []
        self.end = threading.Thread()

    def put(self, record: InstanceRecord, *, flip: bool = False) -> None:
        if record.idle_since_wall_ms is not None:
            self.end.start()
            self.end.join(0.1)  # the other thread may have to wait for this one
        self.heard.append(record.state)


class Noted:
    """A publisher that notes the records that it is given."""

    def __init__(self) -> None:
        self.heard: list[tuple[InstanceState, int]] = []

    def put(self, record: InstanceRecord, *, flip: bool = False) -> None:
        self.heard.append((record.state, record.inflight))


def busy(fleet: Fleet, n_runs: int) -> tuple[Live, list[Run]]:
    live = idle(fleet, "i", 1, slots=n_runs)
    return live, [fleet.begin_run(live.record.instance_id) for _ in range(n_runs)]


@pytest.fixture
def publisher() -> Noted:
    return Noted()


@pytest.fixture
def fleet(publisher: Noted) -> Fleet:
    return fleet_of(Containers(), Ledger(1), publisher)


def test_whoever_waits_for_a_drain_hears_of_every_run_that_ends(fleet: Fleet, publisher: Noted) -> None:
    live, runs = busy(fleet, 3)
    fleet.release(live.record.instance_id, only_idle=False, drain_s=WAIT_S)
    publisher.heard.clear()
    for run in runs:
        fleet.end_run(run)
    assert live.gone.wait(WAIT_S)
    drains = InstanceState.DRAINING
    assert publisher.heard[:2] == [(drains, 2), (drains, 1)]
    assert publisher.heard[-1][0] is InstanceState.GONE


def test_a_slot_is_free_before_its_run_has_ended_and_a_drain_waits_for_the_end(fleet: Fleet) -> None:
    live, (first,) = busy(fleet, 1)
    with pytest.raises(InstanceBusy):
        fleet.begin_run(live.record.instance_id)
    fleet.free_slot(first)
    second = fleet.begin_run(live.record.instance_id)
    fleet.end_run(first)  # frees no slot of another
    with pytest.raises(InstanceBusy):
        fleet.begin_run(live.record.instance_id)
    fleet.release(live.record.instance_id, only_idle=False, drain_s=WAIT_S)
    fleet.free_slot(second)
    assert not live.idle.is_set()
    fleet.end_run(second)
    assert live.gone.wait(WAIT_S)


def test_the_deadline_of_a_drain_that_was_taken_back_does_not_end_a_later_one(fleet: Fleet) -> None:
    live, _ = busy(fleet, 1)
    deadlines: list[threading.Thread] = []
    fleet._in_background = lambda run: deadlines.append(threading.Thread(target=run))  # type: ignore[method-assign]
    fleet.release(live.record.instance_id, only_idle=False, drain_s=0.0)
    fleet.undrain(live.record.instance_id)
    assert live.record.state is InstanceState.READY
    fleet.release(live.record.instance_id, only_idle=False, drain_s=0.0)
    first, second = deadlines
    first.start()
    first.join(WAIT_S)
    assert live.record.state is InstanceState.DRAINING
    assert not live.gone.is_set()
    second.start()
    second.join(WAIT_S)
    assert live.gone.is_set()


def test_an_instance_that_is_killed_is_not_taken_back_in_between(fleet: Fleet) -> None:
    live, _ = busy(fleet, 1)
    apply, undrains = live.apply, list[threading.Thread]()

    def interrupted(event: Event) -> Effect:
        effect = apply(event)
        if event is Event.DRAIN:
            undrains.append(threading.Thread(target=fleet.undrain, args=(live.record.instance_id,), daemon=True))
            undrains[0].start()
            undrains[0].join(0.2)  # it has to wait for the lock, or it would have undone the drain by now
        return effect

    live.apply = interrupted  # type: ignore[method-assign]
    fleet.kill(live, None)
    undrains[0].join(WAIT_S)
    assert live.record.state is InstanceState.GONE


def test_an_instance_that_ends_while_it_is_announced_as_idle_is_announced_as_gone_last() -> None:
    publisher = Interrupted()
    fleet = fleet_of(Containers(), Ledger(1), publisher)
    live, (run,) = busy(fleet, 1)
    publisher.end = threading.Thread(target=fleet.kill, args=(live, None), daemon=True)
    fleet.end_run(run)
    assert live.gone.wait(WAIT_S)
    assert publisher.heard == [InstanceState.READY, InstanceState.READY, InstanceState.GONE]
