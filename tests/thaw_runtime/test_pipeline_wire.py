"""Step messages arrive as they were sent, and no message that does not fit reaches a model."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from relay.protocol import tensors
from relay.protocol.tensors import TensorHeader
from thaw.errors import ErrorInfo, ProtocolError
from thaw.tracing.hops import HopPath
from thaw_runtime.engine.protocol import EngineRequest, Grammar, GrammarKind, Sampling
from thaw_runtime.pipeline.wire import (
    Batch,
    Beat,
    Bounds,
    HostTensor,
    KnownSequence,
    Lost,
    NewSequence,
    Parted,
    PathTaken,
    Sampled,
    SampledLogprobs,
    Step,
    check_batch,
    decode_batch,
    decode_control,
    encode_batch,
    encode_control,
)

BOUNDS = Bounds(n_blocks=10, block_size=4, max_tokens=16, max_requests=3, max_model_len=12, vocab_size=100)
WANTED = {"hidden_states": ("F32", 2), "residual": ("F32", 2)}
KNOWN = {"old": 2}
GRAMMAR = Grammar(GrammarKind.JSON, "{}", "response_format")
SAMPLING = Sampling(9, 0.5, 0.9, 40, 0.1, 1.0, 0.5, 1.1, (3, 4), 2, 5, {7: -1.5}, GRAMMAR)
MASK = bytes(4 * 4)  # the mask of 100 tokens
NEW = NewSequence(EngineRequest("new", (1, 2, 3), SAMPLING, 42, 1, (4,)), ((3,),), 0)
OLD = KnownSequence("old", False, (17,), ((5,),), 8, 3)
STEP = Step(6, (NEW,), (OLD,), {"new": 4, "old": 1}, ("gone",), ((1, 2),), masks={"old": MASK})


def hidden(n_tokens: int, width: int = 2) -> HostTensor:
    return HostTensor("F32", (n_tokens, width), memoryview(bytes(range(4 * n_tokens * width))))


def batch(step: Step = STEP, **change: Any) -> Batch:
    return Batch(msgspec.structs.replace(step, **change), {"hidden_states": hidden(5), "residual": hidden(5)})


def test_a_batch_is_heard_as_it_was_said() -> None:
    got = decode_batch(memoryview(encode_batch(batch())))
    assert got.step == STEP
    assert {name: (t.dtype, t.shape, bytes(t.data)) for name, t in got.tensors.items()} == {
        name: ("F32", (5, 2), bytes(range(40))) for name in WANTED
    }
    check_batch(got, BOUNDS, KNOWN, WANTED)


def test_a_batch_cut_anywhere_is_refused() -> None:
    payload = encode_batch(batch())
    for end in range(len(payload)):
        with pytest.raises(ProtocolError):
            decode_batch(memoryview(payload)[:end])


def test_a_batch_without_a_step_or_with_another_thing_in_its_place_is_refused() -> None:
    for headers, body in (
        ([TensorHeader("hidden_states", "U8", (1,))], b"x"),
        ([TensorHeader("step", "I8", (1,))], b"x"),
        ([TensorHeader("step", "U8", (4,))], b"\x80\x04K."),
        ([TensorHeader("step", "U8", (2,))], b"\x91\xa1"),
    ):
        with pytest.raises(ProtocolError, match="step"):
            decode_batch(memoryview(tensors.pack(headers) + body))


def test_control_messages_are_heard_as_they_were_said() -> None:
    logprobs = SampledLogprobs(((5, 6), (7, 8)), ((-0.5, -1.0), (-0.25, -2.0)), (1, 1))
    for message in (
        Sampled(3, ("a", "b"), ((5,), ())),
        Sampled(4, ("a", "b"), ((5,), (7,)), logprobs),
        Beat(9),
        Lost(2, ErrorInfo("WorkerLost", "gone", "look")),
        PathTaken(3, HopPath.TCP),
        Parted((5, 6), (-0.5, -1.25)),
    ):
        payload = encode_control(message)
        assert decode_control(memoryview(payload)) == message
        for end in range(len(payload)):
            with pytest.raises(ProtocolError):
                decode_control(memoryview(payload)[:end])


def new(**change: Any) -> tuple[NewSequence, ...]:
    return (msgspec.structs.replace(NEW, **change),)


def old(**change: Any) -> tuple[KnownSequence, ...]:
    return (msgspec.structs.replace(OLD, **change),)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"scheduled": {"new": 4}}, "not those it schedules"),
        ({"scheduled": {"new": 4, "old": 0}}, "without a token"),
        ({"scheduled": {"new": 4, "old": -1}}, "without a token"),
        ({"scheduled": {"new": 4, "old": 13}}, "17 tokens; at most 16"),
        ({"new": (NEW, NEW)}, "one twice"),
        ({"known": old(request_id="stranger"), "scheduled": {"new": 4, "stranger": 1}}, "not known here"),
        (
            {"new": new(request=EngineRequest("old", (1,), SAMPLING, 0)), "known": (), "scheduled": {"old": 1}},
            "is not new",
        ),
        ({"new": new(request=EngineRequest("new", (100, 2, 3, 4), SAMPLING, 0))}, "outside the vocabulary"),
        ({"new": new(request=EngineRequest("new", (-1, 2, 3, 4), SAMPLING, 0))}, "outside the vocabulary"),
        ({"new": new(request=EngineRequest("new", (), SAMPLING, 0))}, "a prompt of 0 tokens"),
        ({"new": new(request=EngineRequest("new", (1,) * 13, SAMPLING, 0))}, "a prompt of 13 tokens"),
        ({"new": new(computed=1)}, "beyond the prompt"),
        ({"new": new(computed=-1)}, "beyond the prompt"),
        ({"new": new(blocks=((10,),))}, "none of the 10"),
        ({"new": new(blocks=((-1,),))}, "none of the 10"),
        ({"new": new(blocks=((),))}, "has 0 blocks for 4 tokens"),
        ({"new": new(blocks=((1, 2, 3, 4),))}, "has 4 blocks"),
        ({"known": old(computed=12)}, "13 tokens of a request"),
        ({"known": old(computed=-2)}, "-1 tokens of a request"),
        ({"known": old(blocks=None)}, "has 2 blocks for 9 tokens"),
        ({"known": old(resumed=True)}, "has 1 blocks for 9 tokens"),
        ({"known": old(blocks=((11,),))}, "none of the 10"),
        ({"copies": ((1, 10),)}, "none of the 10"),
        ({"masks": {"stranger": MASK}}, "a mask of a request that it does not schedule"),
        ({"masks": {"old": MASK[1:]}}, "a mask that has not 16 bytes"),
    ],
)
def test_a_step_that_reaches_beyond_the_stage_is_refused(change: dict[str, Any], problem: str) -> None:
    with pytest.raises(ProtocolError, match=problem):
        check_batch(batch(**change), BOUNDS, KNOWN, WANTED)


@pytest.mark.parametrize(
    "brought",
    [
        {},
        {"hidden_states": hidden(5)},
        {"hidden_states": hidden(5), "residual": hidden(4)},
        {"hidden_states": hidden(5), "residual": hidden(5, 3)},
        {"hidden_states": hidden(5), "residual": HostTensor("BF16", (5, 2), memoryview(bytes(20)))},
        {"hidden_states": hidden(5), "residual": hidden(5), "more": hidden(5)},
    ],
)
def test_tensors_other_than_the_models_are_refused(brought: dict[str, HostTensor]) -> None:
    with pytest.raises(ProtocolError, match="this stage takes"):
        check_batch(Batch(STEP, brought), BOUNDS, KNOWN, WANTED)


def test_only_as_many_requests_as_the_stage_has_rows() -> None:
    news = tuple(NewSequence(EngineRequest(f"n{i}", (1,), SAMPLING, 0), ((1,),), 0) for i in range(4))
    step = Step(1, news, (), {f"n{i}": 1 for i in range(4)}, ())
    with pytest.raises(ProtocolError, match="too many requests"):
        check_batch(Batch(step, {}), BOUNDS, {}, {})
