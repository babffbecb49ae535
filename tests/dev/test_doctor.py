"""``thaw dev doctor``: one line for each thing that a platform needs, and what to do where it is missing."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.e2e.machine import ROOT, THAW
from thaw.dev import doctor

NAMES = ["system", "processor", "engine", "memory", "disk", "ports", "containers", "cgroups", "network", "native"]


def found(name: str) -> doctor.Finding:
    return next(finding for finding in doctor.examine() if finding.name == name)


def test_a_healthy_machine_has_a_line_for_each_thing_and_nothing_fatal() -> None:
    done = subprocess.run([THAW, "dev", "doctor"], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout
    assert [line.split()[1] for line in done.stdout.splitlines()] == NAMES
    (engine,) = (line for line in done.stdout.splitlines() if line.split()[1] == "engine")
    assert "vllm/_C" in engine
    assert "attention by" in engine


def test_an_engine_that_cannot_be_loaded_is_fatal_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("THAW_CPU_CEILING", "sse2")
    engine = found("engine")
    assert engine.fatal
    assert "THAW_CPU_CEILING='sse2' is not a ceiling" in engine.problem


def test_a_taken_port_names_the_option_and_is_not_fatal(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        monkeypatch.setattr(doctor, "API_PORT", port)
        assert doctor._ports().line() == (
            f"ports        {port}, the API's, is taken: thaw dev up needs --port 0 or another one"
        )
        assert not doctor._ports().fatal


def test_a_full_disk_and_little_memory_are_fatal(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("THAW_STATE_DIR", str(tmp_path / "not made yet"))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1 << 30))
    disk = doctor._disk()
    assert disk.fatal
    assert disk.text == f"1.0 GiB free for {tmp_path}/not made yet"
    assert "THAW_STATE_DIR" in disk.problem
    monkeypatch.setattr(doctor, "_memory_limit", lambda: 1 << 30)
    memory = doctor._memory()
    assert memory.fatal
    assert memory.text.endswith("limited to 1.0 GiB")


def test_without_an_engine_of_containers_the_driver_that_works_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/none.sock")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    (tmp_path / "docker").touch(mode=0o755)
    assert doctor._containers().text == f"no engine at unix://{tmp_path}/none.sock"
    assert "only the driver process works" in doctor._containers().problem
