"""One streamed OpenAI request.  The same code measures every system, from socket to socket."""

from __future__ import annotations

import base64
import http.client
import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

_TIMEOUT_S = 600.0


@dataclass(frozen=True, slots=True)
class Streamed:
    """``arrivals_s`` are the arrival times of the pieces of text, in seconds since just before the request was sent."""

    text: str
    arrivals_s: tuple[float, ...]
    completion_tokens: int
    activation_id: str

    @property
    def ttft_s(self) -> float:
        return self.arrivals_s[0]


class Caller:
    """A kept-alive connection to the chat endpoint of one server, for ``model``.  It is not thread-safe."""

    def __init__(self, url: str, model: str, auth: str = "") -> None:
        self._host = urlsplit(url).netloc
        self._model = model
        self._headers = {"Content-Type": "application/json"}
        if auth:
            self._headers["Authorization"] = "Basic " + base64.b64encode(auth.encode()).decode()
        self._http = http.client.HTTPConnection(self._host, timeout=_TIMEOUT_S)

    def connect(self) -> None:
        self._http.connect()

    def close(self) -> None:
        self._http.close()

    def chat(self, prompt: str, max_tokens: int, **extra: Any) -> Streamed:
        """Ask for a greedy answer.  Raises SystemExit when the server fails to answer: nothing was measured then."""
        body = {
            "model": self._model,
            "messages": [{"role": "user", "content": prompt}],
            "stream": True,
            "temperature": 0,
            "max_tokens": max_tokens,
            "stream_options": {"include_usage": True},
            **extra,
        }
        data = json.dumps(body).encode()
        began = time.monotonic()
        self._http.request("POST", "/v1/chat/completions", data, self._headers)
        response = self._http.getresponse()
        if response.status != 200:
            raise SystemExit(f"{self._host} answered {response.status}: {response.read()[:400]!r}")
        arrivals, pieces, tokens = [], [], 0
        for now, event in _events(response):
            if "error" in event:
                raise SystemExit(f"{self._host}: {event['error']}")
            tokens = (event.get("usage") or {}).get("completion_tokens", tokens)
            text = "".join(_text(c) for c in event.get("choices", ()))
            if text:
                arrivals.append(now - began)
                pieces.append(text)
        if not arrivals:
            raise SystemExit(f"{self._host} streamed no text")
        activation_id = response.getheader("X-OpenWhisk-Activation-Id") or ""
        return Streamed("".join(pieces), tuple(arrivals), tokens, activation_id)


def _text(choice: Mapping[str, Any]) -> str:
    return str((choice.get("delta") or {}).get("content") or choice.get("text") or "")


def _events(response: http.client.HTTPResponse) -> Iterator[tuple[float, dict[str, Any]]]:
    while line := response.readline():
        if line.startswith(b"data:"):
            now, value = time.monotonic(), line[5:].strip()
            if value != b"[DONE]":
                yield now, json.loads(value)
