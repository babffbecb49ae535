"""The container's HTTP contract, with the real proxy and wire and the toy engine."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from functools import partial
from http.client import HTTPException
from pathlib import Path
from typing import Any

import pytest

from gateway.serving.routing.elsewhere import sign_of
from relay.clients.channel import Channel
from relay.clients.http_unix import UnixConnection
from tests.thaw_runtime.conftest import STREAM, TOY, Container, frames, llm_init, run_body
from tests.thaw_runtime.fake_descriptor_socket import FakeDescriptorSocket
from tests.thaw_runtime.models import write_tiny_model
from thaw import wire
from thaw.errors import ErrorInfo, InstanceGone, TimeLimitExceeded, WorkerLost, from_info
from thaw_runtime.engine.link import EngineLink
from thaw_runtime.llm.container import LONG_BYTES, LlmContainer
from thaw_runtime.llm.proxy import EXIT_ENGINE_LOST, EXIT_KILLED

PROMPT = {"prompt": "hello", "max_tokens": 8, "temperature": 0}


def test_health_answers_before_anything_was_started(container: Container) -> None:
    assert container.ask("GET", "/health") == (200, {"state": "new", "inflight": 0})


def test_a_run_before_init_is_sent_elsewhere(container: Container) -> None:
    status, reply = container.run(PROMPT)
    assert (status, reply["info"]["code"]) == (500, "InstanceGone")


def test_a_container_is_initialised_once(ready: Container) -> None:
    status, reply = ready.init()
    assert (status, reply["error"]) == (409, "Cannot initialize the action more than once.")


def test_init_waits_for_the_weights_but_not_with_the_tokenizer(container: Container) -> None:
    done: list[tuple[int, dict[str, object]]] = []
    thread = threading.Thread(target=lambda: done.append(container.init()))
    thread.start()
    container.descriptor_socket.arrive(container.descriptor_socket.sidecar_bytes)
    other = UnixConnection(container.socket, timeout=10)
    other.request("GET", "/health")
    assert json.loads(other.getresponse().read())["state"] in ("new", "starting")
    other.close()
    assert not done
    container.descriptor_socket.arrive(container.descriptor_socket.n_bytes)
    thread.join(30)
    status, reply = done[0]
    assert status == 200
    names = [e["name"] for e in reply["events"]]  # type: ignore[attr-defined]
    assert {"tokenizer.begin", "tokenizer.end", "load.begin", "load.end", "init.begin", "init.end"} <= set(names)
    assert names.index("tokenizer.end") < names.index("load.end")
    assert {e["group_id"] for e in reply["events"]} == {"f" * 32}  # type: ignore[attr-defined]


def test_a_failed_fetch_fails_the_init_with_its_own_error(container: Container) -> None:
    container.descriptor_socket.arrive(container.descriptor_socket.sidecar_bytes)
    container.descriptor_socket.fail(ErrorInfo("ModelCorrupt", "chunk 3 failed its checksum"))
    status, reply = container.init()
    assert (status, reply["info"]["code"], reply["error"]) == (502, "ModelCorrupt", "chunk 3 failed its checksum")


def test_a_model_that_the_engine_refuses_is_refused_before_its_tokenizer_is_there(container: Container) -> None:
    """The engine ends once it has refused, and its container soon afterwards."""
    status, reply = container.init(args={"refuse": "no such layers"})
    assert (status, reply["info"]["code"], reply["error"]) == (502, "ModelUnsupported", "no such layers")


def test_a_container_killed_in_the_middle_of_a_start_takes_its_engine_along(container: Container) -> None:
    engine = os.pidfd_open(int(container.out.read_text().split()[1]))
    container.http.request("POST", "/init", wire.dumps({"value": llm_init()}))
    container.descriptor_socket.wait_served(2)  # the engine and the text side have the segment and wait for bytes now
    container.process.kill()
    assert select.select([engine], [], [], 30)[0], "the engine is still there"
    os.close(engine)


def test_a_start_and_a_run_say_when_their_engine_was_stopped(container: Container) -> None:
    engine = int(container.out.read_text().split()[1])
    replies: list[dict[str, Any]] = []
    starting = threading.Thread(target=lambda: replies.append(container.init()[1]))
    starting.start()
    container.descriptor_socket.arrive(container.descriptor_socket.sidecar_bytes)
    container.descriptor_socket.wait_served(2)
    os.kill(engine, signal.SIGSTOP)
    container.descriptor_socket.arrive(container.descriptor_socket.n_bytes)
    threading.Event().wait(2.0)  # the engine stays stopped for this long
    os.kill(engine, signal.SIGCONT)
    starting.join(60)
    begin, end = (e for e in replies[0]["events"] if e["name"].startswith("stopped"))
    assert end["mono_ns"] - begin["mono_ns"] >= 0.3e9  # on a busy machine the parent may learn of the stop late
    assert (begin["group_id"], begin["host"]) == ("f" * 32, "h1")
    assert begin["attrs"] == {"process": "engine", "signal": "SIGSTOP"}

    assert not [e for e in container.stream(PROMPT)[-1]["events"] if e["name"].startswith("stopped")]
    os.kill(engine, signal.SIGSTOP)
    going_on = threading.Thread(target=go_on_after_the_run_began, args=(container, engine))
    going_on.start()
    ran = container.stream(PROMPT)[-1]["events"]
    going_on.join()
    begin, end = (e for e in ran if e["name"].startswith("stopped"))
    assert begin["activation_id"] == "a" * 32


def go_on_after_the_run_began(container: Container, engine: int) -> None:
    """Let the engine go on once the proxy has the run, so that the stop is in the run's time."""
    deadline = time.monotonic() + 30
    with closing(UnixConnection(container.socket, timeout=30)) as other:
        inflight = 0
        while not inflight and time.monotonic() < deadline:
            other.request("GET", "/health")
            inflight = json.loads(other.getresponse().read())["inflight"]
    threading.Event().wait(1.0)  # the engine stays stopped for this long
    os.kill(engine, signal.SIGCONT)


