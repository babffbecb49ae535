"""Running a request for embeddings: all of its vectors come from one instance.

A worker that is lost takes its vectors with it.  The request begins anew elsewhere, where a newer version of the model
may answer, so no answer mixes the vectors of two versions.
"""

from __future__ import annotations

from typing import Any, Final

from gateway.serving.call import Call
from gateway.serving.dispatch import Dispatcher
from gateway.serving.routing.elsewhere import give_back
from gateway.serving.routing.invoker_pool import Reply
from gateway.serving.routing.routes import Route
from gateway.serving.runs import Outcome, sentences
from gateway.serving.vectors import Vectors, too_long
from relay.protocol.messages import RunFailed, RunFinished, RunVectors
from thaw.activation import ActivationStatus
from thaw.errors import ProtocolError, ThawError, from_info
from thaw.tracing.trace import Phase

_VECTOR_BYTES: Final = 64
"""The memory of a vector beside its characters."""


def embeddings_outcome(dispatcher: Dispatcher, call: Call) -> Outcome:
    """The result, which the record keeps, has the vectors; of an answer apart it has their number.  Raises
    ThawError."""
    while True:
        route, reply = _reached(dispatcher, call)
        try:
            finished, found = _read(dispatcher, call, route, reply)
        except ThawError as e:
            dispatcher.go_on(call, e)
            continue
        return _outcome(call, finished, Vectors(found, finished.prompt_tokens), dispatcher.result_bytes)


def _outcome(call: Call, finished: RunFinished, vectors: Vectors, max_bytes: int) -> Outcome:
    """Raises DeveloperError for vectors that are too long for a record."""
    model = str(call.payload.get("model", ""))
    if not call.answers_apart:
        encoding = call.payload.get("encoding_format") or "float"
        result, n_bytes = vectors.result(model, encoding, max_bytes)
        return Outcome(ActivationStatus.SUCCESS, result, finished, n_bytes=n_bytes)
    call.vectors = vectors
    usage = {"prompt_tokens": vectors.n_tokens, "total_tokens": vectors.n_tokens}
    counted = {"object": "list", "n_embeddings": len(vectors.data), "usage": usage, "model": model}
    return Outcome(ActivationStatus.SUCCESS, counted, finished)


def _reached(dispatcher: Dispatcher, call: Call) -> tuple[Route, Reply]:
    """Wait for an instance that has accepted the call."""
    waiting = sentences(dispatcher.reach(call))
    while True:
        try:
            next(waiting)
        except StopIteration as stop:
            route, reply = stop.value
            return route, reply


def _read(dispatcher: Dispatcher, call: Call, route: Route, reply: Reply) -> tuple[RunFinished, tuple[str, ...]]:
    """The end of the answer, and its vectors by number.  Gives the route back."""
    whole = False
    error: ThawError | None = None
    found: dict[int, str] = {}
    n_bytes = 0
    try:
        while not isinstance(message := reply.read_message(), RunFinished):
            if isinstance(message, RunFailed):
                raise from_info(message.error)
            if not isinstance(message, RunVectors):
                raise ProtocolError(f"an answer of vectors carried a {type(message).__name__}")
            if not found:
                call.trace(Phase.FIRST_TOKEN)
                if call.cold:
                    dispatcher.on_cold_start(call)
            found.update(message.vectors)
            n_bytes += sum(_VECTOR_BYTES + len(data) for _, data in message.vectors)
            if n_bytes > dispatcher.llm_result_bytes:
                raise too_long(dispatcher.llm_result_bytes)
        reply.finish()
        whole = True
    except ThawError as e:
        error = e
        raise
    finally:
        if not whole:
            reply.abort()
        give_back(dispatcher.room, route, error)
    if message.reason != "stop" or sorted(found) != list(range(len(found))) or len(found) != n_inputs(call.payload):
        raise ProtocolError(f"{len(found)} vectors came for {n_inputs(call.payload)} texts ({message.reason})")
    return message, tuple(found[i] for i in range(len(found)))


def n_inputs(body: Any) -> int:
    """The texts of a valid request."""
    given = body["input"]
    return 1 if isinstance(given, str) or all(type(t) is int for t in given) else len(given)
