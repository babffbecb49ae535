"""A function that the kernel killed for its container's limit is told so, with the limit."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from thaw_runtime.action.memory_limit import MemoryLimit
from thaw_runtime.action.proxy import Handler, Killed, OutOfMemory

V2 = ("memory.events", "low 0\nhigh 0\nmax 9\noom 1\noom_kill {}\noom_group_kill 0\n", "memory.max")
V1 = ("memory/memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill {}\n", "memory/memory.limit_in_bytes")


@pytest.mark.parametrize(("events", "text", "limit"), [V2, V1], ids=["v2", "v1"])
def test_a_kill_for_the_limit_is_told_from_others(tmp_path: Path, events: str, text: str, limit: str) -> None:
    (tmp_path / "memory").mkdir()
    (tmp_path / events).write_text(text.format(3))  # kills before this process
    (tmp_path / limit).write_text(f"{64 << 20}\n")
    handler = Handler.__new__(Handler)
    handler.server = SimpleNamespace(memory=MemoryLimit(tmp_path))  # type: ignore[assignment]
    assert isinstance(handler._killed("SIGKILL", "ran"), Killed)
    (tmp_path / events).write_text(text.format(4))
    assert isinstance(handler._killed("SIGSEGV", "ran"), Killed)
    error = handler._killed("SIGKILL", "ran")
    assert isinstance(error, OutOfMemory)
    assert (error.status, error.code) == (502, "MemoryTooSmall")
    assert error.error == "The action used more memory than its limit of 64 MiB (limits.memory)."


def test_without_a_limit_nothing_exceeds_it(tmp_path: Path) -> None:
    assert MemoryLimit(tmp_path).exceeded_mib() == 0
    (tmp_path / "memory.events").write_text("oom_kill 1\n")
    (tmp_path / "memory.max").write_text("max\n")
    limit = MemoryLimit(tmp_path)
    (tmp_path / "memory.events").write_text("oom_kill 2\n")
    assert limit.exceeded_mib() == 0