def test_a_stream_counts_from_zero_and_ends_once(ready: Container) -> None:
    messages = ready.stream(PROMPT)
    assert [m["index"] for m in messages[:-1]] == list(range(8))
    end = messages[-1]
    assert (end["t"], end["reason"], end["prompt_tokens"], end["completion_tokens"]) == ("RunFinished", "length", 5, 8)
    assert [e["name"] for e in end["events"]] == ["run.begin", "prefill.begin", "prefill.end", "run.end"]
    assert {e["activation_id"] for e in end["events"]} == {"a" * 32}


def test_a_resumed_stream_goes_on_where_the_other_stopped(ready: Container) -> None:
    whole = ready.stream(PROMPT | {"temperature": 1.0})
    first = [m["token_id"] for m in whole[:3]]
    rest = ready.stream(PROMPT | {"temperature": 1.0}, resume={"output_token_ids": first})
    assert rest[:-1] == whole[3:-1]
    assert rest[-1]["completion_tokens"] == 8


@pytest.mark.parametrize(
    ("changes", "n_tokens", "reason"),
    [({}, 8, "length"), ({"stop_token_ids": True}, 3, "stop"), ({"stop": True}, 3, "stop")],
    ids=["its length", "a stop token", "a stop string"],
)
def test_a_stream_that_lost_only_its_last_word_is_resumed_with_that(
    ready: Container, changes: dict[str, bool], n_tokens: int, reason: str
) -> None:
    whole = ready.stream(PROMPT | {"temperature": 1.0})[:n_tokens]
    values = {"stop_token_ids": [whole[-1]["token_id"]], "stop": whole[-1]["text"]}
    body = PROMPT | {"temperature": 1.0} | {name: values[name] for name in changes}
    (end,) = ready.stream(body, resume={"output_token_ids": [m["token_id"] for m in whole]})
    assert (end["t"], end["reason"], end["completion_tokens"]) == ("RunFinished", reason, n_tokens)


def test_a_run_that_only_computes_its_prompt_emits_no_token_and_ends_once(ready: Container) -> None:
    whole = ready.stream(PROMPT | {"temperature": 1.0})
    so_far = {"output_token_ids": [m["token_id"] for m in whole[:3]]}
    (end,) = ready.stream(PROMPT | {"temperature": 1.0, "stop": "x"}, resume=so_far, prefill_only=True)
    assert (end["t"], end["reason"], end["completion_tokens"], end["text"]) == ("RunFinished", "prefilled", 3, "")
    assert [e["name"] for e in end["events"]] == ["run.begin", "prefill.begin", "prefill.end", "run.end"]


