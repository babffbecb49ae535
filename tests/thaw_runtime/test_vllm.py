"""The real engine with the real small model: containers from nothing and from a zygote answer as plain vLLM does."""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from tokenizers import Tokenizer

from relay.protocol.messages import GroupCredential, GroupLink, StageShape
from tests.thaw_runtime.conftest import STREAM, Container, Forked, Zygote, forked_container, frames, llm_init, run_body
from tests.thaw_runtime.fake_descriptor_socket import FakeDescriptorSocket
from tests.thaw_runtime.models import real_model
from thaw import wire
from thaw.cli.explanation import explain
from thaw.dev.known_answers import FRANCE
from thaw.plan import TransportKind
from thaw.process.kernel_counts import parse_schedstat
from thaw.tracing.evidence import explain as explained
from thaw.tracing.timeline import analyse
from thaw.tracing.trace import Phase, TraceEvent, event

pytestmark = pytest.mark.vllm

TEXTS = (
    "The history of the city of Rome begins",
    "Once upon a time there was a fox who",
    "To bake bread you need",
    "In mathematics, a prime number is",
    "Dear Sir or Madam, I am writing to",
    "The three laws of motion are",
    "def fibonacci(n):\n",
    "Yesterday the weather was",
)
CAPITAL = {
    "messages": FRANCE.messages,
    "temperature": 0,
    "max_tokens": 32,
}


@pytest.fixture(scope="module")
def model() -> Path:
    return real_model()


@pytest.fixture
def fork(zygote: Zygote, tmp_path: Path) -> Iterator[Callable[..., Forked]]:
    numbers = itertools.count()
    with contextlib.ExitStack() as stack:

        def build(model: Path, *, arrived: bool = True, layers: tuple[int, int] | None = None) -> Forked:
            directory = tmp_path / f"c{next(numbers)}"
            return stack.enter_context(forked_container(zygote, directory, model, arrived=arrived, layers=layers))

        yield build


def answer(container: Container, body: dict[str, Any], endpoint: str = "chat", **value: Any) -> str:
    messages = container.stream(body, endpoint, **value)
    assert messages[-1]["t"] == "RunFinished", messages[-1]
    return "".join(m["text"] for m in messages)


def test_a_container_from_scratch_knows_the_capital_of_france(model: Path, tmp_path: Path) -> None:
    descriptor_socket = FakeDescriptorSocket(model, tmp_path / "socket")
    container = Container([sys.executable, "-m", "thaw_runtime.llm.main"], tmp_path, descriptor_socket)
    container.wait_listening()
    try:
        status, reply = container.init()
        assert status == 200, reply
        names = {e["name"] for e in reply["events"]}
        assert {
            f"{p}.{edge}"
            for p in ("libraries", "context", "model", "load", "kv", "engine", "tokenizer")
            for edge in ("begin", "end")
        } <= names
        assert answer(container, CAPITAL) == FRANCE.text
    finally:
        container.close()
        descriptor_socket.close()


def test_an_engine_unmaps_its_segment_when_fetchd_ends_and_serves_on(fork: Callable[..., Forked], model: Path) -> None:
    container = fork(model)
    assert container.init()[0] == 200
    (engine,) = children(container.forked["pid"])
    assert "memfd:slab" in Path(f"/proc/{engine}/maps").read_text()
    container.descriptor_socket.hang_up()
    deadline = time.monotonic() + 20.0
    while "memfd:slab" in Path(f"/proc/{engine}/maps").read_text():
        assert time.monotonic() < deadline
        threading.Event().wait(0.02)
    assert answer(container, CAPITAL) == FRANCE.text


def test_a_forked_container_answers_the_same_and_reports_no_import(fork: Callable[..., Forked], model: Path) -> None:
    container = fork(model)
    status, reply = container.init()
    assert status == 200, reply
    assert "libraries.begin" not in {e["name"] for e in reply["events"]}
    (engine,), nodes = children(container.forked["pid"]), list(Path("/sys/devices/system/node").glob("node[0-9]*"))
    assert ("bind:" in Path(f"/proc/{engine}/numa_maps").read_text()) == (len(nodes) > 1)
    assert answer(container, CAPITAL) == FRANCE.text
    assert answer(container, CAPITAL | {"stop": [" Paris"]}) == "The capital of France is"


