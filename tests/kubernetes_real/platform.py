"""A platform on a cluster, as its users reach it."""

from __future__ import annotations

import base64
import json
import threading
from typing import Any

import requests

from thaw.action import KIND_LLM, KIND_PYTHON

START_S = 300.0
"""The time limit for a start of the model on a busy machine."""


class Platform:
    def __init__(self, url: str, key: str) -> None:
        self.url = url
        self.headers = {"Authorization": "Basic " + base64.b64encode(key.encode()).decode()}

    def deploy(self, name: str, code: str) -> None:
        body = {"exec": {"kind": KIND_PYTHON, "code": code}, "limits": {"memory": 128}}
        self.call("PUT", f"/actions/{name}?overwrite=true", json=body)

    def deploy_model(self, name: str, n_stages: int) -> None:
        """Deploy the model of the page's function, as a pipeline of ``n_stages``."""
        config = {
            "kind": KIND_LLM,
            "model": {"uri": "s3://models/smollm2-135m"},
            "engine": {"dtype": "bfloat16", "max_model_len": 2048},
            "resources": {"gpu_memory_mb": 1024, "host_memory_mb": 2048},
            "scaling": {"max_instances": 1, "stages": n_stages},
        }
        body = {"config": config, "exec": {"kind": KIND_LLM, "code": "", "binary": False}}
        self.call("PUT", f"/actions/{name}?overwrite=true", json=body)

    def chat(self, model: str, message: str) -> str:
        body = {"model": model, "messages": [{"role": "user", "content": message}], "max_tokens": 24, "temperature": 0}
        url = f"{self.url}/v1/chat/completions"
        answer = requests.post(url, json=body, headers=self.headers, timeout=START_S)
        assert answer.status_code == 200, answer.text
        return str(answer.json()["choices"][0]["message"]["content"])

    def invoke(self, action: str, **arguments: Any) -> dict[str, Any]:
        """The activation's record."""
        return self.call("POST", f"/actions/{action}?blocking=true", json=arguments)

    def begin(self, action: str, **arguments: Any) -> str:
        """Start an activation without waiting for it, and return its id."""
        return str(self.call("POST", f"/actions/{action}", 202, json=arguments)["activationId"])

    def record(self, activation_id: str) -> dict[str, Any]:
        """Wait for the activation's end."""
        for _ in range(int(START_S / 30)):
            answer = self.ask("GET", f"/activations/{activation_id}?wait_s=30")
            if answer.status_code == 200:
                record: dict[str, Any] = answer.json()
                return record
        raise AssertionError(f"{activation_id} has no record: {answer.text}")

    def call(self, method: str, path: str, status: int = 200, **body: Any) -> dict[str, Any]:
        answer = self.ask(method, path, **body)
        assert answer.status_code == status, answer.text
        plain: dict[str, Any] = answer.json()
        return plain

    def ask(self, method: str, path: str, **body: Any) -> requests.Response:
        url = f"{self.url}/api/v1/namespaces/_{path}"
        return requests.request(method, url, headers=self.headers, timeout=START_S, **body)


class Stream:
    """A model's answer, read as it is made, on a thread of its own."""

    def __init__(self, platform: Platform, n_tokens: int) -> None:
        self.n_pieces = 0
        self.end = ""  # "[DONE]", or the error that broke the stream
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._read, args=(platform, n_tokens))
        self._thread.start()

    def wait_pieces(self, n: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: self.n_pieces >= n or bool(self.end), START_S)
        assert self.n_pieces >= n, self.end

    def wait_end(self) -> str:
        self._thread.join(START_S)
        assert not self._thread.is_alive()
        return self.end

    def _read(self, platform: Platform, n_tokens: int) -> None:
        asked = {"role": "user", "content": "Count from one to fifty."}
        body = {"model": "chat", "messages": [asked], "max_tokens": n_tokens, "temperature": 0, "ignore_eos": True}
        end = "the connection ended"
        try:
            with requests.post(
                f"{platform.url}/v1/chat/completions",
                json={**body, "stream": True},
                headers=platform.headers,
                stream=True,
                timeout=START_S,
            ) as answer:
                if answer.status_code != 200:
                    end = answer.text
                for line in answer.iter_lines():
                    if not line.startswith(b"data: "):
                        continue  # an event's id, or a comment that keeps the connection open
                    data = line.decode().removeprefix("data: ")
                    if data == "[DONE]" or "error" in json.loads(data):
                        end = data
                    else:
                        self._note(1)
        except requests.RequestException as e:
            end = repr(e)
        with self._changed:
            self.end = end
            self._changed.notify_all()

    def _note(self, n: int) -> None:
        with self._changed:
            self.n_pieces += n
            self._changed.notify_all()
