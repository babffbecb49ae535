"""Running a web request to the HTTP server in an image: its answer comes whole, or in parts as the server makes them.

Nothing of an answer in parts is kept: its record has the head and the length of the body.  When the server, its
container or its host is lost in the middle, or the time is over, the run fails, and its client must not take the parts
that it has for a whole answer.
"""

from __future__ import annotations

import binascii
from collections.abc import Generator
from dataclasses import replace
from typing import Any

from gateway.serving.call import Call
from gateway.serving.dispatch import Dispatcher
from gateway.serving.execute import to_end
from gateway.serving.routing.elsewhere import give_back
from gateway.serving.routing.invoker_pool import Reply
from gateway.serving.runs import Outcome, function_outcome
from relay.protocol.messages import RunFailed, RunFinished, RunHead, RunPart
from thaw.activation import ActivationStatus
from thaw.errors import ProtocolError, ThawError, TimeLimitExceeded, from_info

Answer = Generator[RunHead | bytes, None, Outcome]
"""The head and the parts of an answer, and its outcome.  A whole answer is in its outcome, and has no parts."""


def http_answer(dispatcher: Dispatcher, call: Call) -> Answer:
    """Raises ThawError."""
    while True:
        route, reply = to_end(dispatcher.reach(call))
        has_begun = whole = False
        error: ThawError | None = None
        try:
            if reply.is_in_messages:
                head = _head(reply)
                has_begun = True
                outcome = yield from _parts(reply, head)
            else:
                outcome = function_outcome(reply.status, reply.read_json())
                outcome = replace(outcome, n_bytes=reply.n_bytes)
            whole = True
            return outcome
        except ThawError as e:
            error = e
            if has_begun and not isinstance(e, TimeLimitExceeded):
                raise
            dispatcher.go_on(call, e)
        finally:
            if not whole:
                reply.abort()
            give_back(dispatcher.room, route, error)


def _head(reply: Reply) -> RunHead:
    head = reply.read_message()
    if not isinstance(head, RunHead):
        raise _unexpected(head)
    return head


def _parts(reply: Reply, head: RunHead) -> Answer:
    n_bytes = 0
    yield head
    while isinstance(message := reply.read_message(), RunPart):
        part = _bytes(message)
        n_bytes += len(part)
        yield part
    if isinstance(message, RunFailed):
        raise from_info(message.error)
    if not isinstance(message, RunFinished):
        raise _unexpected(message)
    reply.finish()
    result = {"statusCode": head.status, "headers": head.headers, "bodyBytes": n_bytes}
    return Outcome(ActivationStatus.SUCCESS, result)


def _bytes(part: RunPart) -> bytes:
    try:
        return binascii.a2b_base64(part.data, strict_mode=True)
    except ValueError as e:
        raise ProtocolError(f"a part of an answer is not base64: {e}") from e


def _unexpected(message: Any) -> ProtocolError:
    return ProtocolError(f"a server's answer carried a {type(message).__name__}")
