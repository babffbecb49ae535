"""Which records outlive a state server that is away for long."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import pytest

from gateway import recorder
from gateway.calls import Call
from gateway.hangup import Hangup
from gateway.link import InvokerPool
from gateway.recorder import Recorder
from gateway.runs import Outcome
from relay.records import Ended, Records, Subject
from thaw.action import KIND_PYTHON, Action, Exec, Limits
from thaw.activation import ActivationStatus
from thaw.errors import Unavailable
from thaw.ids import ActionName, ActivationId, Namespace
from thaw.logs import Log


class Away:
    """A state server that answers again when everybody has given up once."""

    def __init__(self) -> None:
        self.failures = 2
        self.written: list[str] = []

    def end_all(self, ended: Sequence[Ended]) -> list[bool]:
        if self.failures:
            self.failures -= 1
            raise Unavailable("away")
        self.written += [one.record.activation_id for one in ended]
        return [True for _ in ended]


def test_the_record_of_a_202_is_never_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder, "_KEPT_S", -1.0)
    monkeypatch.setattr(recorder, "_RETRY_S", 0.0)
    monkeypatch.setattr(recorder, "_BATCH", 1)
    records = Away()
    writing = Recorder(cast(Records, records), InvokerPool("token"), Log("gateway"))
    action = Action(ActionName("guest/hello"), Namespace("guest"), "0.0.1", Exec(KIND_PYTHON), Limits())
    for name, entry in (("accepted", b"1-0"), ("held", None)):
        call = Call(ActivationId(name), action, Subject(Namespace("guest"), "x"), {}, Hangup())
        writing.submit(call, Outcome(ActivationStatus.SUCCESS, {}), entry)
    writing.start()
    writing.settle(10.0)
    writing.stop(1.0)
    assert records.written == ["accepted"]
