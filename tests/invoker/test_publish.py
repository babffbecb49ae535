"""Records of instances reach the state server, and those that somebody asks for once more do, too."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from invoker.containers.publish import Publisher
from tests.relay.samples import INSTANCE
from thaw.errors import Unavailable
from thaw.instance import InstanceRecord
from thaw.logs import Log

WAIT_S = 60.0


class Registry:
    def __init__(self) -> None:
        self.sent: list[InstanceRecord] = []
        self.sending, self.may_go_on = threading.Event(), threading.Event()
        self.fails = 0

    def put_instance(self, record: InstanceRecord) -> None:
        if self.fails:
            self.fails -= 1
            raise Unavailable("the state server is away")
        self.sent.append(record)
        self.sending.set()
        assert self.may_go_on.wait(WAIT_S)


@pytest.fixture
def registry() -> Registry:
    return Registry()


@pytest.fixture
def publisher(registry: Registry) -> Iterator[Publisher]:
    made = Publisher(registry, Log("test"))  # type: ignore[arg-type]
    yield made
    registry.may_go_on.set()
    made.close()


def test_a_record_that_says_nothing_new_is_not_sent(registry: Registry, publisher: Publisher) -> None:
    registry.may_go_on.set()
    for _ in range(3):
        publisher.put(INSTANCE)
        assert publisher.flush(WAIT_S)
    assert registry.sent == [INSTANCE]


def test_a_record_that_is_asked_for_while_it_is_being_sent_is_sent_again(
    registry: Registry, publisher: Publisher
) -> None:
    publisher.put(INSTANCE)
    assert registry.sending.wait(WAIT_S)
    publisher.say_again(INSTANCE)
    registry.may_go_on.set()
    assert publisher.flush(WAIT_S)
    assert registry.sent == [INSTANCE] * 2
    publisher.put(INSTANCE)
    assert publisher.flush(WAIT_S)
    assert len(registry.sent) == 2, "it was asked for once"


def test_a_record_that_is_asked_for_is_sent_when_the_state_server_is_back(
    registry: Registry, publisher: Publisher
) -> None:
    registry.may_go_on.set()
    publisher.put(INSTANCE)
    assert publisher.flush(WAIT_S)
    registry.fails = 1
    publisher.say_again(INSTANCE)
    assert publisher.flush(WAIT_S)
    assert registry.sent == [INSTANCE] * 2