def test_what_the_engine_refuses_fails_alone(fork: Callable[..., Forked], model: Path) -> None:
    container = fork(model)
    assert container.init()[0] == 200
    last = container.stream(CAPITAL | {"temperature": 2.5}, "chat")[-1]  # a gateway would refuse this request
    assert (last["t"], last["error"]["code"]) == ("RunFailed", "BadRequest")
    assert answer(container, CAPITAL) == FRANCE.text


def test_containers_of_one_pipeline_answer_and_a_killed_one_fails_the_request_as_lost(
    fork: Callable[..., Forked], model: Path, relay_url: str
) -> None:
    layers = ((0, 12), (12, 30))
    shapes = tuple(StageShape(part, 1 << 30, 160 << 20) for part in layers)
    link = GroupLink(TransportKind.REDIS, relay_url, GroupCredential("", ""))
    whole = replace(llm_init(), n_stages=2, link=link, stages=shapes)
    first, last = (fork(model, layers=part) for part in layers)
    for stage, container in ((1, last), (0, first)):  # the order does not matter
        value = replace(whole, stage=stage, layers=layers[stage])
        status, reply = container.ask("POST", "/init", {"value": value})
        assert status == 200, reply
        assert ("tokenizer.begin" in {e["name"] for e in reply["events"]}) == (stage == 0)
    assert answer(first, CAPITAL) == FRANCE.text
    first.http.request(
        "POST", "/run", json.dumps(run_body({"prompt": "Once", "max_tokens": 400}, "completions")), STREAM
    )
    messages = frames(first.http.getresponse())
    assert next(messages)["t"] == "RunToken"
    os.kill(last.forked["pid"], 9)
    lost = list(messages)[-1]
    assert (lost["t"], lost["error"]["code"]) == ("RunFailed", "WorkerLost")


def test_a_zygote_has_one_thread(zygote: Zygote) -> None:
    assert len(os.listdir(f"/proc/{zygote.process.pid}/task")) == 1


def test_a_killed_engine_is_reported_with_the_containers_exit_status(
    zygote: Zygote, model: Path, tmp_path: Path
) -> None:
    descriptor_socket = FakeDescriptorSocket(model, tmp_path / "socket")
    container = Forked(zygote, tmp_path, descriptor_socket)
    container.wait_listening()
    pid = container.forked["pid"]
    engine = int(Path(f"/proc/{pid}/task/{pid}/children").read_text())
    os.kill(engine, 9)
    exited = zygote.receive()
    assert (exited["op"], exited["pid"], exited["status"]) == ("exited", pid, 128 + 9)
    container.close()
    descriptor_socket.close()


@pytest.mark.parametrize(
    ("changes", "code", "words"),
    [
        ({"reserve": 200 << 20}, "MemoryTooSmall", "the worker has 200 MiB"),
        ({"args": {"tensor_parallel_size": 2}}, "InitFailed", "tensor_parallel_size cannot be set"),
    ],
)
def test_a_start_that_cannot_be_says_why(
    fork: Callable[..., Forked], model: Path, changes: dict[str, Any], code: str, words: str
) -> None:
    status, reply = fork(model).init(**changes)
    assert (status, reply["info"]["code"]) == (502, code)
    assert words in reply["error"]


def test_an_architecture_the_engine_lacks_is_named(fork: Callable[..., Forked], model: Path, tmp_path: Path) -> None:
    strange = copy_with_config(model, tmp_path / "strange", architectures=["StrangeForCausalLM"])
    status, reply = fork(strange).init()
    assert (status, reply["info"]["code"]) == (502, "ModelUnsupported")
    assert "StrangeForCausalLM" in reply["error"]


