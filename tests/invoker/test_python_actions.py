"""The whole life of ordinary functions: a Start command, the record, runs through the data port, logs, the end."""

from __future__ import annotations

import http.client
import json
import os
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from invoker.containers.fleet import Fleet
from invoker.containers.live import Run
from invoker.drivers.activation_logs import LogCollector
from invoker.drivers.base import Handle, Spec
from invoker.drivers.programs import PROGRAMS
from relay.state import keys
from tests import function_imports
from tests.invoker.platform import WAIT_S, Host, until
from tests.runtime_python.conftest import zipped
from thaw.action import KIND_PYTHON, StoredCode
from thaw.ids import random_hex_id
from thaw.instance import StartMode
from thaw.tracing.trace import Phase

HELLO = "def main(args):\n    return {'greeting': 'Hello ' + args.get('name', 'stranger') + '!'}\n"


def test_a_start_command_makes_a_function_answer(host: Host) -> None:
    record = host.serving(HELLO)
    assert record.start_mode is StartMode.COLD
    assert record.slots == 1
    assert record.init_ms > 0
    assert record.reserve_bytes == 128 << 20
    assert host.run(record.instance_id, {"name": "Ada"}) == (200, {"greeting": "Hello Ada!"})
    assert host.run(record.instance_id, {}) == (200, {"greeting": "Hello stranger!"})


def test_a_start_explains_itself_under_its_group(host: Host) -> None:
    host.deploy(HELLO)
    plan = host.plan()
    record = host.ready(plan)
    host.release(record.instance_id)
    host.gone(record.instance_id)
    until(lambda: len(host.records.trace(plan.group_id)) >= 7)
    names = [e.name for e in host.records.trace(plan.group_id)]
    assert names == [
        Phase.COMMAND,
        Phase.CLOCK,
        Phase.CONTAINER_BEGIN,
        Phase.CONTAINER_END,
        Phase.INIT_BEGIN,
        Phase.INIT_END,
        Phase.READY,
    ]


def test_a_zip_with_a_module_beside_main_runs(host: Host) -> None:
    main = "from helper import greet\ndef niam(args):\n    return greet(args)\n"
    files = {"__main__.py": main, "helper.py": "def greet(args):\n    return {'hi': args['name']}\n"}
    record = host.serving(zipped(files), binary=True, main="niam")
    assert host.run(record.instance_id, {"name": "zip"}) == (200, {"hi": "zip"})


def test_a_parameter_with_init_is_a_variable_when_the_code_is_loaded(host: Host) -> None:
    code = """
import os
AT_INIT = {name: os.environ[name] for name in ('DB_URL', 'SIZES', '__OW_NAMESPACE')}
def main(args): return {**AT_INIT, **args}
"""
    old = host.deploy(code)
    given = {"DB_URL": "x", "SIZES": [1, 2.5]}
    host.records.put_action(replace(old, init_parameters=given), last=old.version, old=old)
    record = host.ready()
    found = {"DB_URL": "x", "SIZES": "[1,2.5]", "__OW_NAMESPACE": "guest", "a": 1}
    assert host.run(record.instance_id, {"a": 1}) == (200, found)


def deploy_in_pieces(host: Host, *pieces: bytes) -> StoredCode:
    upload = host.records.code.begin()
    for piece in pieces:
        upload.add(piece)
    old = host.deploy("")
    stored = upload.end()
    action = replace(old, version="0.0.2", exec=replace(old.exec, code=stored))
    host.records.put_action(action, last=old.version, old=old)
    return stored


def test_code_in_pieces_runs(host: Host) -> None:
    ice = "\U0001f9ca" * 50_000
    main = b'def main(args):\n    return {"n": len(ICE), "quoted": "\\"\\n", "last": ICE[-1]}\n'
    deploy_in_pieces(host, f"ICE = '{ice[:20_000]}".encode(), f"{ice[20_000:]}'\n".encode(), main)
    record = host.ready(host.plan(version="0.0.2"))
    assert host.run(record.instance_id, {}) == (200, {"n": 50_000, "quoted": '"\n', "last": "\U0001f9ca"})


