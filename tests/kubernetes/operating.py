"""An operator between an API server in the test's process and a real gateway, and helpers for tests of the three."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import requests

from tests.gateway.conftest import KEY, LLM_CONFIG, GatewayProcess
from tests.kubernetes.api_server import MERGE
from tests.kubernetes.custom_resources import CustomResources
from thaw.kubernetes.operator import Operator
from thaw.kubernetes.settings import OperatorSettings
from thaw.logs import Log

ACTION = "/api/v1/namespaces/_/actions/chat"
SLOW = {**LLM_CONFIG, "slo": {"tpot_ms": 50}}
"""Another config of the model."""


@pytest.fixture
def cluster() -> Iterator[CustomResources]:
    made = CustomResources()
    yield made
    made.close()
    assert made.problems == []


@contextmanager
def operating(cluster: CustomResources, url: str, directory: Path, **more: Any) -> Iterator[Operator]:
    """Run an operator.  ``more`` holds the operator's arguments in addition to its settings."""
    settings = OperatorSettings(url, KEY, "thaw", cluster.kubeconfig(directory))
    operator = Operator(settings, Log("test"), **more)
    operator.start()
    try:
        yield operator
    finally:
        operator.stop()


@pytest.fixture
def operator(cluster: CustomResources, gateway: GatewayProcess, tmp_path: Path) -> Iterator[Operator]:
    with operating(cluster, gateway.url, tmp_path) as made:
        yield made


@pytest.fixture
def between(gateway: GatewayProcess) -> Iterator[Between]:
    made = Between(gateway)
    yield made
    made.close()


@pytest.fixture
def apart(cluster: CustomResources, between: Between, tmp_path: Path) -> Iterator[Operator]:
    """An operator that reaches the gateway through ``between``."""
    with operating(cluster, between.url, tmp_path) as made:
        yield made


def action(gateway: GatewayProcess, name: str = "chat") -> dict[str, Any]:
    """Return the action as the gateway shows it; nothing when there is none."""
    reply = gateway.call("GET", ACTION.replace("chat", name))
    assert reply.status_code in (200, 404), reply.text
    return dict(reply.json()) if reply.ok else {}


def wait_models(gateway: GatewayProcess, *names: str) -> None:
    """Wait until these models are deployed and no others, as the gateway tells it."""
    found: dict[str, Any] = {"mark": "", "actions": [{"name": ""}]}
    while [each["name"] for each in found["actions"]] != list(names):
        query = {"known": found["mark"], "wait_s": 20}
        now = gateway.call("GET", "/api/v1/namespaces/_/standings", params=query).json()
        assert now["mark"] != found["mark"], now
        found = now


def scale(cluster: CustomResources, replicas: int | None = None) -> dict[str, Any]:
    """Read the scale, or set it to ``replicas``, as an autoscaler does."""
    url = f"http://127.0.0.1:{cluster.port}{cluster.collection}/chat/scale"
    headers = {"Authorization": f"Bearer {cluster.token}", "Content-Type": MERGE}
    method, body = ("GET", None) if replicas is None else ("PATCH", {"spec": {"replicas": replicas}})
    return dict(requests.request(method, url, json=body, headers=headers, timeout=10).json())


class Between:
    """Passes requests on to the gateway.  It can hold back the answers to questions for news, or answer them with a 429
    (``throttled``).  With ``second``, another writer makes each write just before it.  ``instead`` returns the answer
    in the gateway's place; if it returns None, the connection is cut."""

    def __init__(self, gateway: GatewayProcess) -> None:
        self.gateway = gateway
        self.may_go = threading.Event()
        self.may_go.set()
        self.held = threading.Event()
        self.throttled = self.second = False
        self.asked = threading.Semaphore(0)  # released for each question for news
        self.instead: Callable[[str, str], tuple[int, dict[str, Any]] | None] | None = None
        self.calls: list[tuple[str, str]] = []
        self._called = threading.Semaphore(0)
        between = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                if "wait_s=25" in self.path:
                    between.asked.release()
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                between.calls.append((self.command, self.path.partition("?")[0].rpartition("_/")[2]))
                between._called.release()
                if between.throttled and "wait_s=" in self.path:
                    self._send(429, b'{"error": "Too many requests are held"}')
                    return
                if between.instead is not None:
                    answer = between.instead(*between.calls[-1])
                    self.close_connection = answer is None
                    if answer is not None:
                        self._send(answer[0], json.dumps(answer[1]).encode())
                    return
                headers = {name: self.headers[name] for name in ("Authorization", "Content-Type") if self.headers[name]}
                url = gateway.url + self.path
                for _ in range(2 if between.second and self.command == "PUT" else 1):
                    reply = requests.request(self.command, url, data=body, headers=headers, timeout=60)
                if "wait_s=25" in self.path and not between.may_go.is_set():
                    between.held.set()
                    between.may_go.wait(30)
                self._send(reply.status_code, reply.content)

            def _send(self, status: int, content: bytes) -> None:
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            do_PUT = do_DELETE = do_GET

            def log_message(self, format: str, *args: Any) -> None:
                """Log nothing: tests print the messages that they need."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    def next_question(self) -> None:
        """Wait until the operator has read the last answer, and asks the next question."""
        while self.asked.acquire(blocking=False):
            pass
        assert self.asked.acquire(timeout=30)

    def calls_come(self) -> None:
        """Wait for one more call."""
        assert self._called.acquire(timeout=30)

    def close(self) -> None:
        self.may_go.set()
        self._server.shutdown()
        self._server.server_close()
