"""A call to its outcome, whoever waits for it: blocking invocations and 202s."""

from __future__ import annotations

from gateway.api.openai_format import aggregate
from gateway.calls import Call
from gateway.dispatch import Dispatcher
from gateway.outcome import outcome_of
from gateway.runs import Outcome, llm_tokens, run_function
from relay.messages import RunFinished, RunToken
from thaw.activation import ActivationStatus
from thaw.errors import ProtocolError, ThawError


def execute(dispatcher: Dispatcher, call: Call) -> Outcome:
    """Never raises for what can go wrong with an activation: that is its outcome."""
    try:
        if call.action.is_llm:
            return llm_outcome(dispatcher, call)
        return run_function(dispatcher, call)
    except ThawError as e:
        return outcome_of(e)


def llm_outcome(dispatcher: Dispatcher, call: Call) -> Outcome:
    """An LLM's whole answer as one OpenAI object.  Raises ThawError."""
    tokens: list[RunToken] = []
    for step in llm_tokens(dispatcher, call):
        if isinstance(step, RunToken):
            tokens.append(step)
        elif isinstance(step, RunFinished):
            return Outcome(ActivationStatus.SUCCESS, aggregate(call, tokens, step), step)
    raise ProtocolError("the answer ended without an end")
