"""A real gateway process, a key, and a fake invoker."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
import requests

from relay.state import keys
from relay.state.api_keys import ApiKey, ApiKeys, Role, digest_of
from relay.state.records import Records
from tests.conftest import free_port
from tests.forked import Forked
from tests.gateway.fake_invoker import FakeInvoker
from thaw.activation import Activation
from thaw.ids import ActivationId, Namespace

KEY = "23bc46b1-71f6-4ed5-8c54-816aa4f8c502:secret"
OTHER_KEY = "33bc46b1-71f6-4ed5-8c54-816aa4f8c502:other"
OPERATOR_KEY = "43bc46b1-71f6-4ed5-8c54-816aa4f8c502:operator"
LLM_CONFIG = {"kind": "llm:vllm", "model": {"uri": "s3://models/tiny", "served_name": "tiny"}}
ROOT = Path(__file__).parents[2]


class GatewayProcess:
    """``thaw-gateway`` as an operator runs it.  ``{port}`` in a variable becomes its port."""

    def __init__(self, state_url: str, **environ: str) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        env = {
            **os.environ,
            "THAW_STATE_URL": state_url,
            "THAW_GATEWAY_BIND": f"127.0.0.1:{self.port}",
            "PYTHONPATH": str(ROOT),
            **{name: value.replace("{port}", str(self.port)) for name, value in environ.items()},
        }
        log, written = os.pipe()
        self._log = os.fdopen(log, encoding="utf-8")
        try:
            self.process = Forked("gateway.main", env=env, stderr=written)
        finally:
            os.close(written)
        self.lines: list[str] = []
        self.session = requests.Session()
        self.session.auth = tuple(KEY.split(":"))  # type: ignore[assignment]
        try:
            self.wait_for_event("gateway_started")
        except BaseException:  # another process may have taken the port meanwhile
            self.end()
            raise

    def wait_for_event(self, name: str) -> dict[str, Any]:
        for line in self._log:
            self.lines.append(line)
            if line.startswith("{") and (event := json.loads(line)).get("event") == name:
                return dict(event)
        raise AssertionError(f"no {name}: {''.join(self.lines)}")

    def kill(self) -> None:
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(60)

    def end(self) -> None:
        """Kill the process, whatever it is doing.

        This is half a second faster than ``stop``, which has tests of its own.
        """
        self.session.close()
        if self.process.poll() is None:
            self.kill()
        self._log.close()

    def stop(self) -> None:
        self.session.close()  # the gateway would wait for a kept connection
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(60)
            except subprocess.TimeoutExpired:
                self.kill()
        self._log.close()

    def call(self, method: str, path: str, **kwargs: Any) -> requests.Response:
        kwargs.setdefault("timeout", 30)
        return self.session.request(method, self.url + path, **kwargs)

    def put_llm(self, name: str = "chat", **config: Any) -> None:
        reply = self.call("PUT", f"/api/v1/namespaces/_/actions/{name}", json={"config": {**LLM_CONFIG, **config}})
        assert reply.status_code == 200, reply.text

    def put_python(self, name: str = "hello", **extra: Any) -> None:
        body = {"exec": {"kind": "python:3.11", "code": "def main(args):\n    return args\n"}, **extra}
        reply = self.call("PUT", f"/api/v1/namespaces/_/actions/{name}", json=body)
        assert reply.status_code == 200, reply.text

    def chat(self, **body: Any) -> requests.Response:
        stream = bool(body.get("stream"))
        plain = {"model": "chat", "messages": [{"role": "user", "content": "hi"}], **body}
        return self.call("POST", "/v1/chat/completions", json=plain, stream=stream)

    def wait_for_routes(self, count: int = 1, timeout_s: float = 60) -> None:
        """Wait until the gateway knows ``count`` ready instances.  An earlier request waits, as in a cold start."""
        end_s, tick = time.monotonic() + timeout_s, threading.Event()
        while f"\nthaw_gateway_route_count {count}.0\n" not in (page := self.call("GET", "/metrics").text):
            assert time.monotonic() < end_s, page
            tick.wait(0.01)

    def record(self, activation_id: str) -> dict[str, Any]:
        """Return the record of a call that was answered.  It is written after the answer; a request waits a second."""
        deadline_s, tick = time.monotonic() + 60, threading.Event()
        while True:
            reply = self.call("GET", f"/api/v1/namespaces/_/activations/{activation_id}")
            if reply.status_code != 404 or time.monotonic() > deadline_s:
                break
            tick.wait(0.05)
        assert reply.status_code == 200, reply.text
        return dict(reply.json())


def add_key(url: str, key: str, namespace: str, role: Role = Role.TENANT) -> None:
    with redis.Redis.from_url(url) as client:
        row = ApiKey(Namespace(namespace), f"{namespace}-user", role, key.partition(":")[0], created_ms=1)
        ApiKeys(client).put(digest_of(key), row)


def wait_for_record(url: str, activation_id: str, timeout_s: float = 60) -> Activation:
    """Wait until the record's key is written.  A keyspace event tells this."""
    with redis.Redis.from_url(url) as client:
        client.config_set("notify-keyspace-events", "K$")
        watch = client.pubsub()
        watch.subscribe(f"__keyspace@0__:{keys.activation(activation_id)}")
        records = Records(client)
        assert watch.get_message(timeout=timeout_s) is not None, "no confirmation"
        record = records.activation(ActivationId(activation_id))
        if record is None:
            assert watch.get_message(timeout=timeout_s) is not None, "no record"
            record = records.activation(ActivationId(activation_id))
        watch.close()
    assert record is not None
    return record


@pytest.fixture
def start_gateway(valkey_url: str) -> Iterator[Callable[..., GatewayProcess]]:
    add_key(valkey_url, KEY, "guest")
    add_key(valkey_url, OTHER_KEY, "other")
    add_key(valkey_url, OPERATOR_KEY, "admin", Role.OPERATOR)
    started: list[GatewayProcess] = []

    def start(**environ: str) -> GatewayProcess:
        started.append(GatewayProcess(valkey_url, **environ))
        return started[-1]

    yield start
    for gateway in started:
        gateway.end()


@pytest.fixture
def gateway(start_gateway: Callable[..., GatewayProcess]) -> GatewayProcess:
    return start_gateway()


@pytest.fixture
def invoker(valkey_url: str) -> Iterator[FakeInvoker]:
    fake = FakeInvoker(valkey_url)
    yield fake
    fake.stop()
