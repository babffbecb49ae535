"""The order of a dispatch's steps, tested without a gateway process."""

from __future__ import annotations

import socket
from typing import Any, cast

from gateway.serving.call import Call
from gateway.serving.dispatch import Dispatcher
from gateway.serving.routing.demand import Demand
from gateway.serving.routing.invoker_pool import InvokerPool, Reply
from gateway.serving.routing.versions import Versions
from gateway.serving.routing.waiting_room import WaitingRoom
from tests.gateway.calls import HELLO, action_of, call_of, instance_of
from thaw.errors import InstanceBusy
from thaw.logs import Log


class Noted:
    """Takes the place of the demand, the invokers and their replies."""

    run_keys = None  # its actions ask for none
    result_bytes = 1 << 20

    def __init__(self) -> None:
        self.done: list[str] = []
        self.refusals = 1

    def add(self, call: Call) -> None:
        call.announced_s = 0.0
        self.done.append("added")

    def withdraw(self, call: Call) -> None:
        if call.announced_s is not None:
            call.announced_s = None
            self.done.append("withdrawn")

    def post(self, *_: Any, **__: Any) -> Noted:
        self.done.append("sent")
        return self

    def read_head(self) -> None:
        if self.refusals:
            self.refusals -= 1
            self.done.append("refused")
            raise InstanceBusy("full")
        self.done.append("accepted")

    def abort(self) -> None: ...


def dispatcher_of(room: WaitingRoom, demand: Noted, pool: object) -> Dispatcher:
    versions = Versions(lambda _: action_of())
    return Dispatcher(room, cast(Demand, demand), cast(InvokerPool, pool), versions, Log("gateway"))


def test_a_slot_does_not_wait_for_the_state_server() -> None:
    """The request is sent before its demand is withdrawn.  If the invoker refuses it, it becomes demand again."""
    noted, room = Noted(), WaitingRoom()
    reached = dispatcher_of(room, noted, noted).reach(call_of("a"))
    assert next(reached) == "queued"
    room.instance_changed(instance_of())
    assert next(reached) is cast(Any, noted)
    assert next(reached) == "queued"
    room.retry(HELLO)
    assert next(reached) is cast(Any, noted)
    assert next(reached, None) is None
    once = ["added", "sent", "withdrawn"]
    assert noted.done == [*once, "refused", *once, "accepted"]


def test_an_invoker_that_could_not_be_reached_is_asked_again() -> None:
    """The invoker sends no further message about an idle instance, so a route that was dropped would never return."""
    noted, room, pool = Noted(), WaitingRoom(), InvokerPool("token")
    with socket.socket() as invoker:
        invoker.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{invoker.getsockname()[1]}"
        room.instance_changed(instance_of(address=address))
        call = call_of("a")
        call.received_s -= 110  # two minutes, so that the test ends soon if the call waits in vain
        reached = dispatcher_of(room, noted, pool).reach(call)
        assert next(reached) == "queued"
        invoker.listen()
        room.retry(HELLO)
        reply = next(reached)
        assert isinstance(reply, Reply)
        reached.close()
    pool.close()