@pytest.mark.parametrize("n_tokens", [8, 7])
def test_of_an_answer_that_is_over_or_nearly_so_the_prompt_is_computed_too(ready: Container, n_tokens: int) -> None:
    whole = ready.stream(PROMPT | {"temperature": 1.0})
    so_far = {"output_token_ids": [m["token_id"] for m in whole[:n_tokens]]}
    (end,) = ready.stream(PROMPT | {"temperature": 1.0}, resume=so_far, prefill_only=True)
    assert (end["reason"], end["completion_tokens"]) == ("prefilled", n_tokens)


def test_a_chat_goes_through_the_checkpoints_template(ready: Container) -> None:
    chat = ready.stream({"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}, "chat")
    plain = ready.stream({"prompt": "<user>hi<assistant>", "max_tokens": 4})
    assert chat[:-1] == plain[:-1]


def test_what_no_template_or_tokenizer_takes_is_refused_on_a_connection_that_stays(ready: Container) -> None:
    chat = {"messages": [{"role": "user", "content": "hi"}]}
    for variables in ("x", [1], {"messages": []}):
        status, reply = ready.run(chat | {"chat_template_kwargs": variables}, "chat")
        assert (status, reply["info"]["code"]) == (400, "BadRequest"), variables


def test_a_failure_nobody_foresaw_is_a_whole_answer(ready: Container) -> None:
    status, reply = ready.run({}, "chat")  # a gateway would refuse this request
    assert (status, reply["info"]["code"]) == (500, "PlatformError")
    assert len(ready.stream(PROMPT)) == 9


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("chat_template.jinja", b"\xff"),
        ("generation_config.json", b'{"eos_token_id": [[1]]}'),
        ("tokenizer_config.json", b'{"chat_template": [5]}'),
    ],
)
def test_a_checkpoint_whose_text_makes_no_sense_is_corrupt(tmp_path: Path, name: str, content: bytes) -> None:
    model = write_tiny_model(tmp_path / "model")
    (model / name).write_bytes(content)
    descriptor_socket = FakeDescriptorSocket(model, tmp_path / "socket", arrived=False)
    descriptor_socket.arrive(descriptor_socket.sidecar_bytes)  # the engine still waits for the weights
    container = Container(TOY, tmp_path, descriptor_socket)
    try:
        container.wait_listening()
        status, reply = container.init()
        assert (status, reply["info"]["code"]) == (502, "ModelCorrupt")
        assert container.ask("GET", "/health")[1]["state"] == "failed"
    finally:
        container.close()
        descriptor_socket.close()


def test_a_request_beyond_the_context_is_refused_in_openais_words(ready: Container) -> None:
    status, reply = ready.run(PROMPT | {"max_tokens": 508})
    assert status == 400
    assert reply["error"].startswith("This model's maximum context length is 512 tokens. However, you requested 513")
    assert reply["info"]["hint"] == "context_length_exceeded"


def test_more_than_a_message_holds_is_refused_and_not_sent(ready: Container) -> None:
    """The gateway would end the run as one of a broken container."""
    (last,) = ready.stream({"tokens": [97] * 2_200_000}, "detokenize")
    assert (last["t"], last["error"]["code"]) == ("RunFailed", "BadRequest")
    assert last["error"]["message"].startswith("what is known of this text takes")


def test_tokens_that_the_model_does_not_have_are_no_beginning_of_an_answer(ready: Container) -> None:
    status, reply = ready.run(PROMPT, resume={"output_token_ids": [1, 999_999]})
    assert (status, reply["info"]["code"]) == (400, "BadRequest")
    assert "token id 999999 is outside the vocabulary" in reply["error"]
    assert ready.stream(PROMPT)[-1]["t"] == "RunFinished", "the engine lives"


def test_an_answer_that_another_version_of_the_model_began_is_refused(container: Container) -> None:
    container.descriptor_socket.arrive(container.descriptor_socket.n_bytes)
    assert container.init(model_version="a" * 64)[0] == 200
    status, reply = container.run(PROMPT, resume={"output_token_ids": [1], "model_version": "b" * 64})
    assert (status, reply["info"]["code"]) == (500, "ModelChanged")
    assert f"version {'b' * 16} of the model began this answer" in reply["error"]
    for version in ("a" * 64, ""):
        messages = container.stream(PROMPT, resume={"output_token_ids": [1], "model_version": version})
        assert messages[-1]["t"] == "RunFinished"


