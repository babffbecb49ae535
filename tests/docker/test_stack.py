"""A stack that the compose file starts works, survives the death of its processes, and leaves nothing.

Functions of kind python run in it here, because their image is small.  tests/docker/test_chat.py runs the model engine
in it.
"""

from __future__ import annotations

import contextlib
import json
import shlex
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import requests

from invoker.drivers.docker.uids import DEFAULT_RANGE
from tests.conftest import free_port
from tests.docker import standins
from tests.docker.engine import ROOT, DockerEngine
from tests.docker.stack import UP_S, Stack, kill
from tests.e2e.test_readme import blocks

pytestmark = pytest.mark.timeout(900)  # images are built and a stack comes up within the first test
SLOW = """
import time
def main(args):
    print("begun", args["who"])
    time.sleep(2)
    return {"done": args["who"]}
"""
COUNT = "seen = []\ndef main(args):\n    seen.append(1)\n    return {'n': len(seen)}\n"
UNTOUCHED = {"state", "scheduler", "relay", "store", "the host's fetchd", "the other host's invoker"}
"""A run does not need these while it runs, so their end must not affect it."""
VICTIMS = [*sorted(UNTOUCHED), "gateway", "the host's invoker", "the function"]
SAMPLE = {"the host's invoker"}


@pytest.fixture(scope="module")
def stack(docker_engine: DockerEngine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    for name in ("gateway", "invoker", "fetchd", "python"):
        docker_engine.build(name)
    standins.build(docker_engine.env)
    made = Stack(docker_engine, tmp_path_factory.mktemp("stack"))
    try:
        made.up()
        yield made
    finally:
        made.compose("down", "-v")
    assert made.left() == []


def test_the_stack_runs_a_function_in_a_container_of_its_own(stack: Stack, tmp_path: Path) -> None:
    code = tmp_path / "where.py"
    code.write_text(
        "import os\ndef main(args):\n    return {'uid': os.getuid(), 'files': sorted(os.listdir('/run/thaw'))}\n"
    )
    stack.thaw("action", "create", "where", str(code))
    found = json.loads(stack.thaw("action", "invoke", "where", "--blocking", "--result"))
    assert found["files"] == ["io", "packages"]
    assert found["uid"] in range(DEFAULT_RANGE.first, DEFAULT_RANGE.last + 1)


def test_the_schedulers_metrics_are_scraped_with_the_token_of_the_env_file(stack: Stack) -> None:
    """They are read at the address that a Prometheus would use."""
    token = stack.settings()["THAW_METRICS_TOKEN"]
    scheduler = stack.service("scheduler")
    address = scheduler.attrs["NetworkSettings"]["Networks"][f"{stack.name}_control"]["IPAddress"]
    headers, deadline = {"Authorization": f"Bearer {token}"}, time.monotonic() + UP_S
    page = ""
    while "thaw_scheduler_leading 1.0" not in page:  # a scheduler that an earlier test has killed has to restart first
        assert time.monotonic() < deadline, page
        threading.Event().wait(0.2)
        with contextlib.suppress(requests.ConnectionError):
            page = requests.get(f"http://{address}:9100/metrics", headers=headers, timeout=30).text
    assert requests.get(f"http://{address}:9100/metrics", timeout=30).status_code == 401
    check = scheduler.attrs["Config"]["Healthcheck"]["Test"]  # run it here, because a busy engine may begin it late
    assert check[0] == "CMD"
    healthy = f"{shlex.join(check[1:])} && echo healthy"  # an engine may know a command's status later than its output
    assert b"healthy" in stack.service("scheduler").exec_run(["sh", "-c", healthy]).output


@pytest.mark.full
def test_two_gateways_have_a_port_each(stack: Stack) -> None:
    low = next(p for p in range(free_port(), 65_000) if is_free(p) and is_free(p + 1))
    try:
        stack.shell("docker compose up -d --scale gateway=2 gateway 2>&1", THAW_PORT=f"{low}-{low + 1}")
        names = set()
        for port in (low, low + 1):
            names.add(stack.until_there(f"http://127.0.0.1:{port}/health").json()["gateway"])
        assert len(names) == 2
    finally:
        stack.compose("up", "-d", "gateway")
        stack.wait_back()


def is_free(port: int) -> bool:
    with socket.socket() as sock:
        return sock.connect_ex(("127.0.0.1", port)) != 0


def test_a_function_goes_on_when_its_invoker_was_killed(stack: Stack) -> None:
    """The same container serves again: the new invoker adopts it and does not make another one."""
    stack.deploy("count", COUNT)
    assert stack.invoke("count").json()["response"]["result"] == {"n": 1}
    former = stack.invokers()
    for host in ("host-1-invoker", "host-2-invoker"):
        kill(stack.service(host))
    stack.wait_invokers(former)
    assert stack.invoke("count").json()["response"]["result"] == {"n": 2}


def victim_of(stack: Stack, victim: str, host: str) -> str:
    """The service that ``victim`` names, if ``host`` runs the function."""
    other = next(h for h in ("host-1", "host-2") if h != host)
    names = {
        "the host's invoker": f"{host}-invoker",
        "the host's fetchd": f"{host}-fetchd",
        "the other host's invoker": f"{other}-invoker",
    }
    return names.get(victim, victim)


@pytest.mark.parametrize("victim", [pytest.param(v, marks=() if v in SAMPLE else pytest.mark.full) for v in VICTIMS])
def test_an_accepted_run_ends_in_one_record_whatever_is_killed_in_its_middle(stack: Stack, victim: str) -> None:
    """A function's run is never repeated: either it ended, or its record says what was lost.

    The killed process comes back by itself, and the next request is answered.
    """
    action = "slow-" + "".join(c for c in victim if c.isalpha())
    stack.deploy(action, SLOW)
    with stack.next_function() as awaited:
        accepted = stack.accepted(action, who="accepted")
        function = awaited.says("begun")
    kill(function if victim == "the function" else stack.service(victim_of(stack, victim, stack.host_of(function))))
    response = stack.record(accepted)["response"]
    if victim in UNTOUCHED or response["success"]:
        assert response["result"] == {"done": "accepted"}
    else:
        assert response["status"] == "whisk internal error"
        assert response["result"]["error"]
    assert stack.record(stack.accepted(action, who="next"))["response"]["result"] == {"done": "next"}


@pytest.mark.full
@pytest.mark.parametrize("victim", VICTIMS)
def test_a_held_request_is_answered_or_fails_clearly_whatever_is_killed_in_its_middle(
    stack: Stack, victim: str
) -> None:
    action = "held-" + "".join(c for c in victim if c.isalpha())
    stack.deploy(action, SLOW)
    replies: list[requests.Response] = []

    def ask() -> None:
        try:
            replies.append(stack.invoke(action, who="held"))
        except requests.RequestException:
            assert victim == "gateway"  # the gateway held the connection

    with stack.next_function() as awaited:
        asking = threading.Thread(target=ask)
        asking.start()
        function = awaited.says("begun")
    kill(function if victim == "the function" else stack.service(victim_of(stack, victim, stack.host_of(function))))
    asking.join(UP_S)
    assert not asking.is_alive()
    for reply in replies:
        if victim in UNTOUCHED or reply.status_code == 200:
            assert reply.json()["response"]["result"] == {"done": "held"}
        else:
            assert reply.status_code in (500, 502, 503), reply.text
            assert reply.json()["response"]["result"]["error"]
    assert len(replies) == 1 or victim == "gateway"
    stack.wait_back()
    assert stack.record(stack.accepted(action, who="next"))["response"]["result"] == {"done": "next"}


# the container engine -----------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # the SDK forgets a broken socket
@pytest.mark.parametrize("live_restore", [pytest.param("true"), pytest.param("false", marks=pytest.mark.full)])
def test_the_engine_is_killed_in_the_middle_of_a_request_and_comes_back(
    own_engine: DockerEngine, stack: Stack, live_restore: str
) -> None:
    """With live-restore, containers keep running and are adopted.  Without it, the engine ends all containers and
    restarts the services.
    """
    action = f"under-{live_restore}"
    stack.deploy("count", COUNT)
    before = stack.invoke("count").json()["response"]["result"]["n"]
    stack.deploy(action, SLOW)
    with stack.next_function() as awaited:
        accepted = stack.accepted(action, who="accepted")
        awaited.says("begun")
    former = stack.invokers()
    own_engine.forget_sockets()
    own_engine.script("crash")
    own_engine.script("up", THAW_ENGINE_LIVE_RESTORE=live_restore)
    own_engine.connect()
    response = stack.record(accepted)["response"]
    stack.wait_invokers(former)  # a request that comes before its host is back gets another instance
    again = stack.record(stack.accepted("count"))["response"]["result"]["n"]
    if live_restore == "true":
        assert response["result"] == {"done": "accepted"}
        assert again == before + 1
    else:
        assert response["result"].get("done") == "accepted" or response["result"]["error"]
        assert again == 1
    stack.deploy(f"new-{action}", COUNT)  # the restarted engine makes this container
    assert stack.record(stack.accepted(f"new-{action}"))["response"]["result"] == {"n": 1}


@pytest.mark.full
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # the SDK forgets a broken socket
def test_an_engine_that_is_stopped_waits_for_no_service_that_talks_to_the_others(
    own_engine: DockerEngine, stack: Stack
) -> None:
    """This happens at each shutdown of the machine.

    It takes 8 s.  With an invoker that waited for the state server and for the engine it took 64 s, because the grace
    period of an invoker alone is 60 s.
    """
    stack.deploy("count", COUNT)
    assert stack.invoke("count").json()["response"]["result"]["n"] > 0
    own_engine.forget_sockets()
    own_engine.script("crash")
    own_engine.script("up", THAW_ENGINE_LIVE_RESTORE="false")  # this engine ends its containers when it is stopped
    own_engine.connect()
    stack.wait_back()
    stack.wait_invokers({})
    own_engine.forget_sockets()
    took_s = float(own_engine.script("stop"))
    own_engine.script("up", THAW_ENGINE_LIVE_RESTORE="true")
    own_engine.connect()
    assert took_s < 20
    stack.wait_back()
    assert stack.record(stack.accepted("count"))["response"]["success"]


# TLS ----------------------------------------------------------------------------------------------------------------


def test_the_example_of_tls_in_front_of_the_gateway_works_as_documented(stack: Stack, tmp_path: Path) -> None:
    """The page's own commands run in a copy of the files that they read.  Only the port differs."""
    standins.build(stack.engine.env, "nginx")
    make_certificate, start = (b.code for b in blocks(ROOT / "docs/docker.md") if "deploy/tls" in b.code)
    for name in ("deploy", "docker-compose.yml"):
        subprocess.run(["cp", "-r", ROOT / name, tmp_path], check=True)
    port = free_port()
    stack.shell(make_certificate, tmp_path)
    try:
        said = stack.shell(start.replace(":3443", f":{port}"), tmp_path, THAW_TLS_PORT=str(port))
    finally:
        stack.shell(
            "docker compose -f docker-compose.yml -f deploy/tls/docker-compose.tls.yml rm -sf gateway-tls", tmp_path
        )
    assert json.loads(said)["status"] == "ok"
