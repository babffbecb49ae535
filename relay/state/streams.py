"""Keeps track of a stream whose client has left: the note of its gateway, and the hand-over to another gateway.

The note is written when a client hangs up, so a stream that nobody interrupts writes nothing.  It decides which gateway
runs the stream.  A gateway that wants to take it over replaces the note, by compare-and-set, together with the
hand-over or after the hand-over has failed.  So a gateway that answers or notes late finds that the stream is no longer
its own.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any, Final

import redis

from relay.protocol.messages import RunFinished, RunToken, StreamWanted
from relay.state import bus, keys, redis_link
from thaw import wire
from thaw.errors import Conflict
from thaw.ids import ActivationId, GatewayId, random_hex_id

_ASK_S: Final = 3
"""How long a gateway that is alive may take to hand a stream over.  Afterwards the answer is computed again, which is
always right."""
_ASKING: Final = 24
"""The most requests of this gateway that wait for other gateways at once.  They have a client of their own, as each
holds a connection for up to _ASK_S, and it has more connections than that: so notes, claims and hand-overs never wait
for one.  The next request does not wait either: its answer is computed again."""
_ANSWER_TTL_S: Final = 60
_GONE: Final = b""
_NOTE: Final = """
if (redis.call('GET', KEYS[1]) or ARGV[1]) ~= ARGV[1] then return 0 end
redis.call('SET', KEYS[1], ARGV[1], 'EX', ARGV[2])
return 1
"""
_CLAIM: Final = """
if (redis.call('GET', KEYS[1]) or '') ~= ARGV[1] then return 0 end
redis.call('SET', KEYS[1], ARGV[2], 'EX', ARGV[3])
if #KEYS == 2 then
    redis.call('RPUSH', KEYS[2], ARGV[4])
    redis.call('EXPIRE', KEYS[2], ARGV[5])
end
return 1
"""


@dataclass(frozen=True, slots=True)
class HandedOver:
    """A stream as far as its gateway had it.  ``end`` is None while the answer goes on."""

    tokens: tuple[RunToken, ...]
    end: RunFinished | None
    age_ms: int
    losses: int
    model_version: str = ""  # version of the model that made the tokens


class StreamHomes:
    def __init__(self, client: redis.Redis, waiting: redis.Redis, gateway: GatewayId) -> None:
        """``waiting``: a client that is used only by requests that wait for other gateways."""
        self._redis, self._waiting, self._gateway = client, waiting, gateway
        self._asking = threading.BoundedSemaphore(_ASKING)

    def note(self, activation_id: ActivationId, kept_s: float) -> bool:
        """This gateway has the stream.  Return False if another one has claimed it meanwhile."""
        with redis_link.translated("note a stream"):
            noted: Any = self._redis.eval(_NOTE, 1, keys.stream(activation_id), self._gateway, _whole(kept_s))
        return bool(noted)

    def home(self, activation_id: ActivationId) -> GatewayId | None:
        with redis_link.translated("look a stream up"):
            found: Any = self._redis.get(keys.stream(activation_id))
        return None if found is None else GatewayId(redis_link.text(found))

    def claim(self, activation_id: ActivationId, home: GatewayId | None, kept_s: float) -> bool:
        """Make this gateway the stream's home.  Return False if it is no longer as ``home`` says."""
        with redis_link.translated("claim a stream"):
            key = keys.stream(activation_id)
            claimed: Any = self._redis.eval(_CLAIM, 1, key, home or "", self._gateway, _whole(kept_s))
        return bool(claimed)

    def take(self, activation_id: ActivationId, home: GatewayId, kept_s: float) -> HandedOver | None:
        """Take the stream over from ``home``.  Return None if that gateway does not have it or does not answer, or if
        too many requests wait for such an answer already; this gateway is the stream's home then, too.  Raises Conflict
        if another gateway was faster."""
        wanted = StreamWanted(activation_id, home, self._gateway, random_hex_id())
        if not self._asking.acquire(blocking=False):
            self._take_nothing(wanted, kept_s)
            return None
        try:
            bus.publish(self._redis, wanted)
            answers = keys.stream_answer(wanted.answer_id)
            with redis_link.translated("wait for a stream"):
                found: Any = self._waiting.blpop([answers], timeout=_ASK_S)
        finally:
            self._asking.release()
        answer = _GONE if found is None else bytes(found[1])
        if answer == _GONE:
            if self.claim(activation_id, home, kept_s):
                return None
            with redis_link.translated("read a stream"):
                late: Any = self._redis.lpop(answers)  # it was handed over at the last moment
            answer = late or _GONE
        if answer == _GONE:
            raise Conflict("Another client goes on with this answer.")
        return wire.loads(HandedOver, answer)

    def _take_nothing(self, wanted: StreamWanted, kept_s: float) -> None:
        """Claim the stream without its tokens, and then let its gateway find that it is no longer its own."""
        if not self.claim(wanted.activation_id, wanted.home, kept_s):
            raise Conflict("Another client goes on with this answer.")
        bus.publish(self._redis, wanted)

    def hand(self, wanted: StreamWanted, handed: HandedOver, kept_s: float) -> bool:
        """Return False if the stream is no longer this gateway's."""
        with redis_link.translated("hand a stream over"):
            done: Any = self._redis.eval(
                _CLAIM,
                2,
                keys.stream(wanted.activation_id),
                keys.stream_answer(wanted.answer_id),
                self._gateway,
                wanted.gateway,
                _whole(kept_s),
                wire.dumps(handed),
                _ANSWER_TTL_S,
            )
        return bool(done)

    def refuse(self, wanted: StreamWanted) -> None:
        """This gateway does not have the stream."""
        with redis_link.translated("refuse a stream"):
            pipe = self._redis.pipeline(transaction=True)
            pipe.rpush(keys.stream_answer(wanted.answer_id), _GONE)
            pipe.expire(keys.stream_answer(wanted.answer_id), _ANSWER_TTL_S)
            pipe.execute()


def _whole(seconds: float) -> int:
    return max(1, round(seconds))
