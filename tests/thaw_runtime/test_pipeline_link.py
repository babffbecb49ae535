"""The messages of a pipeline's stages over a real relay server: batches, tokens, signs of life, and noticed losses."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from relay.protocol.frames import FrameHeader, FrameKind, Priority
from relay.protocol.messages import GroupCredential
from relay.transports.auto import AutoTransport
from relay.transports.base import Message
from relay.transports.redis import RedisTransport
from thaw.errors import ErrorInfo, Unavailable, WorkerLost
from thaw.ids import GroupId, random_hex_id
from thaw.tracing.hops import HopPath
from thaw_runtime.engine.protocol import EngineRequest, Sampling
from thaw_runtime.pipeline.link import Patience, StageLink
from thaw_runtime.pipeline.wire import (
    Batch,
    HostTensor,
    NewSequence,
    Parted,
    PathTaken,
    Sampled,
    Step,
    decode_control,
    encode_control,
)

WAIT_S = 20.0
NOBODY = GroupCredential("", "")
LONG = Patience(beat_s=0.05, lost_after_s=60.0, first_word_s=60.0, send_s=10.0)
STILL = Patience(beat_s=60.0, lost_after_s=60.0, first_word_s=60.0, send_s=10.0)
SHORT = Patience(beat_s=0.05, lost_after_s=5.0, first_word_s=60.0, send_s=10.0)

Chain = list[StageLink]
Make = Callable[[int, Patience], Chain]


def transport(url: str, group: GroupId, stage: int, n_stages: int) -> RedisTransport:
    return RedisTransport(url, group, stage, [k for k in range(n_stages) if k != stage])


@pytest.fixture
def make(relay_url: str) -> Iterator[Make]:
    made: Chain = []

    def build(n_stages: int, patience: Patience) -> Chain:
        group = GroupId(random_hex_id())
        made.extend(StageLink(transport(relay_url, group, k, n_stages), k, n_stages, patience) for k in range(n_stages))
        return made

    yield build
    for link in made:
        link.end(ErrorInfo("WorkerLost", "the test is over"))


def batch(number: int, n_bytes: int = 8) -> Batch:
    request = EngineRequest(f"r{number}", (1, 2), Sampling(4), 7, 0, ())
    step = Step(number, (NewSequence(request, ((1,),), 0),), (), {request.request_id: 2}, ())
    return Batch(step, {"hidden_states": HostTensor("U8", (n_bytes,), memoryview(bytes(n_bytes)))})


def losses(chain: Chain) -> list[queue.SimpleQueue[ErrorInfo]]:
    found: list[queue.SimpleQueue[ErrorInfo]] = []
    for link in chain:
        found.append(queue.SimpleQueue())
        link.when_lost(found[-1].put)
    return found


def test_batches_go_down_the_chain_in_order_and_tokens_come_back(make: Make) -> None:
    first, middle, last = make(3, LONG)
    came: queue.SimpleQueue[Sampled] = queue.SimpleQueue()
    first.on_sampled = came.put
    for number in range(5):
        first.send_batch(batch(number, n_bytes=3 << 20))  # each batch has three chunks
    for number in range(5):
        middle.send_batch(middle.next_batch())
        got = last.next_batch()
        assert got.step == batch(number).step
        assert got.tensors["hidden_states"].shape == (3 << 20,)
        last.send_sampled(Sampled(number, (f"r{number}",), ((number,),)))
    assert [came.get(timeout=WAIT_S).token_ids for _ in range(5)] == [((n,),) for n in range(5)]


def answered(chain: Chain) -> Sampled:
    """Send a batch down the chain, and return the token that comes back."""
    came: queue.SimpleQueue[Sampled] = queue.SimpleQueue()
    chain[0].on_sampled = came.put
    chain[0].send_batch(batch(0))
    for link in chain[1:-1]:
        link.send_batch(link.next_batch())
    chain[-1].send_sampled(Sampled(chain[-1].next_batch().step.number, ("r0",), ((7,),)))
    return came.get(timeout=WAIT_S)


def test_stage_0_knows_the_path_of_every_hop_before_the_first_token(make: Make) -> None:
    chain = make(3, LONG)
    answered(chain)
    assert chain[0].hops() == (HopPath.RELAY,) * 3


def test_stage_0_is_told_of_each_change_of_a_path_once_and_not_at_every_step() -> None:
    transport = ScriptedTransport()
    last = StageLink(transport, 2, 3, STILL)
    steps = [Sampled(number, ("r",), ((1,),)) for number in range(4)]
    for step in steps[:2]:
        last.send_sampled(step)
    transport.now = HopPath.TCP
    for step in steps[2:]:
        last.send_sampled(step)
    sent = [decode_control(memoryview(payload)) for payload in transport.sent]
    relay, tcp = PathTaken(2, HopPath.RELAY), PathTaken(2, HopPath.TCP)
    assert sent == [relay, *steps[:2], tcp, *steps[2:]]  # each path is named before the first message that takes it
    last.end(ErrorInfo("WorkerLost", "the test is over"))


def test_stages_that_can_reach_one_another_say_that_they_moved_to_tcp(relay_url: str) -> None:
    group = GroupId(random_hex_id())
    chain = [
        StageLink(AutoTransport(relay_url, group, k, [1 - k], host_address="127.0.0.1", credential=NOBODY), k, 2, LONG)
        for k in range(2)
    ]
    deadline = time.monotonic() + WAIT_S
    while chain[0].hops() != (HopPath.TCP, HopPath.TCP):  # any heartbeat may be the first message on the new path
        assert time.monotonic() < deadline
        time.sleep(LONG.beat_s)
    assert answered(chain).token_ids == ((7,),)
    for link in chain:
        link.end(ErrorInfo("WorkerLost", "the test is over"))


def test_a_path_of_a_stage_that_is_not_there_breaks_the_pipeline(make: Make) -> None:
    first, last = make(2, LONG)
    heard = losses([first])[0]
    control = FrameHeader(FrameKind.CONTROL)
    last._transport.send(0, control, encode_control(PathTaken(7, HopPath.TCP)), deadline_s=5)
    assert "the path of stage 7" in heard.get(timeout=WAIT_S).message


class ScriptedTransport:
    """Receives nothing, records what was sent, and takes the path that the test chooses."""

    def __init__(self) -> None:
        self.now = HopPath.RELAY
        self.sent: list[bytes] = []
        self._closed = threading.Event()

    def send(self, receiver: int, message: FrameHeader, payload: bytes | memoryview, *, deadline_s: float) -> None:
        self.sent.append(bytes(payload))

    def receive(self, *, deadline_s: float) -> Message:
        if self._closed.wait(deadline_s):
            raise Unavailable("closed")
        raise TimeoutError

    def path(self, receiver: int, priority: Priority = Priority.INFERENCE) -> HopPath:
        return self.now

    def close(self) -> None:
        self._closed.set()


def test_an_idle_pipeline_stays_alive_by_its_beats(make: Make) -> None:
    chain = make(3, SHORT)
    lost = losses(chain)
    with pytest.raises(queue.Empty):
        lost[0].get(timeout=1.5 * SHORT.lost_after_s)
    assert all(of_link.empty() for of_link in lost)


def test_who_ends_tells_everybody_at_once(make: Make) -> None:
    for ends in range(3):
        chain = make(3, LONG)[-3:]
        lost = losses(chain)
        chain[ends].end(ErrorInfo("WorkerLost", "out of memory"))
        assert "out of memory" in lost[0].get(timeout=WAIT_S).message
        if ends:  # stage 0 has noticed it and ends as well, which reaches the stages before the lost one
            chain[0].end(ErrorInfo("WorkerLost", "out of memory"))
        for queue_ in lost[1:]:
            assert "out of memory" in queue_.get(timeout=WAIT_S).message


def test_a_neighbour_that_falls_silent_is_lost_and_whoever_waits_is_woken(make: Make, relay_url: str) -> None:
    first, last = make(2, SHORT)
    heard = losses([first])[0]
    first.send_batch(batch(1))
    assert last.next_batch().step.number == 1
    last._transport.close()  # as if its process were killed: it sends no message
    assert "stage 1 of 2 has been silent" in heard.get(timeout=WAIT_S).message
    with pytest.raises(WorkerLost, match="silent"):
        first.send_batch(batch(2))
    with pytest.raises(WorkerLost, match="broken"):
        last.next_batch()


def test_a_batch_that_is_damaged_breaks_the_pipeline_and_not_the_process(make: Make, relay_url: str) -> None:
    first, last = make(2, LONG)
    hidden = FrameHeader(FrameKind.HIDDEN_STATES)
    first._transport.send(1, hidden, b"\x80\x04pickle, not a batch", deadline_s=5)
    with pytest.raises(WorkerLost, match="the pipeline is broken"):
        last.next_batch()


def test_tokens_from_a_stage_that_is_not_the_last_are_refused(make: Make) -> None:
    first, middle, _ = make(3, LONG)
    heard = losses([first])[0]
    middle.send_sampled(Sampled(1, ("r1",), ((5,),)))
    # without a beat so far, the stage first tells its path, which is refused in the same way
    assert "from stage 1, expected from 2" in heard.get(timeout=WAIT_S).message


ANSWERED = Parted((5, 6), (-0.5, -1.25))


def test_every_stage_hears_behind_its_last_batch_that_stage_0_has_left(make: Make) -> None:
    first, middle, last = make(3, LONG)
    first.send_batch(batch(1))
    came = middle.next_batch()
    assert came is not None
    middle.send_batch(came)
    first.send_parted(ANSWERED)  # stage 0 leaves when every stage has sent its last batch
    assert middle.next_batch() is None
    assert last.next_batch() is not None
    assert last.next_batch() is None
    assert (middle.parted, last.parted) == (ANSWERED, ANSWERED)


def test_after_that_neither_silence_nor_the_loss_of_another_stage_means_anything(make: Make) -> None:
    first, *later = make(3, SHORT)
    lost = losses(later)
    first.send_parted(ANSWERED)
    assert [link.next_batch() for link in later] == [None, None]
    later[0].leave()
    later[0].end(ErrorInfo("WorkerLost", "stopped, as a worker"))
    first._transport.close()
    for link in later:
        for thread in link._threads:
            thread.join(WAIT_S)  # nobody listens any more
        link.check()
    assert [queue_.empty() for queue_ in lost] == [True, True]


def test_stage_0_tells_that_it_has_left_though_the_others_are_gone(make: Make) -> None:
    first, last = make(2, LONG)
    last._transport.close()
    first._transport.close()
    first.send_parted(ANSWERED)  # raises nothing
    assert first.parted is None


def test_stage_0_takes_no_such_word_from_another_stage(make: Make) -> None:
    first, last = make(2, LONG)
    heard = losses([first])[0]
    last._transport.send(0, FrameHeader(FrameKind.CONTROL), encode_control(ANSWERED), deadline_s=5)
    assert "Parted from stage 1" in heard.get(timeout=WAIT_S).message
