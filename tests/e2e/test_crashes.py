"""kill -9 of each process, before a start, during a start, and during an answer, whose client may reconnect."""

from __future__ import annotations

import itertools
import json
import math
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest
import requests
from _pytest.mark import ParameterSet

from tests.e2e.machine import Machine, processes, session_of
from tests.e2e.pipelines import Pipelines
from tests.embedding_models import write_model
from tests.gateway.event_client import Client
from thaw.dev.known_answers import FRANCE, OF_FRANCE

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]
COMPONENTS = ("gateway", "scheduler", "host-0/invoker", "host-0/fetchd")
MOMENTS_S = (0.0, 0.1, 0.3, 0.7, 1.5)
"""Moments of a start, which takes one to three seconds from a stem cell and ten seconds without one."""
SAMPLE = {("scheduler", 0.1), ("host-0/invoker", 0.3), ("host-0/fetchd", 0.1), ("host-0/invoker", 0.7)}
LONG = {"max_tokens": 60, "temperature": 0, "stream": True, "ignore_eos": True}


def matrix(sample: set[tuple[str, float]]) -> Iterator[ParameterSet]:
    """Every component at every moment.  Pairs outside the sample only run in the full suite."""
    for pair in itertools.product([c for c in COMPONENTS if c != "gateway"], MOMENTS_S):
        yield pytest.param(*pair, marks=() if pair in sample else pytest.mark.full)


@pytest.fixture
def exact(besieged: Machine, tmp_path: Path) -> Iterator[None]:
    """The function ``exact``, which computes in float32.  In bfloat16, a prompt that ends with generated tokens may
    decide a tie between two tokens differently from the steps that generated them."""
    config = json.loads(Path("examples/chat/chat.json").read_text())
    config["engine"]["dtype"], config["resources"]["gpu_memory_mb"] = "float32", 3072
    path = tmp_path / "exact.json"
    path.write_text(json.dumps(config))
    besieged.thaw("action", "create", "exact", "--config", str(path))
    yield
    besieged.thaw("action", "delete", "exact")


def answered(machine: Machine, deadline_s: float = 120) -> None:
    """Wait until the platform answers again by itself, at most until the deadline.  An answer with another text is no
    fault that passes, so it fails the test at once.

    A connection is refused while the gateway restarts.
    """
    until = time.monotonic() + deadline_s
    while True:
        try:
            response = machine.chat("chat", FRANCE.prompt, temperature=0, timeout=60)
            if response.status_code == 200:
                assert response.json()["choices"][0]["message"]["content"] == FRANCE.text
                return
            seen = response.text
        except requests.ConnectionError as e:
            seen = str(e)
        assert time.monotonic() < until, seen
        time.sleep(0.5)


@pytest.mark.parametrize("component", COMPONENTS)
def test_after_a_kill_while_idle_the_next_requests_are_answered(besieged: Machine, component: str) -> None:
    answered(besieged)
    besieged.kill(component)
    answered(besieged)


@pytest.mark.parametrize(("component", "after_s"), list(matrix(SAMPLE)))
def test_a_held_request_survives_a_kill_during_its_cold_start(
    besieged: Machine, component: str, after_s: float
) -> None:
    besieged.thaw("action", "update", "chat", "--config", "examples/chat/chat.json")  # no instance has the new version
    result: list[requests.Response] = []
    asking = threading.Thread(target=lambda: result.append(besieged.chat("chat", FRANCE.prompt, temperature=0)))
    asking.start()
    time.sleep(after_s)  # this chooses the moment of the start and waits for nothing
    besieged.kill(component)
    asking.join(150)
    assert not asking.is_alive(), "the held request got neither an answer nor an error"
    assert result[0].status_code in (200, 500, 502, 503), result[0].text
    if result[0].status_code != 200:
        assert result[0].json()["error"]["message"]
    answered(besieged)


@pytest.mark.usefixtures("exact")
def test_a_killed_worker_under_an_answer_costs_no_token_and_doubles_none(besieged: Machine) -> None:
    uninterrupted = "".join(texts(besieged.chat("exact", "Count from one to fifty.", **LONG)))
    response = besieged.chat("exact", "Count from one to fifty.", **LONG)
    received: list[str] = []
    for text in texts(response, after_each=once(lambda: kill_workers(besieged), at=10)):
        received.append(text)
    assert "".join(received) == uninterrupted