@pytest.mark.timeout(900)
@pytest.mark.parametrize(("n_prompts", "n_tokens"), [(1, 32), pytest.param(len(TEXTS), 64, marks=pytest.mark.full)])
def test_greedy_tokens_equal_plain_vllms_and_swapped_layers_do_not(
    fork: Callable[..., Forked], model: Path, tmp_path: Path, n_prompts: int, n_tokens: int
) -> None:
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    prompts = [tokenizer.encode(text).ids for text in TEXTS[:n_prompts]]
    reference = vanilla(model, prompts, n_tokens)
    assert all(len(set(tokens)) >= 16 for tokens in reference), "a degenerate reference proves nothing"
    assert ours(fork(model), prompts, n_tokens) == reference
    assert ours(fork(swap_two_layers(model, tmp_path / "swapped")), prompts[:1], n_tokens) != reference[:1]


def test_an_engine_that_computed_before_its_weights_were_there_answers_the_same(
    fork: Callable[..., Forked], model: Path
) -> None:
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    prompts = [tokenizer.encode(TEXTS[0]).ids]
    slow = fork(model, arrived=False)
    feeder = threading.Thread(target=trickle, args=(slow.descriptor_socket,))
    feeder.start()
    tokens = ours(slow, prompts, 32)
    feeder.join()
    assert slow.rehearsal_s > 0
    at_once = fork(model)
    assert ours(at_once, prompts, 32) == tokens
    assert at_once.rehearsal_s == 0


def test_an_engine_with_nothing_to_do_is_left_asleep(fork: Callable[..., Forked], model: Path) -> None:
    """Event loops that only checked whether they should end woke an engine more than a thousand times a second."""
    container = fork(model)
    status, reply = container.init()
    assert status == 200, reply
    assert answer(container, CAPITAL)
    before = wake_ups(container.forked["pid"])
    threading.Event().wait(2)  # no event can announce that nothing happens
    assert wake_ups(container.forked["pid"]) - before < 50


def test_three_seconds_of_a_stopped_engine_are_explained_in_exactly_the_phase_that_they_made_longer(
    fork: Callable[..., Forked], model: Path
) -> None:
    container = fork(model, arrived=False)
    descriptor_socket, (engine,) = container.descriptor_socket, children(container.forked["pid"])
    replies: list[Any] = []
    starting = threading.Thread(target=lambda: replies.append(container.init()[1]))
    events = [event(Phase.RECEIVED), event(Phase.FETCH_BEGIN, group_id="f" * 32, host="h1")]
    starting.start()
    trickle(descriptor_socket, until=0.9)
    wait_until_idle(engine)  # it has built the model, and waits for more bytes
    os.kill(engine, signal.SIGSTOP)
    descriptor_socket.arrive(descriptor_socket.n_bytes)
    events.append(event(Phase.FETCH_END, group_id="f" * 32, host="h1", n_bytes=descriptor_socket.n_bytes))
    threading.Event().wait(3.0)  # the engine stays stopped for this long
    os.kill(engine, signal.SIGCONT)
    starting.join()
    ran = container.stream(CAPITAL, "chat")[-1]
    events += [wire.from_plain(TraceEvent, e) for e in (*replies[0]["events"], *ran["events"])]
    events.append(replace(next(e for e in events if e.name == Phase.PREFILL_END), name=Phase.FIRST_TOKEN))

    timeline = analyse(events)
    assert timeline is not None
    explanation = explained(timeline, lambda fetch: (fetch.n_bytes or 0) / fetch.seconds)
    (stop,) = explanation.stops
    assert stop.interval.seconds >= 1.5  # on a busy machine the parent may learn of the stop late
    assert len(stop.during) == 1, stop
    blamed = [a for a in explanation.accounts if any(s.what == "stopped" for s in a.shares)]
    assert [a.phase.phase for a in blamed] == list(stop.during) == ["load"]
    assert blamed[0].phase.end_s - next(i.end_s for i in timeline.intervals if i.phase == "fetch") >= 2.9
    assert blamed[0].unexplained_s < 2.9
    screen = io.StringIO()
    explain.show(Console(file=screen, width=150), {"events": [wire.to_plain(e) for e in events]}, "a" * 32)
    (line,) = (line for line in screen.getvalue().splitlines() if "did not run for" in line)
    assert re.fullmatch(r"engine on h1 did not run for \d\.\d+ s at .*, in load \(SIGSTOP\)", line), line


