"""The errors that send a run elsewhere, whenever they come: instead of an answer, or after it has begun."""

from __future__ import annotations

import pytest

from gateway.serving.routing.elsewhere import Sign, sign_of
from gateway.serving.routing.invoker_pool import Unreachable
from tests.gateway.conftest import GatewayProcess, events_of, text_of
from tests.gateway.test_accepted import accept
from tests.gateway.test_embeddings import embed
from thaw.errors import (
    AdapterMissing,
    BadRequest,
    InstanceBusy,
    InstanceGone,
    PlatformError,
    ThawError,
    TimeLimitExceeded,
    WorkerLost,
)

ERRORS = (InstanceGone("the engine has died"), InstanceBusy("no room for it"), WorkerLost("the engine was killed"))
after_the_head = pytest.mark.parametrize("error", ERRORS, ids=lambda error: error.code)


@pytest.mark.parametrize(
    ("error", "sign"),
    [
        (InstanceGone(""), Sign.GONE),
        (InstanceBusy(""), Sign.BUSY),
        (AdapterMissing(""), Sign.BUSY),
        (Unreachable(""), Sign.BUSY),
        (WorkerLost(""), Sign.LOST),
        (TimeLimitExceeded(""), None),
        (BadRequest(""), None),
        (PlatformError(""), None),
        (KeyError(""), None),
        (None, None),
    ],
    ids=lambda value: type(value).__name__,
)
def test_each_error_says_whether_its_run_goes_on_elsewhere(error: BaseException | None, sign: Sign | None) -> None:
    assert sign_of(error) is sign


def fails_at_its_first_instance(gateway: GatewayProcess, error: ThawError) -> None:
    gateway.serve_llm(instance="i0", slots=1)
    gateway.invoker.failures.append(error)


def comes_elsewhere(gateway: GatewayProcess) -> None:
    gateway.invoker.entered.acquire(timeout=60)
    gateway.invoker.ready("guest/chat", instance="i1")


@after_the_head
def test_a_stream_that_its_instance_cannot_begin_goes_on_elsewhere(gateway: GatewayProcess, error: ThawError) -> None:
    fails_at_its_first_instance(gateway, error)
    with gateway.chat(stream=True, max_tokens=3) as reply:
        comes_elsewhere(gateway)
        events = list(events_of(reply.iter_lines()))
    assert text_of(events) == "w0 w1 w2 "
    assert len(gateway.invoker.runs) == 2


@after_the_head
def test_a_202_that_its_instance_cannot_begin_goes_on_elsewhere(gateway: GatewayProcess, error: ThawError) -> None:
    fails_at_its_first_instance(gateway, error)
    activation_id = accept(gateway, "chat", messages=[{"role": "user", "content": "hi"}], max_tokens=2)
    comes_elsewhere(gateway)
    record = gateway.ended(activation_id)
    assert record.result["choices"][0]["message"]["content"] == "w0 w1 "


@after_the_head
def test_texts_that_their_instance_cannot_embed_go_elsewhere(gateway: GatewayProcess, error: ThawError) -> None:
    fails_at_its_first_instance(gateway, error)
    reply = gateway.soon(embed, gateway, ["a", "b"])
    comes_elsewhere(gateway)
    assert len(reply.result(60).json()["data"]) == 2


def test_a_request_for_which_every_instance_is_too_busy_is_put_off_a_few_times_and_then_unavailable(
    gateway: GatewayProcess,
) -> None:
    gateway.serve_llm()
    gateway.invoker.failures.extend(InstanceBusy("this host is too busy") for _ in range(5))
    reply = gateway.chat(max_tokens=2)
    assert (reply.status_code, reply.json()["error"]["message"]) == (503, "this host is too busy")
    assert len(gateway.invoker.runs) == 4
    assert len(gateway.invoker.failures) == 1
