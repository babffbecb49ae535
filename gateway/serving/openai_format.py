"""OpenAI's answer objects: whole, and as the chunks of a stream."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from gateway.serving.call import Call
from relay.protocol.messages import RunFinished, RunToken, TokenLogprob

Json = dict[str, Any]


def reply_id(call: Call) -> str:
    return f"{'chatcmpl' if call.endpoint == 'chat' else 'cmpl'}-{call.activation_id}"


def usage(finished: RunFinished) -> Json:
    prompt, completion = finished.prompt_tokens, finished.completion_tokens
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def aggregate(call: Call, tokens: Sequence[RunToken], finished: RunFinished) -> Json:
    """``chat.completion`` or ``text_completion``."""
    text = "".join(t.text for t in tokens) + finished.text
    choice: Json = {"index": 0, "finish_reason": finished.reason, "logprobs": _logprobs(call, tokens)}
    if call.endpoint == "chat":
        choice["message"] = {"role": "assistant", "content": text}
    else:
        choice["text"] = text
    kind = "chat.completion" if call.endpoint == "chat" else "text_completion"
    return {**_head(call, kind), "choices": [choice], "usage": usage(finished)}


class Chunks:
    """The chunks of one streamed answer as server-sent events, in order: each step gives one text.

    Most of what is ever sent are tokens without logprobs, so the JSON around their text is made once.
    """

    def __init__(self, call: Call, *, include_usage: bool) -> None:
        self._call, self._include_usage = call, include_usage
        self._chat = call.endpoint == "chat"
        self._head = _head(call, "chat.completion.chunk" if self._chat else "text_completion")
        self._begun, self._offset = False, 0  # the offset counts characters, for completions' logprobs
        mark = f'"{"content" if self._chat else "text"}": '
        before, mark, after = _event(self._delta("", None)).partition(f'{mark}""')
        self._before, self._after = before + mark[:-2], after

    def token(self, token: RunToken) -> str:
        """Return nothing for a token without text (half a character), unless its logprob is wanted."""
        if not token.text and token.logprob is None:
            return ""
        offset, self._offset = self._offset, self._offset + len(token.text)
        if token.logprob is None:
            return f"{self._role()}{self._before}{json.dumps(token.text, ensure_ascii=False)}{self._after}"
        return self._role() + _event(self._delta(token.text, _logprobs(self._call, (token,), offset)))

    def finished(self, finished: RunFinished) -> str:
        text = self._role()
        if finished.text:
            text += _event(self._delta(finished.text, None))
        text += _event(self._chunk({} if self._chat else "", None, finished.reason))
        if self._include_usage:
            text += _event({**self._head, "choices": [], "usage": usage(finished)})
        return text

    def _role(self) -> str:
        if self._begun or not self._chat:
            return ""
        self._begun = True
        return _event(self._chunk({"role": "assistant", "content": ""}, None, None))

    def _delta(self, text: str, logprobs: Json | None) -> Json:
        return self._chunk({"content": text} if self._chat else text, logprobs, None)

    def _chunk(self, delta: Json | str, logprobs: Json | None, reason: str | None) -> Json:
        body = {"delta": delta} if self._chat else {"text": delta}
        chunk = {**self._head, "choices": [{"index": 0, **body, "logprobs": logprobs, "finish_reason": reason}]}
        return {**chunk, "usage": None} if self._include_usage else chunk


def _event(plain: Json) -> str:
    return f"data: {json.dumps(plain, ensure_ascii=False)}\n\n"


def _head(call: Call, kind: str) -> Json:
    model = call.payload.get("model", "")
    return {"id": reply_id(call), "object": kind, "created": call.received_ms // 1000, "model": model}


def _logprobs(call: Call, tokens: Sequence[RunToken], offset: int = 0) -> Json | None:
    given = [t.logprob for t in tokens if t.logprob is not None]
    if not given:
        return None
    if call.endpoint == "chat":
        return {"content": [_chat_logprob(p) for p in given], "refusal": None}
    offsets = []
    for p in given:
        offsets.append(offset)
        offset += len(p.token)
    return {
        "tokens": [p.token for p in given],
        "token_logprobs": [p.logprob for p in given],
        "top_logprobs": [dict(p.top) for p in given],
        "text_offset": offsets,
    }


def _chat_logprob(p: TokenLogprob) -> Json:
    top = [_named(token, logprob) for token, logprob in p.top]
    return {**_named(p.token, p.logprob), "top_logprobs": top}


def _named(token: str, logprob: float) -> Json:
    return {"token": token, "logprob": logprob, "bytes": list(token.encode())}
