"""One answer: convert the engine's events to the messages of /run, with text."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

from relay.protocol.messages import (
    LlmRun,
    RankedToken,
    RunFailed,
    RunFinished,
    RunPrompt,
    RunToken,
    RunVectors,
    TokenLogprob,
)
from thaw.tracing import hops
from thaw.tracing.hops import HopPath
from thaw.tracing.trace import Phase
from thaw_runtime.engine.link import EngineLink
from thaw_runtime.engine.protocol import Event, Failed, Finished, Logprobs, Token
from thaw_runtime.llm.model_text import ModelText
from thaw_runtime.llm.openai_request import ParsedRun, parse_run
from thaw_runtime.llm.text_stream import Shown
from thaw_runtime.llm.tools import CallStream, Piece
from thaw_runtime.process.start_trace import StartTrace

RunMessage = RunToken | RunVectors | RunFinished | RunFailed


class RunStream:
    """One request and its answer.  It is made before anything is submitted, so a bad request is refused as a whole."""

    def __init__(
        self,
        link: EngineLink,
        text: ModelText,
        run: LlmRun,
        request_id: str,
        max_model_len: int,
        trace: StartTrace,
        adapter: str = "",
        cache_salt: str = "",
    ) -> None:
        self._link = link
        self._text = text
        self._trace = trace
        parsed = parse_run(run, request_id, text, max_model_len)
        engine = replace(parsed.engine, adapter=adapter, cache_salt=cache_salt)
        self.parsed: ParsedRun = replace(parsed, engine=engine)
        request = self.parsed.engine
        form = self.parsed.tools.format
        self._stream = text.stream(request.prompt_token_ids, self.parsed.stops)
        self._calls = None if form is None else CallStream(form)
        stopped = self._replay(request.output_so_far)
        self._over = "stop" if stopped else request.over
        self._emits, self._prefills = self.parsed.emits, run.prefill_only
        self._echoes, self._n_ranked = bool(run.body.get("echo")), run.body.get("prompt_logprobs")
        self._wants_prompt = bool(self._echoes or run.body.get("return_token_ids") or self._n_ranked is not None)
        self._prompt_logprobs: tuple[Logprobs, ...] = ()
        self._completed = len(request.output_so_far)
        self._first = True

    @property
    def request_id(self) -> str:
        return self.parsed.engine.request_id

    def messages(self, deadline: float | None) -> Iterator[list[RunMessage]]:
        """Yield batches of messages as they arrive; the last batch ends with RunFinished or RunFailed.  ``deadline`` is
        a time of the monotonic clock.

        Raises TimeLimitExceeded.  However this generator ends, the engine aborts the request.
        """
        self._trace.mark(Phase.PREFILL_BEGIN, attrs={"prompt_tokens": len(self.parsed.engine.prompt_token_ids)})
        if self._over is not None:
            failed = self._read_prompt(deadline) if self._wants_prompt else None
            yield [failed or self._finished(self._over, self._stream.flush())]
            return
        answer = self._link.submit(self.parsed.engine)
        try:
            while True:
                left = None if deadline is None else max(0.0, deadline - time.monotonic())
                batch = self._convert(answer.next(left))
                yield batch
                if batch and not isinstance(batch[-1], RunToken):
                    return
        finally:
            self._link.abort(self.request_id)

    def _read_prompt(self, deadline: float | None) -> RunFailed | None:
        """The answer is over, and another worker had the logprobs of its prompt: compute them without the answer.
        Raises TimeLimitExceeded."""
        request = self.parsed.engine
        if request.sampling.prompt_logprobs is None:
            return None
        one = replace(request.sampling, max_tokens=1, min_tokens=0, grammar=None)
        answer = self._link.submit(replace(request, sampling=one, first_index=0, output_so_far=()))
        try:
            while True:
                for event in answer.next(None if deadline is None else max(0.0, deadline - time.monotonic())):
                    if isinstance(event, Token):
                        self._prompt_logprobs = event.prompt
                    else:
                        return RunFailed(event.error) if isinstance(event, Failed) else None
        finally:
            self._link.abort(self.request_id)

    def hang_up(self) -> None:
        """Stop computing at once, because the client has gone."""
        self._link.abort(self.request_id)

    def _replay(self, token_ids: Sequence[int]) -> bool:
        """Process tokens that another worker delivered.  Their text was shown there, or is still held back in the same
        way.  Return True if they contain a stop string."""
        shown = [self._stream.push(token_id) for token_id in token_ids]
        for one in shown:
            self._shown(one.text)
        return any(one.stopped for one in shown)

    def _shown(self, text: str) -> Piece:
        return Piece(text) if self._calls is None else self._calls.push(text)

    def _convert(self, events: list[Event]) -> list[RunMessage]:
        messages: list[RunMessage] = []
        for event in events:
            if isinstance(event, Token):
                stopped = self._token(event, messages)
                if stopped:
                    break
            elif isinstance(event, Finished):
                messages.append(self._finished(event.reason, self._stream.flush(), event.hops))
            elif isinstance(event, Failed):
                messages.append(RunFailed(event.error))
        return messages

    def _token(self, event: Token, messages: list[RunMessage]) -> bool:
        if self._first:
            self._trace.mark(Phase.PREFILL_END, attrs={**(event.spent or {}), **_attrs(event.hops)})
            self._first, self._prompt_logprobs = False, event.prompt
        if not self._emits:
            return False
        self._completed = event.index + 1
        request = self.parsed.engine
        ends = event.token_id in request.sampling.stop_token_ids  # then it is no part of the text, as with vLLM
        shown = Shown("") if ends else self._stream.push(event.token_id)
        piece = self._shown(shown.text)
        adapter = request.adapter if event.index == request.first_index else ""
        logprob = self._logprob(event)
        messages.append(RunToken(event.index, event.token_id, piece.text, logprob, piece.calls, adapter))
        if shown.stopped:
            messages.append(self._finished("stop", ""))
        return shown.stopped

    def _finished(self, reason: str, held_back: str, changed: tuple[HopPath, ...] = ()) -> RunFinished:
        if not self._emits:
            reason, held_back = "prefilled" if self._prefills else "length", ""
        piece = self._shown(held_back)
        if self._calls is not None:
            piece = Piece(piece.text + self._calls.flush(), piece.calls)
            if self._calls.n_calls and reason == "stop" and not self.parsed.tools.is_named:
                reason = "tool_calls"
        self._trace.mark(Phase.RUN_END, attrs=_attrs(changed))
        self._trace.adopt(self._link.stops.since(self._trace.events[0].mono_ns))
        n_prompt = len(self.parsed.engine.prompt_token_ids)
        is_answer = reason not in ("abort", "prefilled")
        prompt = self._prompt() if self._wants_prompt and is_answer else None
        return RunFinished(reason, n_prompt, self._completed, piece.text, self._trace.events, piece.calls, prompt)

    def _prompt(self) -> RunPrompt:
        token_ids, sampling = self.parsed.engine.prompt_token_ids, self.parsed.engine.sampling
        is_known = sampling.prompt_logprobs is not None
        rows = list(zip(token_ids[1:], self._prompt_logprobs, strict=True)) if is_known else []
        ranked = () if self._n_ranked is None else tuple(self._ranked(i, one) for i, one in rows)
        if not self._echoes:
            return RunPrompt(token_ids, ranked=ranked)
        text = self._text.decode(token_ids)
        if sampling.logprobs is None:
            return RunPrompt(token_ids, text, ranked=ranked)
        found = [self._named(i, replace(one, top=one.top[: sampling.logprobs])) for i, one in rows]
        return RunPrompt(token_ids, text, tuple(map(self._text.token_text, token_ids)), (None, *found), ranked)

    def _ranked(self, token_id: int, found: Logprobs) -> tuple[RankedToken, ...]:
        others = [(i, p, rank) for rank, (i, p) in enumerate(found.top[: self._n_ranked], start=1) if i != token_id]
        every = [(token_id, found.logprob, found.rank), *others]
        return tuple(RankedToken(i, self._text.token_text(i), p, rank) for i, p, rank in every)

    def _logprob(self, event: Token) -> TokenLogprob | None:
        return None if event.logprobs is None else self._named(event.token_id, event.logprobs)

    def _named(self, token_id: int, found: Logprobs) -> TokenLogprob:
        name = self._text.token_text
        return TokenLogprob(name(token_id), found.logprob, tuple((name(i), p) for i, p in found.top))


def _attrs(paths: tuple[HopPath, ...]) -> dict[str, object]:
    return {hops.ATTRIBUTE: paths} if paths else {}