def test_every_request_that_comes_while_the_engine_dies_is_answered(besieged: Machine) -> None:
    """One comes every 10 ms: a chat, a stream and a 202 in turn.  The container outlives its engine by 2 s, because a
    client has not sent its whole request."""
    answered(besieged)
    with closing(Pipelines(besieged)) as view:
        engine, _ = busiest_process(view, "chat")
        (container,) = view.containers("chat")
    body, pause, n = {"prompt": OF_FRANCE.prompt, "max_tokens": 2, "temperature": 0}, threading.Event(), 120

    def ask(i: int) -> tuple[int, str]:
        if i % 3 == 2:
            accepted = besieged.request("POST", "/api/v1/namespaces/_/actions/chat", json=body)
            return accepted.status_code, accepted.json().get("activationId", accepted.text)
        said = besieged.request("POST", "/v1/completions", json={"model": "chat", "stream": i % 3 == 1, **body})
        return said.status_code, said.text

    with socket.socket(socket.AF_UNIX) as half, ThreadPoolExecutor(n) as clients:
        half.connect(str(container.directory / "s"))
        half.sendall(b"POST /run HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n{")
        asked = []
        for i in range(n):
            asked.append(clients.submit(ask, i))
            if i == n // 4:
                os.kill(engine, signal.SIGKILL)
            pause.wait(0.01)
        found = [one.result() for one in asked]
    assert [status for status, _ in found] == [202 if i % 3 == 2 else 200 for i in range(n)]
    assert not [text for _, text in found if "error" in text]
    for _, activation_id in found[2::3]:
        assert json.dumps(OF_FRANCE.text) in ended(besieged, activation_id)


def ended(machine: Machine, activation_id: str) -> str:
    """Wait until a 202 has its record."""
    until = time.monotonic() + 60
    while True:
        reply = machine.request("GET", f"/api/v1/namespaces/_/activations/{activation_id}")
        if reply.status_code == 200:
            return reply.text
        assert time.monotonic() < until, reply.text
        time.sleep(0.2)


def test_embeddings_begin_anew_and_are_whole_though_the_engine_is_killed_under_them(
    besieged: Machine, tmp_path: Path
) -> None:
    resources = {"gpu_memory_mb": 256, "host_memory_mb": 1024}
    config = {"kind": "llm:vllm", "model": {"uri": f"file://{write_model(tmp_path / 'bert', 'bert')}"}}
    (tmp_path / "config.json").write_text(
        json.dumps({**config, "resources": resources, "engine": {"dtype": "float32"}})
    )
    besieged.thaw("action", "create", "bert", "--config", str(tmp_path / "config.json"))
    asked = {
        "model": "bert",
        "input": [f"{i} of the ships that are on the sea, and of those beside them" for i in range(2048)],
    }
    with closing(Pipelines(besieged)) as view, ThreadPoolExecutor(1) as pool:
        assert besieged.request("POST", "/v1/embeddings", json={"model": "bert", "input": "the sea"}).status_code == 200
        engine, before_s = busiest_process(view, "bert")
        uninterrupted = vectors(besieged.request("POST", "/v1/embeddings", json=asked))
        whole_s = cpu_s(engine) - before_s
        answer = pool.submit(besieged.request, "POST", "/v1/embeddings", json=asked)
        until_s = cpu_s(engine) + whole_s / 3
        while cpu_s(engine) < until_s and not answer.done():
            time.sleep(0.005)
        os.kill(engine, signal.SIGKILL)
        response = answer.result()
    assert len(uninterrupted) == 2048
    assert farthest(vectors(response), uninterrupted) < 2e-5
    activation_id = response.headers["X-Openwhisk-Activation-Id"]
    log = [json.loads(line) for line in (besieged.state_dir / "logs" / "gateway.log").read_text().splitlines()]
    losses = [e for e in log if e.get("event") == "worker_lost" and e.get("activation_id") == activation_id]
    assert len(losses) == 1, "the engine was killed before the request came, or after its answer"
    listed = besieged.request("GET", "/api/v1/namespaces/_/activations?limit=0&docs=true").json()
    records = [a["response"]["result"] for a in listed if a["activationId"] == activation_id]
    assert [record["n_embeddings"] for record in records] == [2048]
    besieged.thaw("action", "delete", "bert")


