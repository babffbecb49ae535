"""A whole platform with real components and real servers, but no model, comes up, recovers and leaves nothing."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from thaw.dev import leftovers, sweep
from thaw.dev.layout import Layout, Platform
from thaw.dev.processes import ProcessId, belonging_to, is_alive, wait_gone
from thaw.dev.restarts import read_pid_file
from thaw.dev.watch import LineReader

Run = Callable[..., subprocess.CompletedProcess[str]]
SMALL = ("--port", "0", "--pool-mb", "128", "--stem-cells", "off", "--memory-mb", "1024")
COMPONENTS = ["gateway", "host-0-fetchd", "host-0-invoker", "relay", "scheduler", "state"]


@pytest.fixture
def layout(tmp_path: Path) -> Iterator[Layout]:
    made = Layout(tmp_path / "state")
    yield made
    platform = made.read_platform()
    if platform is not None:  # a failed test must not leave its platform to the next test
        sweep.stop_supervisor(platform)
    sweep.sweep(made, platform)
    assert leftovers.find(made, platform) == []


@pytest.fixture
def thaw(layout: Layout, tmp_path: Path) -> Run:
    environ = {k: os.environ[k] for k in ("PATH", "LD_LIBRARY_PATH", "PYTHONPATH") if k in os.environ}
    environ |= {"THAW_STATE_DIR": str(layout.root), "HOME": str(tmp_path), "COLUMNS": "140"}

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "thaw.cli.main", *words],
            env=environ,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )

    return run


@pytest.fixture
def platform(thaw: Run, layout: Layout, tmp_path: Path) -> Platform:
    done = thaw("dev", "up", *SMALL, "--store", str(tmp_path / "store"), "--detach")
    assert done.returncode == 0, done.stdout + done.stderr
    found = layout.read_platform()
    assert found is not None
    return found


def pid_of(layout: Layout, component: str) -> ProcessId:
    recorded = read_pid_file(layout.pids / component)
    assert recorded is not None
    return recorded.process


def stage_address(layout: Layout) -> str:
    """The address at which the first host's stages can be reached, from the environment of its invoker."""
    environ = Path(f"/proc/{pid_of(layout, 'host-0-invoker').pid}/environ").read_bytes().split(b"\0")
    return next(e for e in environ if e.startswith(b"THAW_STAGE_ADDRESS=")).partition(b"=")[2].decode()


def nothing_is_left(layout: Layout, platform: Platform) -> None:
    assert leftovers.find(layout, platform) == []
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", int(platform.apihost.rsplit(":", 1)[1])), timeout=5)


def test_up_runs_a_function_and_down_leaves_nothing(
    platform: Platform, thaw: Run, layout: Layout, tmp_path: Path
) -> None:
    assert layout.wskprops.stat().st_mode & 0o777 == 0o600
    assert layout.platform_file.stat().st_mode & 0o777 == 0o600
    status = thaw("dev", "status")
    assert status.returncode == 0, status.stdout
    assert [line.split()[0] for line in status.stdout.splitlines() if " running " in line][:7] == [
        "supervisor",
        *COMPONENTS,
    ]
    (tmp_path / "hello.py").write_text("def main(args): return {'text': 'Hello, ' + args['name']}")
    assert thaw("action", "create", "hello", str(tmp_path / "hello.py")).returncode == 0
    done = thaw("action", "invoke", "hello", "--result", "-p", "name", "Ada")
    assert '"text": "Hello, Ada"' in done.stdout, done.stderr
    assert "host-0" in thaw("host", "list").stdout
    down = thaw("dev", "down")
    assert (down.returncode, down.stdout) == (0, "ok: the platform is down\n")
    nothing_is_left(layout, platform)
    assert thaw("dev", "status").returncode == 1


def test_a_tenant_of_the_platform_runs_what_is_its_own_and_nothing_else(thaw: Run, tmp_path: Path) -> None:
    """The commands of a tenant, and of the operator whose key the platform has printed."""
    store = tmp_path / "store"
    up = thaw("dev", "up", *SMALL, "--store", str(store), "--detach")
    assert "your key (thaw property get --auth) is an operator's" in up.stdout, up.stdout + up.stderr
    key = thaw("key", "create", "--namespace", "team-a").stdout.strip()
    (tmp_path / "hello.py").write_text("def main(args): return {'text': 'Hello'}")

    def tenant(*words: str) -> tuple[int, str]:
        done = thaw(*words, "--auth", key)
        return done.returncode, done.stdout + done.stderr

    def deploy(uri: str) -> tuple[int, str]:
        (tmp_path / "m.json").write_text(json.dumps({"kind": "llm:vllm", "model": {"uri": uri}}))
        # with --force, because whether a model is there is another question
        return tenant("action", "update", "m", "--config", str(tmp_path / "m.json"), "--force")

    assert tenant("action", "create", "hello", str(tmp_path / "hello.py"))[0] == 0
    assert "Hello" in tenant("action", "invoke", "hello", "--result")[1]
    commands = ("action list", "activation list", "activation get --last", "activation logs --last", "namespace list")
    for words in (*commands, "activation explain --last", "action get hello"):
        assert tenant(*words.split())[0] == 0, words
    for words in ("host list", "host drain host-0", "key list", "key create --namespace b", "namespace usage"):
        assert tenant(*words.split()) == (147, REFUSED), words
    assert deploy(f"{store.as_uri()}/mine")[0] == 0, "the platform's own store"
    for uri in (f"{store.as_uri()}-evil/m", "file:///etc", "s3://models/m", "http://127.0.0.1:6379/m"):
        status, said = deploy(uri)
        assert (status, "THAW_MODELS" in said) == (147, True), said
    assert thaw("namespace", "allow-models", "team-a", "s3://models").returncode == 0
    assert deploy("s3://models/m")[0] == 0
    assert thaw("key", "revoke", key.partition(":")[0]).returncode == 0
    assert tenant("action", "list")[0] == 145


