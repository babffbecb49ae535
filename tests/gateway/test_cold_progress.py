"""The progress of a start that a client gets, computed from the hosts' reports."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from gateway.serving.routing.cold_progress import ColdProgress, Group, sentence
from gateway.serving.routing.waiting_room import Ticket, WaitingRoom
from tests.gateway.calls import CHAT, instance_of
from thaw.host import FetchReport
from thaw.ids import ActivationId, GroupId, HostId
from thaw.instance import InstanceRecord, InstanceState

NAME = "a" * 32


class Registry:
    """A host that has fetched 43 % of the group's bytes."""

    def live_host(self, _host: HostId) -> SimpleNamespace:
        return SimpleNamespace(fetches=[FetchReport(NAME, 1000, 430, 0.0, 0)])

    def plan(self, _group: GroupId) -> None:
        return None


def instance(state: InstanceState) -> InstanceRecord:
    return instance_of(group=NAME, action=CHAT, state=state)


def fetch(done: int, n: int = 1000, rate: float = 100.0, stage: int = 0) -> FetchReport:
    return FetchReport(NAME, n, done, rate, stage)


def group(due_s: float | None = None) -> Group:
    return Group(CHAT, since_s=0.0, due_s=due_s)


@pytest.mark.parametrize(
    ("due_s", "fetches", "said"),
    [
        (10.0, [fetch(430)], "fetching 43 % eta 9.0 s"),  # the prediction includes what follows the fetch
        (2.0, [fetch(430)], "fetching 43 % eta 5.7 s"),  # the prediction is too good
        (None, [fetch(430)], "fetching 43 % eta 5.7 s"),
        (None, [fetch(0, rate=0.0)], "fetching 0 %"),
        (None, [fetch(1000), fetch(500, stage=1)], "fetching 75 % eta 5.0 s"),
        (10.0, [fetch(1000)], "loading eta 9.0 s"),
        (0.5, [fetch(1000)], "loading"),
        (10.0, [], None),  # no host has reported of it yet
    ],
)
def test_the_phase_is_said_with_its_numbers(due_s: float | None, fetches: list[FetchReport], said: str | None) -> None:
    assert sentence(group(due_s), fetches, 1.0) == said


def test_a_client_that_joins_a_start_late_reads_its_last_sentence_until_the_start_is_over() -> None:
    room = WaitingRoom()
    progress = ColdProgress(room, Registry())  # type: ignore[arg-type]
    first, second, third = (Ticket(ActivationId(str(i)), CHAT, "0.0.1") for i in range(3))
    progress.instance_changed(instance(InstanceState.STARTING))
    room.enter(first)
    progress._look(progress._groups)
    progress._look(progress._groups)
    assert list(first.notices) == ["fetching 43 %"]
    room.enter(second)
    assert list(second.notices) == ["fetching 43 %"]
    progress.instance_changed(instance(InstanceState.GONE))
    room.enter(third)
    assert list(third.notices) == []


def test_a_fetch_that_is_over_or_was_not_needed_leaves_the_load() -> None:
    fetched = group(due_s=9.0)
    assert sentence(fetched, [fetch(999)], 1.0) == "fetching 99 % eta 8.0 s"
    assert sentence(fetched, [], 1.5) == "loading eta 7.5 s"
    assert sentence(group(due_s=9.0), [], 2.5) == "loading eta 6.5 s"
