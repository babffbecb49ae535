"""Runs a call to its outcome, for blocking invocations and 202s."""

from __future__ import annotations

from collections.abc import Generator
from typing import TypeVar

from gateway.serving.answers.openai_format import aggregate
from gateway.serving.call import Call
from gateway.serving.dispatch import Dispatcher
from gateway.serving.embeddings import embeddings_outcome
from gateway.serving.outcome import outcome_of
from gateway.serving.routing.invoker_pool import Reply
from gateway.serving.runs import Outcome, function_steps, llm_tokens
from relay.protocol.messages import EMBEDDINGS, RunFinished, RunToken
from thaw.activation import ActivationStatus
from thaw.errors import ProtocolError, ThawError

T = TypeVar("T")
Steps = Generator[str | Reply, None, Outcome]
"""A run that yields before each step that may take long: a reply that is to come, or a sentence on what the run waits
for."""


def steps(dispatcher: Dispatcher, call: Call) -> Steps:
    """Never raises: any error of an activation becomes its outcome."""
    try:
        if not call.action.is_llm:
            return (yield from function_steps(dispatcher, call))
        yield "generating"
        if call.endpoint == EMBEDDINGS:
            return embeddings_outcome(dispatcher, call)
        return llm_outcome(dispatcher, call)
    except ThawError as e:
        return outcome_of(e)
    except Exception as e:  # noqa: BLE001  an error of our own ends the activation, not its thread
        return outcome_of(dispatcher.fault(call, e))


def to_end(run: Generator[object, None, T]) -> T:
    """Drive a generator to its return value, through all of its waits."""
    while True:
        try:
            next(run)
        except StopIteration as stop:
            value: T = stop.value
            return value


def llm_outcome(dispatcher: Dispatcher, call: Call) -> Outcome:
    """An LLM's whole answer as one OpenAI object.  Raises ThawError."""
    tokens: list[RunToken] = []
    for step in llm_tokens(dispatcher, call):
        if isinstance(step, RunToken):
            tokens.append(step)
        elif isinstance(step, RunFinished):
            return Outcome(ActivationStatus.SUCCESS, aggregate(call, tokens, step), step)
    raise ProtocolError("the answer ended without an end")