def children(pid: int) -> list[int]:
    return [child for child in running() if parent(child) == pid]


def wait_until_idle(pid: int) -> None:
    """Wait until the threads of a process do next to nothing for a second, and none of them waits for a processor."""
    deadline = time.monotonic() + 120
    before = busy_s(pid)
    while True:
        threading.Event().wait(1.0)
        now = busy_s(pid)
        if sum(seconds - before.get(thread, 0.0) for thread, seconds in now.items()) < 0.1:
            return
        assert time.monotonic() < deadline, f"process {pid} still computes"
        before = now


def busy_s(pid: int) -> dict[str, float]:
    """Return for how long each thread of a process has been on a core or ready for one."""
    return {
        task.name: sum(parse_schedstat((task / "schedstat").read_bytes()))
        for task in Path(f"/proc/{pid}/task").iterdir()
    }


def wake_ups(pid: int) -> int:
    """Return how often the threads of a process and of its children have gone to sleep so far."""
    family = [pid, *children(pid)]
    statuses = [status.read_text() for member in family for status in Path(f"/proc/{member}/task").glob("*/status")]
    return sum(int(line.split()[1]) for s in statuses for line in s.splitlines() if line.startswith("voluntary"))


def running() -> list[int]:
    return [int(p.name) for p in Path("/proc").iterdir() if p.name.isdigit()]


def parent(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except FileNotFoundError:
        return 0


def trickle(descriptor_socket: FakeDescriptorSocket, until: float = 1.0) -> None:
    """Let the weights arrive as over a slow link, in four seconds from when both processes have the segment.

    Only the part ``until`` of them arrives.
    """
    descriptor_socket.arrive(descriptor_socket.sidecar_bytes)
    descriptor_socket.wait_served(2)
    bell = threading.Event()
    for i in range(1, round(80 * until) + 1):
        descriptor_socket.arrive(
            descriptor_socket.sidecar_bytes + (descriptor_socket.n_bytes - descriptor_socket.sidecar_bytes) * i // 80
        )
        bell.wait(0.05)


def ours(container: Forked, prompts: list[list[int]], n_tokens: int) -> list[list[int]]:
    status, reply = container.init(dtype="float32")
    assert status == 200, reply
    container.rehearsal_s = next(e["attrs"]["rehearsal_s"] for e in reply["events"] if e["name"] == "load.end")
    body = {"max_tokens": n_tokens, "temperature": 0, "ignore_eos": True}
    return [[m["token_id"] for m in container.stream(body | {"prompt": p})[:-1]] for p in prompts]


def vanilla(model: Path, prompts: list[list[int]], n_tokens: int) -> list[list[int]]:
    command = [sys.executable, str(Path(__file__).parent / "vanilla.py"), str(model), "float32", str(n_tokens)]
    done = subprocess.run(command, input=json.dumps(prompts), capture_output=True, text=True, timeout=800, check=False)
    line = next((line for line in done.stdout.splitlines() if line.startswith("REFERENCE ")), None)
    assert line is not None, done.stderr[-2000:]
    answers = json.loads(line.removeprefix("REFERENCE "))
    assert isinstance(answers, list)
    return answers


def copy_with_config(model: Path, target: Path, **changes: Any) -> Path:
    shutil.copytree(model, target)
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(config | changes))
    return target


def swap_two_layers(model: Path, target: Path) -> Path:
    """Make a checkpoint with the same bytes under other names: layers 10 and 11 are swapped."""
    shutil.copytree(model, target)
    path = target / "model.safetensors"
    data = path.read_bytes()
    n = int.from_bytes(data[:8], "little")
    header = data[8 : 8 + n].replace(b"layers.10.", b"layers.@@.").replace(b"layers.11.", b"layers.10.")
    path.write_bytes(data[:8] + header.replace(b"layers.@@.", b"layers.11.") + data[8 + n :])
    return target