def test_code_that_is_not_what_was_deployed_is_not_run(host: Host) -> None:
    stored = deploy_in_pieces(host, HELLO.encode())
    host.client.hset(keys.code(stored.id), "0", HELLO.replace("Hello", "Adieu"))
    error = host.failed(host.launch(host.plan(version="0.0.2")))
    assert error.message == "The stored code of the action is damaged."


@pytest.fixture
def without_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each container end at once."""
    monkeypatch.setitem(PROGRAMS, KIND_PYTHON, ("-c", "import sys; sys.exit('no such library')"))


def test_a_container_that_ends_at_once_says_why_though_its_exit_is_reported_late(
    host: Host, without_library: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The start's own thread sees the process end, and must wait for the driver's report of the exit."""
    never, driver = threading.Event(), host.agent.driver
    monkeypatch.setattr(driver, "_callbacks", [lambda _: never.wait(0.5), *driver._callbacks])
    host.deploy(HELLO)
    error = host.failed(host.launch())
    assert error.code == "InitFailed"
    assert error.message == "the container ended while it started (status 1): no such library"


def test_a_container_that_ends_before_its_start_has_attached_it_says_why(
    host: Host, without_library: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    reported, driver = threading.Event(), host.agent.driver
    start = driver.start

    def start_late(handle: Handle, spec: Spec) -> Handle:
        started = start(handle, spec)
        assert reported.wait(WAIT_S)
        return started

    monkeypatch.setattr(driver, "_callbacks", [*driver._callbacks, lambda _: reported.set()])
    monkeypatch.setattr(driver, "start", start_late)
    host.deploy(HELLO)
    error = host.failed(host.launch())
    assert error.message == "the container ended while it started (status 1): no such library"


def test_logs_go_to_the_activation_that_printed_them(host: Host) -> None:
    record = host.serving("def main(args):\n    print('run', args['n'])\n    return {}\n")
    ids = [random_hex_id() for _ in range(3)]
    for n, activation_id in enumerate(ids):
        host.run(record.instance_id, {"n": n}, activation_id=activation_id)
    for n, activation_id in enumerate(ids):
        assert host.texts(record.instance_id, activation_id) == [f"stdout: run {n}"]


def test_who_asks_for_the_lines_as_soon_as_it_has_the_answer_gets_them(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The caller reads the answer before the invoker's own thread continues, on a busy machine long before."""
    run_ended = LogCollector.run_ended

    def late(self: LogCollector, activation_id: str) -> None:
        threading.Event().wait(0.3)
        run_ended(self, activation_id)

    monkeypatch.setattr(LogCollector, "run_ended", late)
    record = host.serving("def main(args):\n    print('hello')\n    return {}\n")
    assert host.run(record.instance_id, {}, activation_id="a" * 32) == (200, {})
    assert host.texts(record.instance_id, "a" * 32) == ["stdout: hello"]


def test_a_hundred_megabytes_of_print_neither_stop_nor_fill_anything(host: Host) -> None:
    code = "def main(args):\n    for _ in range(100):\n        print('x' * 1000000)\n    return {'done': True}\n"
    record = host.serving(code, timeout=60_000)
    activation_id = random_hex_id()
    assert host.run(record.instance_id, {}, activation_id=activation_id) == (200, {"done": True})
    lines = host.logs(record.instance_id, activation_id)
    assert sum(map(len, lines)) < 11 * 1024 * 1024
    assert "Logs were truncated" in lines[-1]
    assert host.run(record.instance_id, {}) == (200, {"done": True})
    host.logs(record.instance_id, activation_id)
    size = sum(f.stat().st_size for f in host.run_dir.rglob("stdout.log"))
    assert size < 1024 * 1024


def test_a_run_over_its_time_limit_is_answered_and_its_container_ended(host: Host) -> None:
    record = host.serving("import time\ndef main(args):\n    time.sleep(60)\n", timeout=300)
    status, body = host.run(record.instance_id, {})
    assert status == 502
    assert body["error"] == "The action exceeded its time limits of 300 milliseconds."
    assert body["info"]["code"] == "TimeLimitExceeded"
    host.gone(record.instance_id)


BESIDE = """\
import os
def main(args):
    os.close(os.open(args['began'], os.O_WRONLY))
    return {'read': open(args['fifo']).read()}
"""


TwoRuns = tuple[Host, str, list[http.client.HTTPConnection], list[Path]]


@pytest.fixture
def two_runs(host: Host, tmp_path: Path) -> Iterator[TwoRuns]:
    """Two runs of one container that have begun.  Each ends when its named pipe is closed."""
    instance_id = host.serving(BESIDE, concurrency=2).instance_id
    connections, fifos = [], []
    for n in range(2):
        began, fifo = tmp_path / f"began-{n}", tmp_path / f"fifo-{n}"
        os.mkfifo(began)
        os.mkfifo(fifo)
        connection = host.connection()
        body = json.dumps({"value": {"began": str(began), "fifo": str(fifo)}})
        connection.request("POST", f"/instances/{instance_id}/run", body, host.headers())
        began.read_bytes()
        connections.append(connection)
        fifos.append(fifo)
    yield host, instance_id, connections, fifos
    for connection in connections:
        connection.close()


def test_a_caller_that_hangs_up_keeps_its_slot_and_fails_no_other(two_runs: TwoRuns) -> None:
    host, instance_id, (first, second), (of_first, of_second) = two_runs
    live = host.live(instance_id)
    first.close()
    until(lambda: live.unwanted == 1)
    assert host.run(instance_id, {})[0] == 429
    of_first.write_text("nobody's")
    until(lambda: live.inflight == 1)
    of_second.write_text("text")
    response = second.getresponse()
    assert (response.status, json.loads(response.read())) == (200, {"read": "text"})
    assert live.unwanted == 0


def test_who_has_an_answer_may_send_the_next_run_before_the_host_notes_the_end(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a busy machine the caller is faster than the invoker's own thread."""
    end_run, answered = Fleet.end_run, threading.Event()

    def late(self: Fleet, run: Run) -> None:
        answered.wait(WAIT_S)
        end_run(self, run)

    monkeypatch.setattr(Fleet, "end_run", late)
    record = host.serving("def main(args):\n    print(args['n'])\n    return args\n")
    instance_id, ids = record.instance_id, [random_hex_id() for _ in range(3)]
    for n, activation_id in enumerate(ids):
        assert host.run(instance_id, {"n": n}, activation_id=activation_id) == (200, {"n": n})
    live = host.live(instance_id)
    assert (live.inflight, live.slots_taken) == (3, 0)
    answered.set()
    assert live.idle.wait(WAIT_S)
    for n, activation_id in enumerate(ids):
        assert host.texts(instance_id, activation_id) == [f"stdout: {n}"]


def test_a_container_whose_callers_have_all_hung_up_is_ended(two_runs: TwoRuns) -> None:
    host, instance_id, connections, _ = two_runs
    for connection in connections:
        connection.close()
    assert host.gone(instance_id).error is None, "the instance did not fail"


def test_the_platforms_environment_does_not_reach_user_code(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    record = host.serving("import os\ndef main(args):\n    return dict(os.environ)\n")
    _, environment = host.run(record.instance_id, {})
    assert not [name for name in environment if name.startswith(("AWS_", "THAW_"))]
    assert environment["__OW_ACTIVATION_ID"]


def test_a_function_may_import_the_standard_library_and_nothing_of_the_platforms(host: Host) -> None:
    """The same holds in the image: tests/docker/test_isolation.py."""
    record = host.serving(function_imports.PROBE)
    status, answer = host.run(record.instance_id, function_imports.ARGUMENTS)
    assert status == 200
    function_imports.check(answer)


def test_a_missing_action_ends_the_start_with_not_found(host: Host) -> None:
    assert host.failed(host.launch(host.plan("guest/none"))).code == "NotFound"


def test_memory_that_this_host_will_never_have_is_named(host: Host) -> None:
    host.deploy(HELLO, memory=4096)
    error = host.failed(host.launch())
    assert error.code == "MemoryTooSmall"
    assert error.message == "the function needs 4096 MiB, this host has 2048 MiB"
