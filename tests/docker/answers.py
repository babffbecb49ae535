"""A client that reads a long answer as it is made, on a thread of its own, and records how the answer ended."""

from __future__ import annotations

import json
import threading
from typing import Any

import requests

from tests.docker.stack import UP_S, Stack

LONG = {
    "model": "chat",
    "messages": [{"role": "user", "content": "Count from one to fifty."}],
    "max_tokens": 120,
    "temperature": 0,
    "ignore_eos": True,
}


class LongAnswer:
    """A long answer.  ``at`` is an address of the gateway other than its published port.

    ``error`` is the gateway's error, and ``broke`` is the error of the connection.  Without either, the answer is
    complete.
    """

    def __init__(self, stack: Stack, at: str = "", action: str = "chat") -> None:
        self.pieces: list[str] = []
        self.error: dict[str, Any] | None = None
        self.broke: requests.RequestException | None = None
        self.activation_id = ""
        self._whole = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._ask, args=(stack, f"{at}/v1/chat/completions", action))
        self._thread.start()

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    def wait_pieces(self, n: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.pieces) >= n or not self._thread.is_alive(), UP_S)
        assert len(self.pieces) >= n, (self.error, self.broke)

    def wait_end(self) -> None:
        self._thread.join(UP_S)
        assert not self._thread.is_alive()
        assert self._whole or self.error or self.broke

    def _ask(self, stack: Stack, url: str, action: str) -> None:
        try:
            with stack.request("POST", url, json={**LONG, "model": action, "stream": True}, stream=True) as response:
                self.activation_id = response.headers.get("X-Openwhisk-Activation-Id", "")
                if response.status_code != 200:
                    self.error = response.json()["error"]
                    return
                for line in response.iter_lines():
                    self._take(line)
        except requests.RequestException as e:
            self.broke = e
        finally:
            with self._changed:
                self._changed.notify_all()

    def _take(self, line: bytes) -> None:
        self._whole = self._whole or line == b"data: [DONE]"
        if not line.startswith(b"data: {"):
            return
        event = json.loads(line.removeprefix(b"data: "))
        if "error" in event:
            self.error = event["error"]
            return
        with self._changed:
            self.pieces.append(event["choices"][0]["delta"].get("content") or "")
            self._changed.notify_all()