@pytest.mark.parametrize(
    ("body", "endpoint"),
    [
        ({"prompt": "x" * 1_000_000}, "completions"),
        ({"prompt": ["x" * 1_000_000]}, "completions"),
        ({"prompt": "x" * 500_000, "suffix": "x" * 500_000}, "completions"),
    ],
)
def test_a_text_that_cannot_have_so_few_tokens_is_refused_before_it_is_tokenised(
    ready: Container, body: dict[str, Any], endpoint: str
) -> None:
    status, reply = ready.run(body, endpoint)
    assert (status, reply["info"]["hint"]) == (400, "context_length_exceeded")
    assert reply["error"].startswith(
        "This model's maximum context length is 512 tokens. However, your prompt contains 1000000 characters, and 512 "
        "tokens have "
    )


def test_long_texts_take_turns_and_hold_up_no_short_one() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        container = LlmContainer(EngineLink(Channel(ours), os.getpid()), "")
        body = {"value": {}, "deadline": str(int(time.time() * 1000) + 200)}
        with container._turn(None), ThreadPoolExecutor(2) as threads:
            long, short = (threads.submit(container.run, body, "", n) for n in (LONG_BYTES + 1, LONG_BYTES))
            with pytest.raises(InstanceGone):  # it has not been initialised, and says so at once
                short.result(20)
            with pytest.raises(TimeLimitExceeded):
                long.result(20)
        with pytest.raises(InstanceGone):
            container.run({"value": {}}, "", LONG_BYTES + 1)


