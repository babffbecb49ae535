"""A client that goes on where it was: with the stream of this gateway, of another one, or with one computed again.

::

    here? ──yes──▶ read it, from the client's event on
      │ no
    another gateway that is alive has it? ──yes──▶ take its tokens over, and continue as after a lost worker
      │ no
    compute it again, with the same seed

In each case the reader gets the answer from its first token on, and events that the client has already are left out
(event_ids.Progress).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from enum import StrEnum
from typing import Final

from gateway.serving.answers.event_ids import EventId, Fingerprint, OtherRequest, fingerprint, request_digest
from gateway.serving.call import Call
from gateway.serving.hangup import Hangup
from gateway.serving.routing.throttle import QueueCaps, Throttle
from gateway.serving.streams import Reader, Streams
from relay.protocol.messages import StreamWanted
from relay.state.registry import Registry
from relay.state.streams import HandedOver, StreamHomes
from thaw.errors import Conflict, PlatformError
from thaw.ids import ActivationId, GatewayId
from thaw.logs import Log

_BROUGHT_S: Final = 2.0
"""How long a gateway that is asked for a stream waits for it to come here: less than the other one waits for us."""


class Way(StrEnum):
    """Where a client's stream came from when it went on."""

    HERE = "here"
    TAKEN_OVER = "taken_over"
    COMPUTED_AGAIN = "computed_again"


class Reconnects:
    def __init__(
        self,
        streams: Streams,
        homes: StreamHomes,
        registry: Registry,
        throttle: Throttle,
        caps: QueueCaps,
        gateway: GatewayId,
        reconnect_s: float,
        log: Log,
    ) -> None:
        self._streams, self._homes, self._registry = streams, homes, registry
        self._throttle, self._caps = throttle, caps
        self._gateway, self._reconnect_s, self._log = gateway, reconnect_s, log
        self._changed = threading.Condition()
        self._resuming: set[ActivationId] = set()
        self._pool = ThreadPoolExecutor(4, "hand-over")

    def stop(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def go_on(self, had: EventId, call: Call, hangup: Hangup, cut: Callable[[], None]) -> tuple[Way, Reader]:
        """``call`` is the request as it would be computed again.  Raises OtherRequest, Conflict, Throttled,
        Unavailable."""
        reader = self._here(had, call, hangup, cut)
        if reader is not None:
            return Way.HERE, reader
        asked = fingerprint(call.action, call.endpoint, call.payload)
        if asked.digest != had.digest:
            raise OtherRequest
        with self._alone(had.activation_id):
            reader = self._here(had, call, hangup, cut)
            return self._bring(call, asked, hangup, cut) if reader is None else (Way.HERE, reader)

    def left(self, call: Call) -> None:
        """A client hung up, and its stream is kept: let other gateways know.  The client may have gone on with one of
        them already."""
        try:
            if not self._homes.note(call.activation_id, self._kept_s(call)):
                self._log.event("stream_taken_over", activation_id=call.activation_id)
                self._streams.give_away(call.activation_id)
        except PlatformError as e:  # another gateway would compute the answer again
            self._log.event("stream_not_noted", activation_id=call.activation_id, error=e.message)

    def wanted(self, message: StreamWanted) -> None:
        """Another gateway asks for a stream.  Called by the reader of events, so it returns at once."""
        if message.home == self._gateway:
            self._pool.submit(self._hand_over, message)

    def _here(self, had: EventId, call: Call, hangup: Hangup, cut: Callable[[], None]) -> Reader | None:
        stream = self._streams.find(had.activation_id)
        if stream is None:
            return None
        if request_digest(stream.asked, call.endpoint, call.payload) != had.digest:
            raise OtherRequest
        return self._streams.attach(had.activation_id, hangup, cut)

    def _bring(self, call: Call, asked: Fingerprint, hangup: Hangup, cut: Callable[[], None]) -> tuple[Way, Reader]:
        self._caps.check(call.action)
        namespace = call.subject.namespace
        self._throttle.enter(namespace)
        try:
            handed = self._from_elsewhere(call)
            if handed is not None:
                call.received_s = time.monotonic() - handed.age_ms / 1000
                call.received_ms -= handed.age_ms
                call.losses = handed.losses
            reader = self._streams.begin(call, hangup, cut, body_bytes=asked.n_bytes, handed=handed)
        except BaseException:
            self._throttle.leave(namespace)
            raise
        return Way.COMPUTED_AGAIN if handed is None else Way.TAKEN_OVER, reader

    def _from_elsewhere(self, call: Call) -> HandedOver | None:
        """Return the part of the answer that another gateway had, or None.  This gateway is the stream's home then."""
        activation_id = call.activation_id
        home = self._homes.home(activation_id)
        if home is not None and home != self._gateway and self._registry.is_gateway_alive(home):
            return self._homes.take(activation_id, home, self._kept_s(call))
        if not self._homes.claim(activation_id, home, self._kept_s(call)):
            raise Conflict("Another client goes on with this answer.")
        return None

    def _hand_over(self, wanted: StreamWanted) -> None:
        """Write first, then stop: a stream that could not be written goes on here."""
        activation_id = wanted.activation_id
        with self._changed:  # this gateway may be its home already, and not have it yet
            self._changed.wait_for(lambda: activation_id not in self._resuming, _BROUGHT_S)
        stream, handed = self._streams.find(activation_id), self._streams.picture(activation_id)
        try:
            if stream is None or handed is None:
                self._homes.refuse(wanted)
                return
            if not self._homes.hand(wanted, handed, self._kept_s(stream.call)):
                self._log.event("stream_taken_over", activation_id=activation_id)
            self._streams.give_away(activation_id)
        except PlatformError as e:
            self._log.event("stream_not_handed_over", activation_id=activation_id, error=e.message)

    @contextmanager
    def _alone(self, activation_id: ActivationId) -> Iterator[None]:
        with self._changed:
            if activation_id in self._resuming:
                raise Conflict("Another client goes on with this answer.")
            self._resuming.add(activation_id)
        try:
            yield
        finally:
            with self._changed:
                self._resuming.discard(activation_id)
                self._changed.notify_all()

    def _kept_s(self, call: Call) -> float:
        """How long the note of a stream's gateway may matter."""
        return call.timeout_s + self._reconnect_s
