"""OpenAI's answer objects: whole, and as the chunks of a stream."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from gateway.serving.answers.event_ids import EventId, Progress
from gateway.serving.answers.sse_comment import sse_comment
from gateway.serving.call import Call
from relay.protocol.messages import (
    TEXT_ENDPOINTS,
    CallDelta,
    RankedToken,
    RunFinished,
    RunPrompt,
    RunToken,
    TokenLogprob,
)
from relay.protocol.token_names import n_characters, token_bytes

Json = dict[str, Any]


def reply_id(call: Call) -> str:
    return f"{'chatcmpl' if call.endpoint == 'chat' else 'cmpl'}-{call.activation_id}"


def usage(finished: RunFinished) -> Json:
    prompt, completion = finished.prompt_tokens, finished.completion_tokens
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def aggregate(call: Call, tokens: Sequence[RunToken], finished: RunFinished) -> Json:
    """Return a ``chat.completion`` or ``text_completion``, or vLLM's object for a text's tokens or for tokens' text."""
    if call.endpoint in TEXT_ENDPOINTS:
        return _of_text(call, finished)
    text = "".join(t.text for t in tokens) + finished.text
    choice: Json = {"index": 0, "finish_reason": finished.reason, "logprobs": _logprobs(call, tokens)}
    if call.endpoint == "chat":
        called = _whole_calls(call, [*(part for t in tokens for part in t.calls), *finished.calls])
        choice["message"] = {"role": "assistant", "content": (text or None) if called else text}
        if called:
            choice["message"]["tool_calls"] = called
    else:
        choice["text"] = text
    kind = "chat.completion" if call.endpoint == "chat" else "text_completion"
    of_prompt: Json = {}
    if finished.prompt is not None:
        of_prompt = _add_prompt(call, choice, tokens, finished.prompt)
    return {**_head(call, kind), "choices": [choice], "usage": usage(finished), **of_prompt}


def _of_text(call: Call, finished: RunFinished) -> Json:
    prompt = finished.prompt or RunPrompt(())
    if call.endpoint == "detokenize":
        return {"prompt": prompt.text}
    config = call.action.config
    found: Json = {"count": len(prompt.token_ids), "max_model_len": config.engine.max_model_len if config else 0}
    wants_texts = call.payload.get("return_token_strs")
    return found | {"tokens": list(prompt.token_ids), "token_strs": list(prompt.texts) if wants_texts else None}


def _add_prompt(call: Call, choice: Json, tokens: Sequence[RunToken], prompt: RunPrompt) -> Json:
    """Put the information about the prompt that the request asked for into the choice.  Return the fields that belong
    beside the choices."""
    if call.payload.get("echo"):
        choice["text"] = prompt.text + choice["text"]
        if prompt.logprobs:
            choice["logprobs"] = _echoed(choice["logprobs"], prompt)
    found: Json = {}
    if call.payload.get("prompt_logprobs") is not None:
        found["prompt_logprobs"] = [None, *map(_ranked, prompt.ranked)]
    if call.payload.get("return_token_ids"):
        choice["token_ids"] = [t.token_id for t in tokens]
        found["prompt_token_ids"] = list(prompt.token_ids)
    if call.endpoint == "chat":
        return found
    choice.update(found)
    return {}


def _ranked(tokens: Sequence[RankedToken]) -> Json:
    """As vLLM has it."""
    return {str(t.token_id): {"logprob": _finite(t.logprob), "rank": t.rank, "decoded_token": t.token} for t in tokens}