@pytest.fixture
def slow_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the engines of containers that start later slow: 500 tokens take more than a minute."""
    monkeypatch.setenv("TOY_STEP_S", "0.2")


@pytest.mark.usefixtures("slow_engine")
def test_a_client_that_hangs_up_frees_its_slot(ready: Container) -> None:
    other = UnixConnection(ready.socket, timeout=10)
    other.request("POST", "/run", json.dumps(run_body({"prompt": "x", "max_tokens": 500}, "completions")), STREAM)
    reply = other.getresponse()
    next(frames(reply))
    assert ready.ask("GET", "/health")[1]["inflight"] == 1
    reply.close()
    other.close()
    began = time.monotonic()
    while ready.ask("GET", "/health")[1]["inflight"]:
        assert time.monotonic() - began < 30


def test_a_run_past_its_deadline_fails_as_such(ready: Container) -> None:
    messages = ready.stream({"prompt": "x", "max_tokens": 500}, deadline=str(int(time.time() * 1000) + 50))
    assert messages[-1]["t"] == "RunFailed"
    assert messages[-1]["error"]["code"] == "TimeLimitExceeded"


def test_a_dead_engine_fails_its_runs_and_ends_the_container(ready: Container) -> None:
    engine = int(ready.out.read_text().split()[1])
    ready.http.request("POST", "/run", json.dumps(run_body({"prompt": "x", "max_tokens": 500}, "completions")), STREAM)
    reply = ready.http.getresponse()
    stream = frames(reply)
    next(stream)
    os.kill(engine, signal.SIGKILL)
    last = list(stream)[-1]
    assert (last["t"], last["error"]["code"]) == ("RunFailed", "WorkerLost")
    assert "killed by SIGKILL" in last["error"]["message"]
    assert ready.process.wait(10) == EXIT_KILLED + signal.SIGKILL


def asked(path: str, body: dict[str, Any]) -> BaseException | None:
    """Ask the container once.  Returns the error with which a gateway sees the answer end; None for a whole answer."""
    with closing(UnixConnection(path, timeout=30)) as http:
        try:
            http.request("POST", "/run", json.dumps(run_body(body, "completions")), STREAM)
            reply = http.getresponse()
            last = json.loads(reply.read())["info"] if reply.status != 200 else list(frames(reply))[-1]
        except (OSError, HTTPException, IndexError) as e:
            return WorkerLost(f"the connection broke: {e!r}")
    error = last if reply.status != 200 else last.get("error")
    return None if error is None else from_info(wire.from_plain(ErrorInfo, error))


@pytest.mark.parametrize("is_kept", [False, True])
def test_every_run_that_comes_while_the_engine_dies_is_one_that_goes_on_elsewhere(
    ready: Container, is_kept: bool
) -> None:
    """One comes every 10 ms, until the container has ended.  A client that has not sent its whole request keeps the
    container as long as one may."""
    engine, ends = int(ready.out.read_text().split()[1]), list[Future[BaseException | None]]()
    if is_kept:
        ready.http.putrequest("POST", "/run")
        ready.http.putheader("Content-Length", "100")
        ready.http.endheaders(b"{")
    pause, n_before = threading.Event(), 20
    with ThreadPoolExecutor(64) as clients:
        while ready.process.poll() is None:
            ends.append(clients.submit(asked, ready.socket, PROMPT))
            if len(ends) == n_before:
                os.kill(engine, signal.SIGKILL)
            assert len(ends) < 3000, "the container stays"
            pause.wait(0.01)
    found = [end.result(60) for end in ends]
    assert None in found[:n_before]
    assert not [error for error in found if error is not None and sign_of(error) is None]
    assert any(isinstance(error, InstanceGone) for error in found) or not is_kept


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV, signal.SIGTERM])
def test_an_engine_killed_while_it_starts_is_a_lost_worker_and_no_fault_of_the_model(
    container: Container, number: signal.Signals
) -> None:
    engine = int(container.out.read_text().split()[1])
    container.descriptor_socket.arrive(container.descriptor_socket.sidecar_bytes)  # the engine waits for the rest
    container.http.request("POST", "/init", wire.dumps({"value": llm_init()}))
    container.descriptor_socket.wait_served(1)  # a client has used the descriptor socket, so the start has begun
    os.kill(engine, number)
    reply = container.http.getresponse()
    said = json.loads(reply.read())
    assert (reply.status, said["info"]["code"]) == (500, "WorkerLost")
    assert said["error"] == f"the engine process was killed by {number.name} while it started"
    assert container.process.wait(10) == EXIT_KILLED + number


def test_an_engine_whose_start_raises_ends_though_its_traceback_finds_no_room(
    tmp_path: Path, descriptor_socket: FakeDescriptorSocket
) -> None:
    (tmp_path / "err").symlink_to("/dev/full")
    container = Container(TOY, tmp_path, descriptor_socket)
    try:
        container.wait_listening()
        descriptor_socket.arrive(descriptor_socket.n_bytes)
        status, reply = container.init(args={"raise": "yes"})
        assert (status, reply["error"]) == (502, "the engine process ended with status 70 while it started")
        assert container.process.wait(10) == EXIT_ENGINE_LOST
    finally:
        container.close()


def test_an_engine_that_ends_by_itself_while_it_starts_would_do_so_again(container: Container) -> None:
    container.descriptor_socket.arrive(container.descriptor_socket.n_bytes)
    status, reply = container.init(args={"exit": 3})
    assert (status, reply["info"]["code"]) == (502, "InitFailed")
    assert reply["error"] == "the engine process ended with status 3 while it started"
    assert container.process.wait(10) == EXIT_ENGINE_LOST


def test_an_engine_that_breaks_fails_its_runs_and_ends_the_container(ready: Container) -> None:
    messages = ready.stream({"prompt": [0, 1], "max_tokens": 5})
    assert messages[-1]["t"] == "RunFailed"
    assert messages[-1]["error"]["code"] == "WorkerLost"
    assert ready.process.wait(10) == 70


def test_runs_leave_nothing_in_the_logs(ready: Container) -> None:
    """No process reads these logs, so no process empties them."""
    before = [log.read_bytes() for log in (ready.out, ready.err)]
    ready.stream(PROMPT)
    ready.run({"prompt": []})
    ready.ask("GET", "/health")
    assert [log.read_bytes() for log in (ready.out, ready.err)] == before


def test_a_body_that_is_no_json_or_no_init_is_a_bad_request(container: Container) -> None:
    container.http.request("POST", "/init", b"{")
    reply = container.http.getresponse()
    assert (reply.status, json.loads(reply.read())["info"]["code"]) == (400, "BadRequest")
    broken = wire.to_plain(llm_init())
    del broken["layers"]
    status, answer = container.ask("POST", "/init", {"value": broken})
    assert (status, answer["error"]) == (400, "$.value.layers: missing in LlmInit")


def test_a_containers_engine_waits_for_no_import_that_only_its_proxy_needs() -> None:
    """In a start from nothing the engine takes longest by far, so any import before it delays the first token."""
    asked = {"thaw_runtime.llm.proxy", "tokenizers", "jinja2", "jsonschema"}
    code = f"import sys, thaw_runtime.llm.main, thaw_runtime.engine.main; print({asked} & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "set()"


# ── the preflight ─────────────────────────────────────────────────────────────────────────────────────────────────


def preflight(container: Container, **changes: Any) -> tuple[int, Any]:
    container.descriptor_socket.arrive(container.descriptor_socket.sidecar_bytes)
    return container.ask("POST", "/preflight", {"value": llm_init(**changes)})


def test_a_preflight_answers_before_any_weight_has_come(container: Container) -> None:
    assert preflight(container) == (
        200,
        {"engine": "toy 1.0", "max_model_len": 512, "notes": [], "embeds": False, "most_stages": 0},
    )
    assert container.init()[0] == 409, "the container was used up"


def test_a_preflight_says_what_the_engine_reads_otherwise(container: Container) -> None:
    _, reply = preflight(container, args={"reads": 1})
    tokens, ends = reply["notes"]
    assert tokens.startswith("the engine's tokenizer reads \"The quick brown fox")
    assert "and 3 of 4 other texts as [1], and Thaw as [84, 104, 101, 32, 113, 117, 105, 99] …" in tokens
    assert ends == "the engine's libraries end an answer at the tokens [5], and Thaw at [256]"


def test_a_preflight_gives_the_engines_refusal_and_its_next_step(container: Container) -> None:
    status, reply = preflight(container, args={"refuse": "no such architecture"})
    assert (status, reply["info"]["code"]) == (502, "ModelUnsupported")
    assert (reply["error"], reply["info"]["hint"]) == ("no such architecture", "take another model")


@pytest.mark.parametrize(
    ("args", "code"),
    [({"raise": 1}, "PlatformError"), ({"exit": 3}, "InitFailed"), ({"grow": 1 << 30}, "PlatformError")],
)
def test_a_preflight_in_which_the_engine_breaks_is_answered(
    container: Container, args: dict[str, int], code: str
) -> None:
    status, reply = preflight(container, args=args)
    assert (status, reply["info"]["code"]) == (500 if code == "PlatformError" else 502, code)


@pytest.mark.parametrize(
    ("template", "note"),
    [
        (None, "the model has no chat template, so it answers /v1/completions and no chat"),
        (
            "{{ raise_exception('no users') }}",
            "the chat template refuses a plain question (the chat template refuses these messages: no users), so chat "
            "requests will fail",
        ),
    ],
)
def test_a_preflight_says_that_chat_will_not_work(tmp_path: Path, template: str | None, note: str) -> None:
    model = write_tiny_model(tmp_path / "model")
    (model / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    with container_of(model, tmp_path) as made:
        assert preflight(made)[1]["notes"] == [note]


def _with_template(model: Path, template: str | None) -> None:
    (model / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))


@pytest.mark.parametrize(
    ("spoil", "code", "message"),
    [
        (lambda m: (m / "tokenizer.json").unlink(), "ModelUnsupported", "the checkpoint has no tokenizer.json"),
        (
            partial(_with_template, template="{% if %}"),
            "ModelUnsupported",
            "the chat template does not compile: Expected an expression, got 'end of statement block'",
        ),
        *(
            (
                partial(_with_template, template=template),
                "ModelUnsupported",
                f"the chat template does not compile: {why}",
            )
            for template, why in (
                ("{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}", "maximum recursion depth exceeded"),
                ("{% if 1 %}" * 200 + "{% endif %}" * 200, "too many levels of indentation"),
            )
        ),
        *(
            (partial(_with_template, template=template), "PlatformError", "the chat template takes more memory than a")
            for template in ("{{ ('a' * 2000000000)|length }}", "{{ (messages[0].content * 400000000)|length }}")
        ),
    ],
)
def test_a_preflight_refuses_a_text_side_that_does_not_load(
    tmp_path: Path, spoil: Callable[[Path], object], code: str, message: str
) -> None:
    spoil(model := write_tiny_model(tmp_path / "model"))
    with container_of(model, tmp_path) as made:
        status, reply = preflight(made)
        assert (reply["info"]["code"], reply["error"][: len(message)]) == (code, message)
        assert status == (500 if code == "PlatformError" else 502)


@contextmanager
def container_of(model: Path, directory: Path) -> Iterator[Container]:
    descriptor_socket = FakeDescriptorSocket(model, directory / "own-socket", arrived=False)
    made = Container(TOY, directory, descriptor_socket)
    try:
        made.wait_listening()
        yield made
    finally:
        made.close()
        descriptor_socket.close()


def test_a_text_and_its_tokens_need_no_adapter(ready: Container) -> None:
    run = {"adapter": "s3://models/a"}
    assert ready.run(PROMPT, **run)[1]["info"]["code"] == "ModelUnsupported"
    (told,) = ready.stream({"tokens": [97]}, "detokenize", **run)
    assert (told["t"], told["prompt"]["text"]) == ("RunFinished", "a")
