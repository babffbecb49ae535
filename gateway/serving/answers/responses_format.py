"""The object of /v1/responses, and the events in which a stream of it comes.

Both are made by the same steps, so the last event of a stream contains the same object as an answer that is not
streamed::

    created, in_progress
        message:        item.added, part.added, text.delta …,     text.done, part.done, item.done
        function_call:  item.added,             arguments.delta …, arguments.done,      item.done
    completed | incomplete | failed
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import count
from typing import Any, Final

from gateway.serving.answers.openai_format import call_id, chat_logprob
from gateway.serving.answers.sse_comment import sse_comment
from gateway.serving.call import Call
from relay.protocol.messages import CallDelta, RunFinished, RunToken
from thaw.clock import wall_ms

Json = dict[str, Any]

_REPEATED: Final[Mapping[str, Any]] = {
    **dict.fromkeys(("instructions", "max_output_tokens", "max_tool_calls", "temperature", "top_p", "user")),
    **dict.fromkeys(("prompt_cache_key", "prompt_cache_retention", "safety_identifier")),
    "metadata": {},
    "parallel_tool_calls": True,
    "reasoning": {"effort": None, "summary": None},
    "service_tier": "default",
    "text": {"format": {"type": "text"}},
    "tool_choice": "auto",
    "tools": [],
    "top_logprobs": 0,
}
"""The fields of its request that a response repeats, with their values if the request does not have them."""
_ALWAYS: Final = {"background": False, "store": False, "truncation": "disabled", "previous_response_id": None}


def repeated(body: Mapping[str, Any]) -> Json:
    """The part of a request's body that its response repeats."""
    return {name: usual if body.get(name) is None else body[name] for name, usual in _REPEATED.items()}


