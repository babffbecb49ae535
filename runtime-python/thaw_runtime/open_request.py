"""A request in an engine: numbers its tokens and turns the engine's outputs into events."""

from __future__ import annotations

from typing import Any

from thaw.errors import ErrorInfo, WorkerLost
from thaw_runtime.engine import EngineRequest, Event, Failed, Finished, Logprobs, Token, Usage
from thaw_runtime.start_trace import Busy


class OpenRequest:
    """Numbers a request's tokens.

    ``asleep`` names what a step can only sleep for: the other threads of its kernels, in a pipeline the other stages.
    """

    def __init__(self, request: EngineRequest, asleep: str) -> None:
        self._request, self._asleep = request, asleep
        self._next = request.first_index
        self._busy: Busy | None = None

    def begin(self) -> None:
        """On the engine's thread, which computes it from now on."""
        self._busy = Busy()

    def usage(self) -> Usage:
        return Usage(len(self._request.prompt_token_ids), self._next)

    def events(self, output: Any) -> list[Event]:
        """What an EngineCoreOutput of vLLM says."""
        events: list[Event] = []
        for i, token_id in enumerate(output.new_token_ids):
            spent, self._busy = self._busy.attrs(self._asleep) if self._busy else None, None
            events.append(Token(self._next, token_id, _logprobs(output.new_logprobs, i), spent))
            self._next += 1
        if output.finish_reason is not None:
            reason = str(output.finish_reason)
            if reason in ("stop", "length"):
                events.append(Finished(reason, self.usage()))
            else:
                events.append(Failed(ErrorInfo(WorkerLost.__name__, f"the engine ended the request: {reason}")))
        return events


def _logprobs(lists: Any, i: int) -> Logprobs | None:
    """vLLM puts the sampled token first, the top ones behind it."""
    if lists is None:
        return None
    ids, values = lists.logprob_token_ids[i].tolist(), lists.logprobs[i].tolist()
    return Logprobs(values[0], tuple(zip(ids[1:], values[1:], strict=True)))
