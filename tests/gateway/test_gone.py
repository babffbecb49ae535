"""Answers of instances that are gone, while their invokers hang: sockets that stay open, and say nothing."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace

import pytest

from gateway.serving.hangup import Hangup
from gateway.serving.routing.gone import GoneInstances
from gateway.serving.routing.invoker_pool import InvokerPool, Reply
from relay.clients.http11 import Connection
from tests.gateway.calls import instance_of
from tests.gateway.conftest import GatewayProcess, events_of, pairs, text_of
from tests.gateway.fake_invoker import FakeInvoker
from tests.gateway.waits import until
from thaw.errors import ThawError, TimeLimitExceeded, WorkerLost
from thaw.instance import InstanceRecord, InstanceState

RECORD = instance_of()
GONE = replace(RECORD, state=InstanceState.GONE)
SILENCE_S = 0.3
HEAD = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n"


@dataclass
class Link:
    """A pool, and one end of the connection on which a reply of RECORD's instance is to come."""

    pool: InvokerPool
    reply: Reply
    theirs: socket.socket
    threads: ThreadPoolExecutor

    def reads(self, read: Callable[[], object]) -> Future[object]:
        """Read on a thread, and return when it waits."""
        begun = self.threads.submit(read)
        until(lambda: self.reply._waits_since_s < float("inf"), "nobody waits")
        return begun


@pytest.fixture
def link() -> Iterator[Link]:
    ours, theirs = socket.socketpair()
    pool = InvokerPool("token")
    pool.gone = GoneInstances(SILENCE_S, SILENCE_S)
    reply = Reply(pool, "host:1", Connection(ours), time.monotonic() + 60, Hangup(), RECORD.instance_id)
    with theirs, ThreadPoolExecutor(1) as threads:
        yield Link(pool, reply, theirs, threads)
        reply.abort()
    pool.close()


def said(gone: GoneInstances) -> None:
    gone.instance_changed(GONE)


def missed(gone: GoneInstances) -> None:
    """It ended while the events could not be read."""
    gone.reload(())


@pytest.mark.parametrize("ends", [said, missed])
def test_a_wait_for_an_instance_that_is_gone_ends(link: Link, ends: Callable[[GoneInstances], None]) -> None:
    read = link.reads(link.reply.read_head)
    ends(link.pool.gone)
    with pytest.raises(WorkerLost):
        read.result(20)


def test_a_wait_that_a_blocking_call_does_not_give_to_a_thread_ends_too(link: Link) -> None:
    read = link.reads(lambda: link.reply.comes_within(60))
    said(link.pool.gone)
    assert read.result(20) is True
    with pytest.raises(WorkerLost):
        link.reply.read_head()


def test_a_blocking_call_that_begins_to_wait_later_gives_its_wait_to_a_thread_as_soon(link: Link) -> None:
    said(link.pool.gone)
    began_s = time.monotonic()
    assert link.reply.comes_within(30) is False
    assert time.monotonic() - began_s < 20


def test_a_wait_that_begins_later_ends_as_soon(link: Link) -> None:
    said(link.pool.gone)
    began_s = time.monotonic()
    with pytest.raises(WorkerLost):
        link.reply.read_head()
    assert time.monotonic() - began_s >= SILENCE_S


def test_a_reply_of_an_instance_that_was_gone_when_the_request_was_sent_ends(link: Link) -> None:
    said(link.pool.gone)
    ours, theirs = socket.socketpair()
    late = Reply(link.pool, "host:1", Connection(ours), time.monotonic() + 60, Hangup(), RECORD.instance_id)
    with theirs, pytest.raises(WorkerLost):
        late.read_head()


def test_an_answer_goes_on_while_something_comes(link: Link) -> None:
    """The invoker has lost the state server, not its containers."""
    said(link.pool.gone)
    pause = threading.Event()
    for piece in (HEAD[:20], HEAD[20:], b"{", b"}"):
        link.theirs.send(piece)
        pause.wait(SILENCE_S / 2)
    link.reply.read_head()
    assert link.reply.read_json() == {}


@pytest.mark.parametrize("comes_back", ["an event", "a reconnection"])
def test_an_instance_that_is_there_again_may_be_silent_again(link: Link, comes_back: str) -> None:
    read = link.reads(link.reply.read_head)
    said(link.pool.gone)
    if comes_back == "an event":
        link.pool.gone.instance_changed(RECORD)
    else:
        link.pool.gone.reload((RECORD,))
    threading.Event().wait(2 * SILENCE_S)
    link.theirs.send(HEAD)
    read.result(20)


def test_the_calls_own_deadline_is_a_time_limit_at_an_instance_that_is_gone_too() -> None:
    pool, (ours, theirs) = InvokerPool("token"), socket.socketpair()
    reply = Reply(pool, "host:1", Connection(ours), time.monotonic() + 0.2, Hangup(), RECORD.instance_id)
    said(pool.gone)
    with theirs, pytest.raises(TimeLimitExceeded):
        reply.read_head()


def test_nothing_is_kept_of_a_reply_that_has_ended(link: Link) -> None:
    link.reply.abort()
    said(link.pool.gone)
    assert not link.pool.gone._open


# ── with a gateway ───────────────────────────────────────────────────────────────────────────────────────────────


def is_lost(gateway: GatewayProcess, record: InstanceRecord, error: ThawError | None = None) -> None:
    gateway.invoker.gone(record, error or WorkerLost("host h0 was lost"))


def test_a_stream_of_a_host_that_hangs_goes_on_elsewhere(gateway: GatewayProcess, elsewhere: FakeInvoker) -> None:
    record = gateway.serve_llm(model_version="v1")
    gateway.invoker.pace = threading.Semaphore(2)
    with gateway.chat(stream=True, max_tokens=5) as reply:
        events = events_of(reply.iter_lines())
        assert next(events)
        is_lost(gateway, record)
        gateway.invoker.wait_for_demand()
        elsewhere.ready("guest/chat", instance="i1", model_version="v1")
        rest = list(events)
    assert text_of(rest).endswith("w2 w3 w4 ")
    assert gateway.invoker.closed.acquire(timeout=60)


@pytest.mark.parametrize("idempotent", [True, False])
def test_a_function_of_a_host_that_hangs_runs_again_if_it_is_idempotent_and_else_ends(
    gateway: GatewayProcess, elsewhere: FakeInvoker, idempotent: bool
) -> None:
    gateway.put_python(annotations=pairs(idempotent=idempotent))
    record = gateway.serve("hello")
    gateway.invoker.pace = threading.Semaphore(0)
    reply = gateway.soon(gateway.invoke, n=1)
    assert gateway.invoker.entered.acquire(timeout=60)
    is_lost(gateway, record)
    if idempotent:
        gateway.invoker.wait_for_demand()
        elsewhere.ready("guest/hello", instance="i1")
        assert reply.result(60).json()["response"]["result"] == {"n": 1}
    else:
        assert reply.result(30).json()["response"]["status"] == "whisk internal error"
