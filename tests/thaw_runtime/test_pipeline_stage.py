"""Everything for which stage 0 waits comes, or fails together with the pipeline."""

from __future__ import annotations

import pytest

from thaw.errors import ErrorInfo, ProtocolError, WorkerLost
from thaw_runtime.engine.vllm.stage import Pending
from thaw_runtime.pipeline.wire import Sampled, Step

STEP = Step(6, (), (), {"a": 1, "b": 1}, ())
GOOD = Sampled(6, ("a", "b"), ((5,), ()))


def test_tokens_come_to_who_waits_for_them_once() -> None:
    pending = Pending()
    waiting = pending.open(STEP)
    pending.fulfil(GOOD, 100)
    assert waiting.result(0) == GOOD
    with pytest.raises(ProtocolError):
        pending.fulfil(GOOD, 100)


@pytest.mark.parametrize(
    "sampled",
    [
        Sampled(6, ("a", "b"), ((100,), ())),
        Sampled(6, ("a",), ((5,),)),
        Sampled(6, ("a", "c"), ((5,), ())),
        Sampled(7, ("a", "b"), ((5,), ())),
    ],
)
def test_who_waits_for_tokens_that_do_not_fit_is_failed_with_the_pipeline(sampled: Sampled) -> None:
    pending = Pending()
    waiting = pending.open(STEP)
    with pytest.raises(ProtocolError):
        pending.fulfil(sampled, 100)
    pending.fail(ErrorInfo("ProtocolError", "stage 1 sent damage"))
    with pytest.raises(WorkerLost, match="damage"):
        waiting.result(0)