def _echoed(of_answer: Json | None, prompt: RunPrompt) -> Json:
    """The logprobs of a completion that begins with its prompt; nothing precedes its first token."""
    offsets = [0, *accumulate(map(n_characters, prompt.texts))]
    rest = of_answer or {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    own = [None if p is None else _finite(p.logprob) for p in prompt.logprobs]
    tops = [None if p is None else {token: _finite(q) for token, q in p.top} for p in prompt.logprobs]
    return {
        "tokens": [*prompt.texts, *rest["tokens"]],
        "token_logprobs": [*own, *rest["token_logprobs"]],
        "top_logprobs": [*tops, *rest["top_logprobs"]],
        "text_offset": [*offsets[:-1], *(offsets[-1] + at for at in rest["text_offset"])],
    }


@dataclass(frozen=True, slots=True)
class Part:
    """Choice ``index`` of an answer whose id is that of ``head``."""

    index: int
    head: Call


class Chunks:
    """The chunks of one streamed answer as server-sent events, in order: each step gives one text.

    Each event that carries a token or comes after the last one has an id (event_ids.py), and those that the client has
    already are left out.  Most events are tokens without logprobs, so the JSON around their text is made once.
    """

    def __init__(self, call: Call, ids: str | None, had: EventId | None = None, *, part: Part | None = None) -> None:
        """``ids``: the part that all ids share; None: events have no ids.  ``had``: the last event that the client
        has."""
        options = call.payload.get("stream_options") or {}
        self._call, self._include_usage = call, bool(options.get("include_usage"))
        self._chat = call.endpoint == "chat"
        self._index, self._is_part = 0 if part is None else part.index, part is not None
        self._head = _head(part.head if part else call, "chat.completion.chunk" if self._chat else "text_completion")
        self._ids, self._progress = ids, Progress(had)
        self.has_id = False  # an event with an id was given out
        self._begun, self._offset = had is not None, 0  # the offset counts characters, for completions' logprobs
        mark = f'"{"content" if self._chat else "text"}": '
        before, mark, after = _event(self._delta("", None)).partition(f'{mark}""')
        self._before, self._after = before + mark[:-2], after

    def token(self, token: RunToken) -> str:
        """Return nothing for a token without text (half a character), unless its logprob is wanted.  Raises
        OtherAnswer."""
        lacking = self._progress.token(token.token_id)
        offset, self._offset = self._offset, self._offset + len(token.text)
        if not lacking or not (token.text or token.logprob is not None or token.calls):
            return ""
        head = f"{self._role()}{self._id(token.index)}"
        if token.calls:
            return head + self._call_parts(token)
        if token.logprob is None:
            return f"{head}{self._before}{json.dumps(token.text, ensure_ascii=False)}{self._after}"
        return head + _event(self._delta(token.text, _logprobs(self._call, (token,), offset)))

    def finished(self, finished: RunFinished) -> str:
        """Raises OtherAnswer."""
        last: list[Json | None] = [
            self._delta(finished.text, None, finished.calls) if finished.text or finished.calls else None,
            self._chunk({} if self._chat else "", None, finished.reason),
            {**self._head, "choices": [], "usage": usage(finished)}
            if self._include_usage and not self._is_part
            else None,
        ]
        text = self._role()
        for number, chunk in enumerate(last):
            if self._progress.lacks_final(number) and chunk is not None:
                text += self._id(self._progress.n_tokens + number) + _event(chunk)
        return text

    def over(self, finished: RunFinished) -> str:
        """The last text of an answer of one choice.  Raises OtherAnswer."""
        return self.finished(finished) + "data: [DONE]\n\n"

    def failed(self, error: Json) -> str:
        """``error``: OpenAI's object."""
        return _event(error)

    def comment(self, sentence: str) -> str:
        return sse_comment(sentence, has_id=self.has_id)

    def _call_parts(self, token: RunToken) -> str:
        logprobs = None if token.logprob is None else _logprobs(self._call, (token,))
        return _event(self._delta(token.text, logprobs, token.calls))

    def _id(self, index: int) -> str:
        if self._ids is None:
            return ""
        self.has_id = True
        return f"id: {self._ids}:{index}.{self._progress.checksum:08x}\n"

    def _role(self) -> str:
        if self._begun or not self._chat:
            return ""
        self._begun = True
        return _event(self._chunk({"role": "assistant", "content": ""}, None, None))

    def _delta(self, text: str, logprobs: Json | None, calls: Sequence[CallDelta] = ()) -> Json:
        delta: Json = {"content": text} if text or not calls else {}
        if calls:
            delta["tool_calls"] = [_call_part(self._call, part) for part in calls]
        return self._chunk(delta if self._chat else text, logprobs, None)

    def _chunk(self, delta: Json | str, logprobs: Json | None, reason: str | None) -> Json:
        body = {"delta": delta} if self._chat else {"text": delta}
        chunk = {
            **self._head,
            "choices": [{"index": self._index, **body, "logprobs": logprobs, "finish_reason": reason}],
        }
        return {**chunk, "usage": None} if self._include_usage else chunk


def call_id(call: Call, index: int) -> str:
    """The same for every computation of the answer."""
    return f"call_{call.activation_id[:24]}{index:02d}"


def _call_part(call: Call, part: CallDelta) -> Json:
    if not part.name:
        return {"index": part.index, "function": {"arguments": part.arguments}}
    function = {"name": part.name, "arguments": part.arguments}
    return {"index": part.index, "id": call_id(call, part.index), "type": "function", "function": function}


def _whole_calls(call: Call, parts: Sequence[CallDelta]) -> list[Json]:
    made: list[Json] = []
    for part in parts:
        if part.index == len(made):
            function = {"name": part.name, "arguments": ""}
            made.append({"id": call_id(call, part.index), "type": "function", "function": function})
        made[part.index]["function"]["arguments"] += part.arguments
    return made


def _event(plain: Json) -> str:
    return f"data: {json.dumps(plain, ensure_ascii=False)}\n\n"


def usage_event(head: Call, finished: Sequence[RunFinished], n_each: int) -> str:
    """The usage of a streamed answer of several choices, ``n_each`` of each prompt, if its request asks for it."""
    if not (head.payload.get("stream_options") or {}).get("include_usage"):
        return ""
    prompt = sum(one.prompt_tokens for one in finished[::n_each])
    completion = sum(one.completion_tokens for one in finished)
    total = {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
    kind = "chat.completion.chunk" if head.endpoint == "chat" else "text_completion"
    return _event({**_head(head, kind), "choices": [], "usage": total})


def chunk_fields(body: Json) -> Json:
    """All that the chunks of an answer need of its request's body, which may have megabytes."""
    include_usage = bool((body.get("stream_options") or {}).get("include_usage"))
    return {"model": body.get("model", ""), "stream_options": {"include_usage": include_usage}}


def _head(call: Call, kind: str) -> Json:
    model = call.payload.get("model", "")
    return {"id": reply_id(call), "object": kind, "created": call.received_ms // 1000, "model": model}


def _logprobs(call: Call, tokens: Sequence[RunToken], offset: int = 0) -> Json | None:
    given = [t.logprob for t in tokens if t.logprob is not None]
    if not given:
        return None
    if call.endpoint == "chat":
        return {"content": [chat_logprob(p) for p in given], "refusal": None}
    offsets = []
    for p in given:
        offsets.append(offset)
        offset += n_characters(p.token)
    return {
        "tokens": [p.token for p in given],
        "token_logprobs": [_finite(p.logprob) for p in given],
        "top_logprobs": [{token: _finite(logprob) for token, logprob in p.top} for p in given],
        "text_offset": offsets,
    }


def chat_logprob(p: TokenLogprob) -> Json:
    top = [_named(token, logprob) for token, logprob in p.top]
    return {**_named(p.token, p.logprob), "top_logprobs": top}


def _named(token: str, logprob: float) -> Json:
    return {"token": token, "logprob": _finite(logprob), "bytes": list(token_bytes(token))}


def _finite(logprob: float) -> float:
    """JSON has no -inf, which a token has that is not allowed; OpenAI's API says -9999."""
    return max(-9999.0, logprob)
