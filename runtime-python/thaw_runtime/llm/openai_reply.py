"""The aggregated OpenAI object, for callers that call the action like an ordinary one."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from relay.protocol.messages import RunFinished, RunToken, TokenLogprob


def aggregate(
    endpoint: str, model: str, reply_id: str, tokens: Sequence[RunToken], finished: RunFinished
) -> dict[str, Any]:
    """A ``chat.completion`` or ``text_completion`` object in the form that OpenAI's clients read."""
    text = "".join(t.text for t in tokens) + finished.text
    logprobs = [t.logprob for t in tokens if t.logprob is not None]
    usage = {
        "prompt_tokens": finished.prompt_tokens,
        "completion_tokens": finished.completion_tokens,
        "total_tokens": finished.prompt_tokens + finished.completion_tokens,
    }
    chat = endpoint == "chat"
    choice: dict[str, Any] = {"index": 0, "finish_reason": finished.reason}
    if chat:
        choice |= {"message": {"role": "assistant", "content": text}, "logprobs": _chat_logprobs(logprobs)}
    else:
        choice |= {"text": text, "logprobs": _completion_logprobs(logprobs)}
    return {
        "id": f"{'chatcmpl' if chat else 'cmpl'}-{reply_id}",
        "object": "chat.completion" if chat else "text_completion",
        "created": int(time.time()),
        "model": model,
        "choices": [choice],
        "usage": usage,
    }


def _chat_logprobs(logprobs: Sequence[TokenLogprob]) -> dict[str, Any] | None:
    if not logprobs:
        return None
    return {
        "content": [
            {**_named(p.token, p.logprob), "top_logprobs": [_named(token, value) for token, value in p.top]}
            for p in logprobs
        ]
    }


def _named(token: str, logprob: float) -> dict[str, Any]:
    return {"token": token, "logprob": logprob, "bytes": list(token.encode())}


def _completion_logprobs(logprobs: Sequence[TokenLogprob]) -> dict[str, Any] | None:
    if not logprobs:
        return None
    offsets, at = [], 0
    for p in logprobs:
        offsets.append(at)
        at += len(p.token)
    return {
        "tokens": [p.token for p in logprobs],
        "token_logprobs": [p.logprob for p in logprobs],
        "top_logprobs": [dict(p.top) for p in logprobs],
        "text_offset": offsets,
    }
