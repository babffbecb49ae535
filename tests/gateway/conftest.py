"""A real gateway process, a key, and a fake invoker."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import signal
import subprocess
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import pytest
import redis
import requests

from relay.state import keys
from relay.state.api_keys import ApiKey, ApiKeys, Role, digest_of
from relay.state.records import Records
from tests.conftest import ValkeyServer, _memory, free_port
from tests.forked import Forked
from tests.gateway.fake_invoker import FakeInvoker
from tests.gateway.waits import until
from thaw.activation import Activation
from thaw.ids import ActivationId, Namespace
from thaw.instance import InstanceRecord

T = TypeVar("T")
KEY = "23bc46b1-71f6-4ed5-8c54-816aa4f8c502:secret"
OTHER_KEY = "33bc46b1-71f6-4ed5-8c54-816aa4f8c502:other"
OPERATOR_KEY = "43bc46b1-71f6-4ed5-8c54-816aa4f8c502:operator"
LLM_CONFIG = {"kind": "llm:vllm", "model": {"uri": "s3://models/tiny", "served_name": "tiny"}}
CODE = {"kind": "python:3.11", "code": "def main(args):\n    return args\n"}
HERE = "/api/v1/namespaces/_"
ROOT = Path(__file__).parents[2]


class GatewayProcess:
    """``thaw-gateway`` as an operator runs it.  ``{port}`` in a variable becomes its port."""

    def __init__(self, state_url: str, host: Callable[[str], FakeInvoker] = FakeInvoker, **environ: str) -> None:
        self.state_url, self._host = state_url, host
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

    @functools.cached_property
    def invoker(self) -> FakeInvoker:
        """The invoker of a host, which the test plays.  Gateways that one test starts share it."""
        return self._host(self.state_url)

    @functools.cached_property
    def _clients(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(32)

    def end(self) -> None:
        """Kill the process, whatever it is doing.

        This is half a second faster than ``stop``, which has tests of its own.
        """
        self.session.close()
        if self.process.poll() is None:
            self.kill()
        self._log.close()
        if "_clients" in vars(self):
            self._clients.shutdown()
        if "invoker" in vars(self):
            self.invoker.stop()

    def stop(self) -> None:
        self.session.close()  # the gateway would wait for a kept connection
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(60)
        self.end()

    def call(self, method: str, path: str, *, key: str = "", **kwargs: Any) -> requests.Response:
        """With the tenant's key, or with another ``key``."""
        kwargs.setdefault("timeout", 30)
        if key:
            kwargs["auth"] = tuple(key.split(":"))
        return self.session.request(method, self.url + path, **kwargs)

    def soon(self, ask: Callable[..., T], *args: Any, **kwargs: Any) -> Future[T]:
        """Ask on a thread, as a client beside the test."""
        return self._clients.submit(ask, *args, **kwargs)

    def read(self, path: str, **kwargs: Any) -> Any:
        """What stands at a path of the namespace."""
        reply = self.call("GET", f"{HERE}/{path}", **kwargs)
        assert reply.status_code == 200, reply.text
        return reply.json()

    def put(self, path: str, expect: int = 200, **body: Any) -> dict[str, Any]:
        reply = self.call("PUT", f"{HERE}/{path}", json=body)
        assert reply.status_code == expect, reply.text
        return dict(reply.json())

    def delete(self, path: str) -> requests.Response:
        return self.call("DELETE", f"{HERE}/{path}")

    def put_llm(self, name: str = "chat", **config: Any) -> None:
        self.put(f"actions/{name}", config={**LLM_CONFIG, **config})

    def put_python(self, name: str = "hello", **extra: Any) -> None:
        self.put(f"actions/{name}", exec=CODE, **extra)

    def serve_llm(self, name: str = "chat", **instance: Any) -> InstanceRecord:
        """Deploy a model with an instance that is ready, so that the next request is a warm one."""
        self.put_llm(name)
        return self.serve(name, **instance)

    def serve_python(self, *names: str, **extra: Any) -> None:
        """Deploy functions with an instance each."""
        for name in names or ("hello",):
            self.put_python(name, **extra)
        self.serve(*names or ("hello",))

    def serve(self, *names: str, **instance: Any) -> InstanceRecord:
        for i, name in enumerate(names):
            record = self.invoker.ready(f"guest/{name}", **{"instance": f"i{i}", **instance})
        self.wait_for_routes(len(names))
        return record

    def chat(self, **body: Any) -> requests.Response:
        stream = bool(body.get("stream"))
        plain = {"model": "chat", "messages": [{"role": "user", "content": "hi"}], **body}
        return self.call("POST", "/v1/chat/completions", json=plain, stream=stream)

    def cold_chat(self, **instance: Any) -> requests.Response:
        """Ask, and let the instance for which the request waits become ready."""
        asked = self.soon(self.chat)
        self.invoker.wait_for_demand()
        self.invoker.ready("guest/chat", **instance)
        reply = asked.result(60)
        assert reply.status_code == 200, reply.text
        return reply

    def invoke(self, name: str = "hello", query: str = "blocking=true", **body: Any) -> requests.Response:
        return self.call("POST", f"{HERE}/actions/{name}?{query}", json=body or None)

    def wait_for_routes(self, count: int = 1, timeout_s: float = 60) -> None:
        """Wait until the gateway knows ``count`` ready instances.  An earlier request waits, as in a cold start."""
        self.wait_for_metric(f"thaw_gateway_route_count {count}.0", timeout_s)

    def wait_for_metric(self, line: str, timeout_s: float = 60) -> None:
        until(lambda: self.has_metric(line), lambda: self.call("GET", "/metrics").text, most_s=timeout_s)

    def has_metric(self, line: str) -> bool:
        return f"\n{line}\n" in self.call("GET", "/metrics").text

    def record(self, of: str | requests.Response) -> dict[str, Any]:
        """Return the record of a call that was answered.  It is written after the answer; a request waits a second."""
        activation_id = of if isinstance(of, str) else of.headers["X-Openwhisk-Activation-Id"]
        path = f"{HERE}/activations/{activation_id}"
        until(lambda: self.call("GET", path).status_code != 404, f"{activation_id} has no record", most_s=60)
        return dict(self.read(f"activations/{activation_id}"))

    def ended(self, activation_id: str, timeout_s: float = 60) -> Activation:
        """Wait until the record is in the state server."""
        return wait_for_record(self.state_url, activation_id, timeout_s)