class ResponseEvents:
    """One response while it comes.  Takes the steps of its run, in order."""

    def __init__(self, call: Call, said: Mapping[str, Any]) -> None:
        self._call, self._said = call, said
        self._numbers = count()
        self._items: list[Json] = []
        self._is_open = False  # the last item
        self._pieces: list[str] = []  # the open item's text, or its arguments
        self._text_logprobs: list[Json] = []  # those of the open item's text
        self._logprobs: list[Json] = []  # those of tokens whose text is held back
        self._status = ""
        self._ended: Json = {}  # fields that are known only at the end

    def token(self, token: RunToken) -> str:
        return _text(self.of_token(token))

    def over(self, finished: RunFinished) -> str:
        return _text(self.of_end(finished))

    def comment(self, sentence: str) -> str:
        return sse_comment(sentence)

    def failed(self, error: Json) -> str:
        """``error``: OpenAI's object."""
        events = self._begun()
        self._status, said = "failed", error["error"]
        code = "server_error" if said["type"] == "server_error" else "invalid_prompt"
        self._ended = {"error": {"code": code, "message": said["message"]}}
        return _text([*events, self._event("response.failed", response=self.whole())])

    def of_token(self, token: RunToken) -> list[Json]:
        """The events of a token; it may have none."""
        if token.logprob is not None and not token.calls:
            self._logprobs.append(chat_logprob(token.logprob))
        return [*self._begun(), *self._of_piece(token.text, token.calls)]

    def of_end(self, finished: RunFinished) -> list[Json]:
        events = [*self._begun(), *self._of_piece(finished.text, finished.calls)]
        if not self._items:
            events += self._open_message()
        self._status = "incomplete" if finished.reason == "length" else "completed"
        events += self._close(self._status)
        n_in, n_out = finished.prompt_tokens, finished.completion_tokens
        self._ended = {
            "completed_at": wall_ms() // 1000,
            "incomplete_details": {"reason": "max_output_tokens"} if self._status == "incomplete" else None,
            "usage": {
                "input_tokens": n_in,
                "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
                "output_tokens": n_out,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": n_in + n_out,
            },
        }
        return [*events, self._event(f"response.{self._status}", response=self.whole())]

    def whole(self) -> Json:
        """The response as it is now."""
        return {
            "id": f"resp_{self._call.activation_id}",
            "object": "response",
            "created_at": self._call.received_ms // 1000,
            "status": self._status,
            "error": None,
            "incomplete_details": None,
            "model": self._call.payload.get("model", ""),
            "output": [*self._items[:-1], self._filled()] if self._is_open else list(self._items),
            **self._said,
            **_ALWAYS,
            "usage": None,
            **self._ended,
        }

    def _begun(self) -> list[Json]:
        if self._status:
            return []
        self._status = "in_progress"
        kinds = ("response.created", "response.in_progress")
        return [self._event(kind, response=self.whole()) for kind in kinds]

    def _of_piece(self, text: str, parts: tuple[CallDelta, ...]) -> list[Json]:
        """Return the events of one token.  Its text comes behind the call that it ends, and before the calls that it
        begins."""
        begun = next((i for i, part in enumerate(parts) if part.name), len(parts))
        return [*self._of_calls(parts[:begun]), *self._of_text(text), *self._of_calls(parts[begun:])]

    # text ------------------------------------------------------------------------------------------------------------

    def _of_text(self, text: str) -> list[Json]:
        if not text:
            return []
        is_message = self._is_open and self._items[-1]["type"] == "message"
        events = [] if is_message else [*self._close("completed"), *self._open_message()]
        logprobs, self._logprobs = self._logprobs, []
        self._pieces.append(text)
        self._text_logprobs += logprobs
        return [*events, self._in_part("response.output_text.delta", delta=text, logprobs=logprobs)]

    def _open_message(self) -> list[Json]:
        empty = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        item = {"id": self._id("msg"), "type": "message", "status": "in_progress", "role": "assistant", "content": []}
        return [self._opened(item), self._in_part("response.content_part.added", part=empty)]

    def _in_part(self, kind: str, **fields: Any) -> Json:
        return self._in_item(kind, content_index=0, **fields)

    # calls -----------------------------------------------------------------------------------------------------------

    def _of_calls(self, parts: tuple[CallDelta, ...]) -> list[Json]:
        events: list[Json] = []
        for part in parts:
            if part.name:
                self._logprobs = []  # they belong to the text that began the call
                events += self._close("completed")
                events.append(self._opened(self._new_call(part)))
            if part.arguments:
                self._pieces.append(part.arguments)
                events.append(self._in_item("response.function_call_arguments.delta", delta=part.arguments))
        return events

    def _new_call(self, part: CallDelta) -> Json:
        item = {"id": self._id("fc"), "type": "function_call", "status": "in_progress", "name": part.name}
        return {**item, "call_id": call_id(self._call, part.index), "arguments": ""}

    # items -----------------------------------------------------------------------------------------------------------

    def _id(self, kind: str) -> str:
        return f"{kind}_{self._call.activation_id}{len(self._items):02d}"

    def _opened(self, item: Json) -> Json:
        self._items.append(item)
        self._is_open, self._pieces, self._text_logprobs = True, [], []
        return self._event("response.output_item.added", output_index=len(self._items) - 1, item=item)

    def _close(self, status: str) -> list[Json]:
        if not self._is_open:
            return []
        item = self._items[-1] = {**self._filled(), "status": status}
        self._is_open = False
        if item["type"] == "message":
            (part,) = item["content"]
            text = {"text": part["text"], "logprobs": part["logprobs"]}
            ends = [
                self._in_part("response.output_text.done", **text),
                self._in_part("response.content_part.done", part=part),
            ]
        else:
            said = {"name": item["name"], "arguments": item["arguments"]}
            ends = [self._in_item("response.function_call_arguments.done", **said)]
        return [*ends, self._event("response.output_item.done", output_index=len(self._items) - 1, item=item)]

    def _filled(self) -> Json:
        """The open item as far as it came.  It is put together only when someone reads it: a token adds to a list."""
        item, text = self._items[-1], "".join(self._pieces)
        if item["type"] == "function_call":
            return {**item, "arguments": text}
        part = {"type": "output_text", "text": text, "annotations": [], "logprobs": self._text_logprobs}
        return {**item, "content": [part]}

    def _in_item(self, kind: str, **fields: Any) -> Json:
        return self._event(kind, item_id=self._items[-1]["id"], output_index=len(self._items) - 1, **fields)

    def _event(self, kind: str, **fields: Any) -> Json:
        return {"type": kind, "sequence_number": next(self._numbers), **fields}


def _text(events: list[Json]) -> str:
    return "".join(f"event: {e['type']}\ndata: {json.dumps(e, ensure_ascii=False)}\n\n" for e in events)
