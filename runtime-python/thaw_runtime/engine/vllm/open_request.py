"""A request in an engine: its tokens get numbers, and vLLM's outputs become events."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from thaw.errors import BadParameter, ErrorInfo, ThawError, WorkerLost
from thaw.tracing.hops import HopPath
from thaw_runtime.engine.protocol import (
    EmbedRequest,
    EngineRequest,
    Event,
    Failed,
    Finished,
    Logprobs,
    Sampling,
    Token,
    Usage,
)
from thaw_runtime.engine.vllm.grammars import FollowedGrammar
from thaw_runtime.engine.vllm.work import Mark, Work


class OpenRequest:
    """Numbers a request's tokens.  The first token carries the time that the engine thread spent on it.

    ``hops`` says which paths the messages between the stages take now; it is None if there is one stage.
    """

    def __init__(self, asked: EngineRequest | EmbedRequest, hops: Callable[[], tuple[HopPath, ...]] | None) -> None:
        """An embedding model's request gives this its name only (embeddings.py)."""
        request = asked if isinstance(asked, EngineRequest) else EngineRequest(asked.request_id, (), Sampling(0), 0)
        self._request, self._hops = request, hops or tuple
        self.adapter = request.adapter
        self._hops_told: tuple[HopPath, ...] = ()
        self._next = request.first_index
        self._began: tuple[Work, Mark] | None = None
        self._grammar: FollowedGrammar | None = None

    def begin(self, work: Work, grammar: FollowedGrammar | None = None) -> None:
        """Called on the engine thread, which computes the request from now on."""
        self._began, self._grammar = (work, work.mark(len(self._request.prompt_token_ids))), grammar

    def usage(self) -> Usage:
        return Usage(len(self._request.prompt_token_ids), self._next)

    def events(self, output: Any) -> list[Event]:
        """An EngineCoreOutput of vLLM as events."""
        events: list[Event] = []
        if str(output.finish_reason) == "error" and self._grammar is not None:
            return [Failed(self._broken_grammar().info())]  # without the token, which the grammar does not allow
        for i, token_id in enumerate(output.new_token_ids):
            logprobs = _logprobs(output.new_logprobs, i)
            token = self._first(token_id, logprobs, output) if self._began else Token(self._next, token_id, logprobs)
            events.append(token)
            self._next += 1
        if output.finish_reason is not None:
            reason = str(output.finish_reason)
            if reason in ("stop", "length"):
                events.append(Finished(reason, self.usage(), self._changed_hops()))
            else:
                events.append(Failed(ErrorInfo(WorkerLost.__name__, f"the engine ended the request: {reason}")))
        return events

    def _broken_grammar(self) -> ThawError:
        """Return the error of an answer whose grammar could not be followed.  It is an error of the request, because
        another worker would fail with the same rules, unless the grammar names another problem."""
        grammar = self._request.sampling.grammar
        assert self._grammar is not None and grammar is not None  # noqa: S101, PT018  the caller looks
        return self._grammar.problem or BadParameter(grammar.param, "the answer does not follow it")

    def _first(self, token_id: int, logprobs: Logprobs | None, output: Any) -> Token:
        assert self._began is not None  # noqa: S101  a request has begun before its first token
        (work, mark), self._began = self._began, None
        spent = work.since(mark)
        if (stats := output.prefill_stats) is not None and stats.num_cached_tokens:
            spent["cached_tokens"] = stats.num_cached_tokens  # prompt tokens found in the prefix cache
        self._hops_told = self._hops()
        prompt = _of_prompt(output.new_prompt_logprobs_tensors, len(self._request.prompt_token_ids) - 1)
        return Token(self._next, token_id, logprobs, spent, self._hops_told, prompt)

    def _changed_hops(self) -> tuple[HopPath, ...]:
        """The paths, if they have changed since the first token; otherwise ()."""
        return hops if (hops := self._hops()) != self._hops_told else ()


def _logprobs(lists: Any, i: int) -> Logprobs | None:
    """vLLM puts the sampled token first and the top ones after it."""
    if lists is None:
        return None
    ids, values = lists.logprob_token_ids[i].tolist(), lists.logprobs[i].tolist()
    return Logprobs(values[0], tuple(zip(ids[1:], values[1:], strict=True)))


def _of_prompt(tensors: Any, n: int) -> tuple[Logprobs, ...]:
    """Return the first ``n`` rows: the tokens of a continued answer come after the prompt's."""
    if tensors is None:
        return ()
    columns = (tensors.logprob_token_ids, tensors.logprobs, tensors.selected_token_ranks)
    rows = zip(*(column[:n].tolist() for column in columns), strict=True)
    return tuple(Logprobs(values[0], tuple(zip(ids[1:], values[1:], strict=True)), rank) for ids, values, rank in rows)