REFUSED = (
    "error: Only an operator's key may do this.\nhint: ask an operator, or use such a key with --auth (thaw key create "
    "--namespace N --operator makes one)\n"
)


def test_a_second_up_says_that_it_is_up(platform: Platform, thaw: Run, layout: Layout) -> None:
    again = thaw("dev", "up", *SMALL)
    assert again.returncode == 0
    assert again.stdout == f"ok: the platform is up already, at {platform.apihost} (thaw dev down ends it)\n"
    assert is_alive(platform.supervisor)
    assert stage_address(layout) == "", "stages must not reach one another unless --direct asks for it"


def test_every_component_that_is_killed_comes_back_and_deployed_functions_stay(
    platform: Platform, thaw: Run, layout: Layout, tmp_path: Path
) -> None:
    (tmp_path / "f.py").write_text("def main(args): return {'ok': True}")
    assert thaw("action", "create", "f", str(tmp_path / "f.py")).returncode == 0
    before = {name: pid_of(layout, name) for name in COMPONENTS}
    for process in before.values():
        os.kill(process.pid, signal.SIGKILL)
    done = thaw("action", "invoke", "f", "--result")
    end = time.monotonic() + 60
    while done.returncode != 0 and time.monotonic() < end:  # each try either waits in the gateway or is refused at once
        done = thaw("action", "invoke", "f", "--result")
    assert '"ok": true' in done.stdout, done.stderr
    status = thaw("dev", "status")
    assert status.returncode == 0
    assert all(pid_of(layout, name) != before[name] for name in COMPONENTS)
    rows = {line.split()[0]: line for line in status.stdout.splitlines() if line.strip()}
    assert [name for name in COMPONENTS if "(signal SIGKILL)" not in rows[name]] == []
    restarts = [json.loads(line) for line in layout.supervisor_log.read_text().splitlines()]
    assert {e["component"].replace("/", "-") for e in restarts if e["cause"] == "signal SIGKILL"} == set(COMPONENTS)


def test_down_cleans_up_after_a_killed_supervisor(platform: Platform, thaw: Run, layout: Layout) -> None:
    os.kill(platform.supervisor.pid, signal.SIGKILL)
    wait_gone([platform.supervisor], 30.0)
    down = thaw("dev", "down")
    assert down.returncode == 0
    assert down.stdout.startswith("ok: the platform is down"), down.stdout
    nothing_is_left(layout, platform)


def test_down_cleans_up_when_supervisor_and_invoker_were_both_killed(
    platform: Platform, thaw: Run, layout: Layout, tmp_path: Path
) -> None:
    (tmp_path / "f.py").write_text("def main(args): return {'ok': True}")
    thaw("action", "create", "f", str(tmp_path / "f.py"))
    thaw("action", "invoke", "f", "--result")  # now there is a container
    for process in (pid_of(layout, "host-0-invoker"), platform.supervisor):
        os.kill(process.pid, signal.SIGKILL)
    wait_gone([platform.supervisor], 30.0)
    assert thaw("dev", "down").returncode == 0
    nothing_is_left(layout, platform)


def test_an_interrupt_ends_a_foreground_platform_with_exit_code_0(layout: Layout, tmp_path: Path) -> None:
    """The platform's stages may connect to one another, because ``--direct`` asks for this."""
    environ = {k: v for k, v in os.environ.items() if k != "WSK_CONFIG_FILE"} | {"THAW_STATE_DIR": str(layout.root)}
    words = ["dev", "up", *SMALL, "--direct", "--store", str(tmp_path / "store")]
    command = [sys.executable, "-m", "thaw.cli.main", *words]
    with subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("Ctrl-C"):
                break
        n_children, reached_at = len(belonging_to(layout.homes)), stage_address(layout)
        os.killpg(process.pid, signal.SIGINT)
        rest = process.stdout.read()
    assert process.returncode == 0
    assert n_children >= len(COMPONENTS)
    assert reached_at == "127.0.0.1"
    assert all(f"stopped  {name}" in rest for name in ("gateway", "state", "host-0/fetchd"))
    assert belonging_to(layout.homes) == set()
    assert not layout.platform_file.exists()


def test_a_port_that_is_taken_is_told_with_the_way_out(thaw: Run, layout: Layout, tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        done = thaw("dev", "up", "--port", port, "--store", str(tmp_path))
    assert done.stderr == f"error: port {port} is taken\nhint: choose another: --port N, or --port 0 for any free one\n"
    assert done.returncode == 244


def test_logs_of_a_component_that_is_not_there_name_those_that_are(
    platform: Platform, thaw: Run, layout: Layout
) -> None:
    missing = thaw("dev", "logs", "nobody")
    assert missing.returncode == 148
    assert "gateway, host-0-fetchd, host-0-invoker" in missing.stderr
    assert thaw("dev", "logs", "host-0/fetchd", "-n", "1").stdout.startswith("{")
    assert LineReader(layout.log("gateway")).lines()
