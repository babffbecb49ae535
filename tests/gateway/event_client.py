"""A client of streamed answers that reconnects: it knows the events that it has, with their ids."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import requests

from tests.gateway.conftest import KEY


class Gateway(Protocol):
    @property
    def url(self) -> str: ...


@dataclass(frozen=True, slots=True)
class Event:
    id: str  # "" for none
    data: str

    @property
    def index(self) -> int:
        return int(self.id.partition(":")[2].partition(".")[0])

    @property
    def text(self) -> str:
        choices = json.loads(self.data)["choices"] if self.data != "[DONE]" else []
        return "".join(c["delta"].get("content") or "" for c in choices)


class Client:
    def __init__(self, key: str = KEY, **body: Any) -> None:
        self.events: list[Event] = []
        self.comments: list[str] = []
        self.body = {
            "model": "chat",
            "messages": [{"role": "user", "content": "hi"}],
            "stream": True,
            "max_tokens": 6,
            "stream_options": {"include_usage": True},
            **body,
        }
        self.reply = requests.Response()
        self._key = key

    @property
    def last_id(self) -> str:
        return next((e.id for e in reversed(self.events) if e.id), "")

    @property
    def text(self) -> str:
        return "".join(e.text for e in self.events)

    @property
    def indexes(self) -> list[int]:
        return [e.index for e in self.events if e.id]

    @property
    def seen(self) -> list[tuple[str, str]]:
        """The events without the parts that differ between two activations.  What is left of an id is the token's
        number and the checksum of all tokens up to it."""
        return [(e.id.rpartition(":")[2], e.text) for e in self.events]

    def ask(self, gateway: Gateway, *, timeout_s: float = 30, **headers: str) -> requests.Response:
        """Send the request, with the id of the last event that the client has."""
        known = {"Last-Event-ID": self.last_id} if self.last_id else {}
        sent = {"Authorization": f"Bearer {self._key}", "X-Thaw-Resumable": "1", **known, **headers}
        url = f"{gateway.url}/v1/chat/completions"
        self.reply = requests.post(url, json=self.body, headers=sent, stream=True, timeout=timeout_s)
        if self.reply.status_code == 200:
            self._lines = self._read()
        return self.reply

    def ask_soon(self, gateway: Gateway) -> threading.Thread:
        """Ask on a thread, which ends when the answer begins: with the next event that the client lacks."""
        asking = threading.Thread(target=self.ask, args=(gateway,), daemon=True)
        asking.start()
        return asking

    def read(self, count: int) -> None:
        """Read so many more events."""
        for _ in range(count):
            self.events.append(next(self._lines))

    def read_all(self) -> None:
        self.events.extend(self._lines)
        self.hang_up()

    def hang_up(self) -> None:
        self.reply.close()

    @property
    def error(self) -> dict[str, Any]:
        """The error with which the answer ended."""
        return dict(json.loads(self.events[-1].data)["error"])

    def has_whole_answer(self, n_tokens: int) -> bool:
        """Every token once, then the finish reason and the usage, each with the next number."""
        numbered = [*range(n_tokens), n_tokens + 1, n_tokens + 2]
        done = [e.data for e in self.events].count("[DONE]") == 1 and self.events[-1].data == "[DONE]"
        return done and self.indexes == numbered and self.text == "".join(f"w{i} " for i in range(n_tokens))

    def _read(self) -> Iterator[Event]:
        """Parse as the standard says: a field a line, an empty line ends an event."""
        last, data = "", ""
        try:
            for line in self.reply.iter_lines(chunk_size=1, decode_unicode=True):
                if line.startswith(":"):
                    self.comments.append(line)
                elif line.startswith("id: "):
                    last = line.removeprefix("id: ")
                elif line.startswith("data: "):
                    data = line.removeprefix("data: ")
                elif data:
                    yield Event(last, data)
                    last = data = ""
        except (requests.ConnectionError, requests.exceptions.ChunkedEncodingError):
            return  # the gateway was killed