def test_a_202_ends_in_one_record_though_the_gateway_is_killed(besieged: Machine) -> None:
    answered(besieged)
    accepted = besieged.request(
        "POST",
        "/api/v1/namespaces/_/actions/chat",
        json={"prompt": OF_FRANCE.prompt, "max_tokens": 2, "temperature": 0},
    )
    assert accepted.status_code == 202
    besieged.kill("gateway")
    answered(besieged)
    activation_id = accepted.json()["activationId"]
    record = besieged.thaw("activation", "get", activation_id, "--wait", "60").stdout
    assert json.dumps(OF_FRANCE.text) in record
    listed = besieged.request("GET", "/api/v1/namespaces/_/activations?limit=0&docs=true").json()
    assert [a["activationId"] for a in listed].count(activation_id) == 1


def test_a_killed_state_server_loses_no_202(besieged: Machine) -> None:
    answered(besieged)
    accepted = besieged.request("POST", "/api/v1/namespaces/_/actions/hello", json={"name": "Ada"})
    assert accepted.status_code == 202
    besieged.kill("state")
    answered(besieged)
    assert "Hello, Ada!" in besieged.thaw("activation", "get", accepted.json()["activationId"], "--wait", "60").stdout


@pytest.mark.usefixtures("exact")
def test_each_token_comes_once_though_worker_and_gateway_are_killed(besieged: Machine) -> None:
    """A client that reconnects reads each token once."""
    answered(besieged)
    key = ":".join(besieged.auth())
    body = {
        "model": "exact",
        "messages": [{"role": "user", "content": "Count from one to fifty."}],
        "max_tokens": 60,
        "temperature": 0,
        "ignore_eos": True,
    }
    whole, client = Client(key, **body), Client(key, **body)
    whole.ask(besieged)
    whole.read_all()
    client.ask(besieged)
    client.read(10)
    client.hang_up()
    kill_workers(besieged)
    client.ask(besieged, timeout_s=120)  # the answer waits for a cold start
    client.read(10)
    assert client.comments[0] == ": thaw going on with the answer"
    client.hang_up()
    client.ask(besieged)
    client.read(10)
    besieged.kill("gateway")
    client.hang_up()
    answered(besieged)
    n_comments = len(client.comments)
    assert client.ask(besieged, timeout_s=120).status_code == 200
    client.read_all()
    assert client.comments[n_comments] == ": thaw computing the answer again"
    assert client.events[-1].data == whole.events[-1].data == "[DONE]"
    assert client.seen == whole.seen
    activation_id = client.reply.headers["X-Openwhisk-Activation-Id"]
    listed = besieged.request("GET", "/api/v1/namespaces/_/activations?limit=0").json()
    assert [a["activationId"] for a in listed].count(activation_id) == 1


def texts(response: requests.Response, after_each: Callable[[int], None] = lambda _: None) -> list[str]:
    found: list[str] = []
    for line in response.iter_lines():
        if line.startswith(b"data: {"):
            found.append(line.decode())
            after_each(len(found))
    assert found
    return [json.loads(d.removeprefix("data: "))["choices"][0]["delta"].get("content") or "" for d in found]


def once(action: Callable[[], None], *, at: int) -> Callable[[int], None]:
    return lambda n: action() if n == at else None


def busiest_process(view: Pipelines, action: str) -> tuple[int, float]:
    """Return the engine of the action's container, whose first process answers HTTP, and the seconds that it computed."""
    (container,) = view.containers(action)
    seconds = {pid: cpu_s(pid) for pid in processes() if session_of(pid) == container.pid}
    return max(((pid, s) for pid, s in seconds.items() if s < math.inf), key=lambda item: item[1])


def cpu_s(pid: int) -> float:
    """The processor time of a process; endless when it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return math.inf
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def vectors(response: requests.Response) -> list[list[float]]:
    assert response.status_code == 200, response.text
    return [one["embedding"] for one in response.json()["data"]]


def farthest(found: list[list[float]], wanted: list[list[float]]) -> float:
    assert [len(v) for v in found] == [len(v) for v in wanted]
    return max(abs(a - b) for v, w in zip(found, wanted, strict=True) for a, b in zip(v, w, strict=True))


def kill_workers(machine: Machine) -> None:
    """Kill the containers' processes, as the invoker recorded them."""
    containers = machine.containers()
    assert containers, "no container was found"
    for pid in containers:
        os.kill(pid, signal.SIGKILL)