Start = Callable[..., GatewayProcess]
Patched = Callable[[str], dict[str, str]]


def pairs(**values: object) -> list[dict[str, object]]:
    """The parameters or annotations of an entity, as the API takes and returns them."""
    return [{"key": k, "value": v} for k, v in values.items()]


def values(entity: dict[str, Any], field: str = "parameters") -> dict[str, Any]:
    return {p["key"]: p["value"] for p in entity[field]}


def notes(entity: dict[str, Any]) -> dict[str, Any]:
    return values(entity, "annotations")


def events_of(lines: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    """The events of a stream, without ``[DONE]``."""
    return (json.loads(line.removeprefix(b"data: ")) for line in lines if line.startswith(b"data: {"))


def text_of(events: Iterable[dict[str, Any]]) -> str:
    return "".join(e["choices"][0]["delta"].get("content") or "" for e in events)


def add_key(url: str, key: str, namespace: str, role: Role = Role.TENANT) -> None:
    with redis.Redis.from_url(url) as client:
        row = ApiKey(Namespace(namespace), f"{namespace}-user", role, key.partition(":")[0], created_ms=1)
        ApiKeys(client).put(digest_of(key), row)


def add_keys(url: str) -> None:
    add_key(url, KEY, "guest")
    add_key(url, OTHER_KEY, "other")
    add_key(url, OPERATOR_KEY, "admin", Role.OPERATOR)


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
def start_gateway(valkey_url: str) -> Iterator[Start]:
    """Start gateways that end with the test, at this state server or at the one that is named first."""
    started, host = list[GatewayProcess](), functools.cache(FakeInvoker)

    def start(state_url: str = valkey_url, **environ: str) -> GatewayProcess:
        if not any(gateway.state_url == state_url for gateway in started):
            add_keys(state_url)
        started.append(GatewayProcess(state_url, host, **environ))
        return started[-1]

    yield start
    for gateway in started:
        gateway.end()


@pytest.fixture(scope="session")
def shared_gateway() -> Iterator[GatewayProcess]:
    """A gateway with a state server of its own, for tests that change nothing: they read, or are refused.

    It has the model chat and the function hello, and no host.
    """
    with _memory() as directory:
        server = ValkeyServer(Path(directory))
        server.start()
        add_keys(server.url)
        gateway = GatewayProcess(server.url)
        try:
            gateway.put_llm()
            gateway.put_python()
            yield gateway
        finally:
            gateway.end()
            server.kill()


@pytest.fixture(scope="session")
def patched(tmp_path_factory: pytest.TempPathFactory) -> Patched:
    """The environment of gateways that run some code first.  With equal code they share an importer (tests/forked.py)."""

    @functools.cache
    def patched(code: str) -> dict[str, str]:
        folder = tmp_path_factory.mktemp("patched")
        (folder / "sitecustomize.py").write_text(code)
        return {"PYTHONPATH": f"{folder}:{ROOT}"}

    return patched


@pytest.fixture
def gateway(start_gateway: Start) -> GatewayProcess:
    return start_gateway()


@pytest.fixture
def invoker(valkey_url: str) -> Iterator[FakeInvoker]:
    fake = FakeInvoker(valkey_url)
    yield fake
    fake.stop()


@pytest.fixture
def elsewhere(valkey_url: str) -> Iterator[FakeInvoker]:
    """The invoker of a second host."""
    fake = FakeInvoker(valkey_url, "h1")
    yield fake
    fake.stop()
