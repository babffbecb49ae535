"""The reports on an instance, and their order."""

from __future__ import annotations

import threading

from invoker.containers.fleet import Fleet
from invoker.containers.instance import Event
from invoker.containers.memory_ledger import Ledger
from relay.clients.fetch import FetchClient
from tests.invoker.platform import WAIT_S
from tests.invoker.test_cells import Containers, starting
from thaw.instance import InstanceRecord, InstanceState
from thaw.logs import Log


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


def test_an_instance_that_ends_while_it_is_announced_as_idle_is_announced_as_gone_last() -> None:
    publisher = Interrupted()
    fleet = Fleet(Containers(), FetchClient("/none"), publisher, Ledger(1), Log("test"))  # type: ignore[arg-type]
    live = starting("i", 1)
    assert fleet.add(live)
    live.apply(Event.UP)
    live.apply(Event.INIT_DONE)
    fleet.begin_run(live.record.instance_id)
    publisher.end = threading.Thread(target=fleet.kill, args=(live, None), daemon=True)
    fleet.end_run(live)
    assert live.gone.wait(WAIT_S)
    assert publisher.heard == [InstanceState.READY, InstanceState.READY, InstanceState.GONE]
