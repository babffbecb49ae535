"""Reads a streamed chat answer: turns server-sent events into pieces of text and the times of their arrival."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from thaw.cli.platform_api.client import ApiError, Client
from thaw.errors import Unavailable


@dataclass(frozen=True, slots=True)
class Answer:
    """``arrivals_s`` are the seconds from the request's start to the arrival of each piece."""

    text: str
    activation_id: str
    arrivals_s: tuple[float, ...]
    finish_reason: str
    completion_tokens: int | None

    @property
    def ttft_s(self) -> float:
        return self.arrivals_s[0] if self.arrivals_s else 0.0

    @property
    def tpot_s(self) -> float | None:
        """Seconds per piece after the first; None for an answer of one piece or none."""
        n = len(self.arrivals_s)
        return (self.arrivals_s[-1] - self.arrivals_s[0]) / (n - 1) if n > 1 else None


def ask(
    client: Client, model: str, messages: Sequence[dict[str, str]], on_text: Callable[[str], None], **options: Any
) -> Answer:
    """Stream one answer.  Raises ApiError, and Unavailable when the connection breaks before the answer ends."""
    body = {
        "model": model,
        "messages": list(messages),
        "stream": True,
        "stream_options": {"include_usage": True},
        **options,
    }
    pieces: list[str] = []
    arrivals: list[float] = []
    reason, tokens = "", None
    started = time.monotonic()
    with client.stream("/v1/chat/completions", body) as response:
        activation_id = response.headers.get("X-Openwhisk-Activation-Id", "")
        for event in events(response.iter_lines()):
            if "error" in event:
                raise _stream_error(event["error"])
            tokens = (event.get("usage") or {}).get("completion_tokens", tokens)
            for choice in event.get("choices", []):
                reason = choice.get("finish_reason") or reason
                text = (choice.get("delta") or {}).get("content") or ""
                if text:
                    arrivals.append(time.monotonic() - started)
                    pieces.append(text)
                    on_text(text)
    return Answer("".join(pieces), activation_id, tuple(arrivals), reason, tokens)


def events(lines: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    """The JSON of each ``data:`` line up to ``[DONE]``.  Raises Unavailable when ``[DONE]`` does not come."""
    for line in lines:
        field, _, value = line.decode(errors="replace").partition(":")
        value = value.strip()
        if field != "data" or not value:
            continue  # a comment keeps the connection alive; other fields are not used here
        if value == "[DONE]":
            return
        try:
            yield json.loads(value)
        except ValueError as e:
            raise Unavailable(f"the answer cannot be read: {value[:80]!r}", hint="is this a Thaw gateway?") from e
    raise Unavailable("the connection broke before the answer ended", hint="thaw activation list shows how it ended")


def _stream_error(error: Any) -> ApiError:
    message = error.get("message", "the answer failed") if isinstance(error, dict) else str(error)
    hint = error.get("hint") if isinstance(error, dict) else None
    return ApiError(502, str(message), body=error, hint=str(hint or "thaw activation explain --last"))
