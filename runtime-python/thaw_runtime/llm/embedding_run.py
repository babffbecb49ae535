"""One request for embeddings: converts its texts to token ids, and the engine's vectors to messages of /run."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from relay.protocol.messages import LlmRun, RunFailed, RunFinished, RunVectors
from thaw.errors import BadParameter, BadRequest
from thaw.tracing.trace import Phase
from thaw_runtime.engine.link import EngineLink
from thaw_runtime.engine.protocol import Embedded, EmbedRequest, Embeds, Event, Failed
from thaw_runtime.llm.model_text import CONTEXT_HINT, ModelText
from thaw_runtime.llm.openai_request import check_ids
from thaw_runtime.llm.runs import RunMessage
from thaw_runtime.process.start_trace import StartTrace

_TOKENS_AT_ONCE: Final = 128 * 1024
"""The most tokens in a message to the engine, because messages are bounded; a longer text gets its own message."""
_VECTORS_AT_ONCE: Final = 64
"""The most vectors in a message to the gateway."""
_TEXTS_AT_ONCE: Final = 256
"""The most texts that one call tokenises."""


class EmbeddingRun:
    """Has the interface of a RunStream.  All texts are checked before the first one is computed."""

    def __init__(
        self,
        link: EngineLink,
        text: ModelText,
        run: LlmRun,
        request_id: str,
        max_model_len: int,
        trace: StartTrace,
        embeds: Embeds,
        cache_salt: str = "",
    ) -> None:
        """Raises BadRequest."""
        self._link, self._trace, self.request_id, self._cache_salt = link, trace, request_id, cache_salt
        self._dimensions = _dimensions(run.body, embeds)
        self._prompts = _prompts(run.body.get("input"), text, max_model_len)
        self._left, self._running = False, ""

    def messages(self, deadline: float | None) -> Iterator[list[RunMessage]]:
        """See RunStream."""
        n_tokens = sum(map(len, self._prompts))
        self._trace.mark(Phase.PREFILL_BEGIN, attrs={"prompt_tokens": n_tokens})
        first = 0
        while first < len(self._prompts):
            part = self._part(first)
            for events in self._computed(first, part, deadline):
                if isinstance(events[-1], Failed):
                    yield [RunFailed(events[-1].error)]
                    return
                vectors = [(first + e.index, e.vector) for e in events if isinstance(e, Embedded)]
                batches = range(0, len(vectors), _VECTORS_AT_ONCE)
                yield [RunVectors(tuple(vectors[i : i + _VECTORS_AT_ONCE])) for i in batches]
            if self._left:
                yield [RunFinished("abort", n_tokens, 0)]
                return
            first += len(part)
        self._trace.mark(Phase.PREFILL_END)
        self._trace.mark(Phase.RUN_END)
        self._trace.adopt(self._link.stops.since(self._trace.events[0].mono_ns))
        yield [RunFinished("stop", n_tokens, 0, "", self._trace.events)]

    def _part(self, first: int) -> tuple[tuple[int, ...], ...]:
        end, n_tokens = first, 0
        while end < len(self._prompts) and (end == first or n_tokens + len(self._prompts[end]) <= _TOKENS_AT_ONCE):
            n_tokens += len(self._prompts[end])
            end += 1
        return tuple(self._prompts[first:end])

    def _computed(self, first: int, part: tuple[tuple[int, ...], ...], deadline: float | None) -> Iterator[list[Event]]:
        """Yield the engine's events for some texts, until all are computed.  Raises TimeLimitExceeded."""
        name = f"{self.request_id}-{first}"
        if self._left:
            return
        answer = self._link.submit(EmbedRequest(name, part, self._dimensions, self._cache_salt))
        self._running = name
        try:
            while True:
                events = answer.next(None if deadline is None else max(0.0, deadline - time.monotonic()))
                yield events
                if not isinstance(events[-1], Embedded):
                    return
        finally:
            self._link.abort(name)

    def hang_up(self) -> None:
        """Stop computing at once, because the client has gone."""
        self._left = True
        self._link.abort(self._running)


def _prompts(asked: Any, text: ModelText, max_model_len: int) -> list[tuple[int, ...]]:
    """Return the input as lists of token ids.  The input is a text, token ids, or a list of either.  Raises
    BadRequest."""
    one = isinstance(asked, str) or (isinstance(asked, list) and all(type(t) is int for t in asked))
    parts: Sequence[Any] = [asked] if one else asked
    prompts: list[tuple[int, ...]] = []
    for i, part in enumerate(parts):
        if isinstance(part, str):
            text.check_length(part, max_model_len, "input" if one else f"input[{i}]")
    for at in range(0, len(parts), _TEXTS_AT_ONCE):
        prompts += _encoded(parts[at : at + _TEXTS_AT_ONCE], text)
    for i, prompt in enumerate(prompts):
        where = "input" if one else f"input[{i}]"
        if not prompt:
            raise BadParameter(where, "it has no tokens")
        if len(prompt) > max_model_len:
            raise BadRequest(
                f"This model's maximum context length is {max_model_len} tokens. However, {where} has {len(prompt)} "
                "tokens. Please reduce its length.",
                hint=CONTEXT_HINT,
            )
        if not isinstance(parts[i], str):
            check_ids(prompt, text, where)
    return prompts


def _encoded(parts: Sequence[Any], text: ModelText) -> list[tuple[int, ...]]:
    texts = iter(text.encode_each([p for p in parts if isinstance(p, str)]))
    return [next(texts) if isinstance(p, str) else tuple(p) for p in parts]


def _dimensions(body: Mapping[str, Any], embeds: Embeds) -> int:
    """Return the size of the vectors to request from the engine; 0 is the model's own size.  Raises BadParameter."""
    wanted = body.get("dimensions")
    if wanted is None:
        return 0
    if not embeds.matryoshka:
        raise BadParameter(
            "dimensions", f"this model has vectors of {embeds.size} dimensions and no shorter ones: leave it out"
        )
    allowed = ", ".join(map(str, embeds.dimensions)) or f"1 to {embeds.size}"
    if not 1 <= wanted <= embeds.size or (embeds.dimensions and wanted not in embeds.dimensions):
        raise BadParameter("dimensions", f"this model has vectors of {allowed} dimensions, not of {wanted:.0f}")
    return int(wanted)
