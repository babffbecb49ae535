"""Running a call to its end: an LLM's stream of tokens, or an ordinary function's one answer.

Each token is passed on exactly once (interfaces: engine protocol).  A token's index counts from 0 per activation; a
token that was seen already is dropped, and a gap is a failure.  When a worker is lost (routing/elsewhere.py), its
answer goes on elsewhere from the tokens already emitted.  When a worker leaves, its answer moves elsewhere while it
goes on (moving/).
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from gateway.serving.answers.kept import prompt_bytes, token_bytes
from gateway.serving.call import Call
from gateway.serving.dispatch import Dispatcher
from gateway.serving.moving.between_tokens import Moving
from gateway.serving.routing.elsewhere import give_back
from gateway.serving.routing.invoker_pool import Reply
from gateway.serving.routing.routes import Route
from relay.protocol.messages import RunFailed, RunFinished, RunPrompt, RunToken
from thaw.activation import ActivationStatus
from thaw.errors import DeveloperError, ProtocolError, ThawError, from_info
from thaw.tracing.trace import Phase

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Outcome:
    """How an activation ended."""

    status: ActivationStatus
    result: object
    finished: RunFinished | None = None
    timed_out: bool = False
    error: ThawError | None = None
    n_bytes: int = 0
    """The length of a function's result as it came; 0: nobody knows it."""


def llm_tokens(dispatcher: Dispatcher, call: Call) -> Generator[str | RunToken | RunFinished, None, None]:
    """Yield sentences while the client waits, then tokens in order, each once, then RunFinished.  Raises ThawError."""
    moving = Moving(dispatcher.migrations, call)
    try:
        while True:
            route, reply = yield from sentences(dispatcher.reach(call, moving.at_hand()))
            try:
                yield from _tokens(dispatcher, call, route, reply, moving)
                return
            except ThawError as e:
                dispatcher.go_on(call, e)
                yield "the worker was lost, continuing elsewhere"
    finally:
        moving.end()


def sentences(steps: Generator[str | Reply, None, T]) -> Generator[str, None, T]:
    """The steps without replies, which the caller waits for itself."""
    while True:
        try:
            step = next(steps)
        except StopIteration as stop:
            value: T = stop.value
            return value
        if isinstance(step, str):
            yield step


def _tokens(
    dispatcher: Dispatcher, call: Call, route: Route, reply: Reply, moving: Moving
) -> Iterator[RunToken | RunFinished]:
    whole = moves = False
    error: ThawError | None = None
    arrived: Any = None  # the first message of a worker to which the run has moved
    try:
        while True:
            message, arrived = reply.read_message() if arrived is None else arrived, None
            if isinstance(message, RunFinished):
                break
            if isinstance(message, RunFailed):
                raise from_info(message.error)
            if _is_next(call, message):
                if call.cold and message.index == 0:
                    dispatcher.on_cold_start(call)
                _bound(call, message, dispatcher.llm_result_bytes)
                yield message
                if route.leaves or moves:
                    if (moved := moving.at_boundary(route, reply)) is not None:
                        route, reply, arrived = moved
                    moves = moving.is_under_way
        reply.finish()
        whole = True
    except ThawError as e:
        error = e
        raise
    finally:
        if not whole:
            reply.abort()
        give_back(dispatcher.room, route, error)
    if message.prompt is not None:
        _bound_prompt(call, message.prompt, dispatcher.llm_result_bytes)
    yield message


def _is_next(call: Call, token: object) -> bool:
    if not isinstance(token, RunToken):
        raise ProtocolError(f"a run's stream carried a {type(token).__name__}")
    expected = len(call.emitted)
    if token.index > expected:
        raise ProtocolError(f"token {token.index} arrived where {expected} was due")
    if token.index < expected:
        return False
    if expected == 0:
        call.trace(Phase.FIRST_TOKEN)
        call.adapter = token.adapter
    call.emitted.append(token.token_id)
    return True


def _bound(call: Call, token: RunToken, allowed: int) -> None:
    """An answer is kept to its end, for its record.  Raises DeveloperError."""
    call.answer_bytes += token_bytes(token)
    if call.answer_bytes > allowed:
        raise DeveloperError(
            f"The action produced a response that exceeded the allowed length: {len(call.emitted)} tokens take more "
            f"than {allowed} bytes.",
            hint="ask for fewer tokens or logprobs",
        )


def _bound_prompt(call: Call, prompt: RunPrompt, allowed: int) -> None:
    """The choices of one request are kept together, and a list of prompts is computed fast.  Raises DeveloperError."""
    call.prompts_bytes.append(prompt_bytes(prompt))
    if call.answer_bytes + sum(call.prompts_bytes) > allowed:
        raise DeveloperError(
            "The action produced a response that exceeded the allowed length: the logprobs of the prompts take more "
            f"than {allowed} bytes.",
            hint="ask for fewer logprobs, or send fewer prompts at once",
        )


def function_steps(dispatcher: Dispatcher, call: Call) -> Generator[str | Reply, None, Outcome]:
    """Return an ordinary function's answer, by OpenWhisk's contract of ``/run``.  Yields what Dispatcher.reach()
    yields.  Raises ThawError."""
    while True:
        route, reply = yield from dispatcher.reach(call)
        error: ThawError | None = None
        try:
            body = reply.read_json()
            return replace(function_outcome(reply.status, body), n_bytes=reply.n_bytes)
        except ThawError as e:
            error = e
            dispatcher.go_on(call, e)
        finally:
            give_back(dispatcher.room, route, error)


def function_outcome(status: int, body: object) -> Outcome:
    if status == 200 and isinstance(body, dict) and "error" in body:
        return Outcome(ActivationStatus.APPLICATION_ERROR, body)
    if status == 200 and isinstance(body, (dict, list)):
        return Outcome(ActivationStatus.SUCCESS, body)
    if status == 200:
        return Outcome(ActivationStatus.DEVELOPER_ERROR, {"error": "The action did not return a dictionary or array."})
    named = body.get("error") if isinstance(body, dict) else None
    text = named or "The action did not produce a valid response and exited unexpectedly."
    return Outcome(ActivationStatus.DEVELOPER_ERROR, {"error": text})
