"""``thaw dev doctor``: what this machine has for a platform, and what is missing, one line each.

The same lines begin ``make demo`` and close every failed run of the tests, so a report says where it comes from.  Each
examination takes at most a few seconds and changes nothing.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from thaw.dev import links
from thaw.dev.layout import default_layout
from thaw.dev.ports import is_free

API_PORT: Final = 3233
_LEAST_MEMORY: Final = 4 << 30
"""What one host and the small model take: an engine's imports, 1.6 GiB for keys and values, and the model twice."""
_LEAST_DISK: Final = 2 << 30
_FEATURES: Final = {
    "avx2": "AVX2",
    "avx512f": "AVX-512",
    "avx512_vnni": "VNNI",
    "avx512_bf16": "bfloat16",
    "amx_tile": "AMX",
}
"""The features by which vLLM and its libraries choose kernels, by their names in /proc/cpuinfo."""
_ENGINE_S: Final = 60.0
_ENGINE_S_DOCKER: Final = 5.0


@dataclass(frozen=True, slots=True)
class Finding:
    """``problem`` says what does not work without it and what to do; empty: nothing is missing.  Where the problem is
    ``fatal``, ``make demo`` fails."""

    name: str
    text: str
    problem: str = ""
    fatal: bool = False

    def line(self) -> str:
        return f"{self.name:<12} {self.text}" + (f": {self.problem}" if self.problem else "")


def examine() -> list[Finding]:
    return [look() for look in _LOOKS]


def _system() -> Finding:
    names = _fields(Path("/etc/os-release").read_text(), "=") if Path("/etc/os-release").exists() else {}
    system = names.get("PRETTY_NAME", platform.system()).strip('"')
    rights = "root" if os.geteuid() == 0 else "not root"
    return Finding("system", f"{system}, Linux {platform.release()}, Python {platform.python_version()}, {rights}")


def _processor() -> Finding:
    cpuinfo = Path("/proc/cpuinfo").read_text()
    fields = _fields(cpuinfo, ":")
    flags = fields.get("flags", fields.get("Features", "")).split()
    features = (
        ", ".join(name for flag, name in _FEATURES.items() if flag in flags) or "none of those that vLLM asks for"
    )
    model = fields.get("model name", platform.machine())
    found = f"{len(os.sched_getaffinity(0))} cores of {model} ({features})"
    if platform.machine() == "x86_64" and "avx2" not in flags:
        return Finding("processor", found, "vLLM's CPU build needs AVX2", fatal=True)
    return Finding("processor", found)


def _engine() -> Finding:
    """Ask a process of the engine, because this package loads neither torch nor vLLM."""
    command = [sys.executable, "-m", "thaw_runtime.engine.describe"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_ENGINE_S, check=False)
    except subprocess.TimeoutExpired:
        return Finding("engine", "no answer", f"torch was not imported within {_ENGINE_S:.0f} s", fatal=True)
    if done.returncode != 0:
        said = done.stderr.strip().splitlines()[-1:] or [f"exit status {done.returncode}"]
        return Finding("engine", "cannot be loaded", f"{said[0]} (make setup installs it)", fatal=True)
    return Finding("engine", done.stdout.strip())


def _memory() -> Finding:
    fields = _fields(Path("/proc/meminfo").read_text(), ":")
    total, available = (int(fields[name].split()[0]) << 10 for name in ("MemTotal", "MemAvailable"))
    limit = _memory_limit()
    text = f"{_gib(available)} of {_gib(total)} available" + (f", limited to {_gib(limit)}" if limit else "")
    if min(available, limit or available) < _LEAST_MEMORY:
        return Finding("memory", text, f"a host with the small model takes {_gib(_LEAST_MEMORY)}", fatal=True)
    return Finding("memory", text)


def _memory_limit() -> int:
    """The limit of this process's control group; 0: none."""
    for name in ("memory.max", "memory/memory.limit_in_bytes"):
        try:
            text = Path("/sys/fs/cgroup", name).read_text().strip()
        except OSError:
            continue
        return 0 if text == "max" or int(text) >= 1 << 60 else int(text)
    return 0


def _disk() -> Finding:
    state = default_layout().root
    existing = next(p for p in (state, *state.parents) if p.exists())
    free = shutil.disk_usage(existing).free
    if free < _LEAST_DISK:
        problem = f"functions, logs and the model take up to {_gib(_LEAST_DISK)}: set THAW_STATE_DIR to a larger disk"
        return Finding("disk", f"{_gib(free)} free for {state}", problem, fatal=True)
    return Finding("disk", f"{_gib(free)} free for {state}")


def _ports() -> Finding:
    if is_free(API_PORT):
        return Finding("ports", f"{API_PORT}, the API's, is free on loopback")
    return Finding("ports", f"{API_PORT}, the API's, is taken", "thaw dev up needs --port 0 or another one")


def _containers() -> Finding:
    problem = "only the driver process works, for code that you trust (apt-get install docker.io)"
    host = os.environ.get("DOCKER_HOST", "unix:///var/run/docker.sock")
    if shutil.which("docker") is None:
        return Finding("containers", "no Docker client", problem)
    if host.startswith("unix://"):
        with socket.socket(socket.AF_UNIX) as sock:
            sock.settimeout(_ENGINE_S_DOCKER)
            try:
                sock.connect(host.removeprefix("unix://"))
            except OSError:
                return Finding("containers", f"no engine at {host}", problem)
    return Finding("containers", f"an engine at {host}")


def _groups() -> Finding:
    root = Path("/sys/fs/cgroup")
    version = 2 if (root / "cgroup.controllers").exists() else 1
    if version == 2 and "cpu" not in (root / "cgroup.controllers").read_text().split():
        return Finding("cgroups", "version 2 without cpu", "containers of the driver process have no shares of cores")
    if not os.access(root if version == 2 else root / "cpu", os.W_OK):
        return Finding("cgroups", f"version {version}", "shares of cores need root")
    return Finding("cgroups", f"version {version}, writable")


def _network() -> Finding:
    problem = links.available()
    if problem:
        return Finding("network", "no shaped links", f"thaw dev up --link paces reads instead: {problem}")
    return Finding("network", "namespaces with shaped links")


def _native() -> Finding:
    if (Path(__file__).parents[2] / "build" / "native" / "libthaw_params.so").exists():
        return Finding("native", "the library of csrc/ is built")
    return Finding(
        "native", "no library of csrc/", "segments are read in Python (apt-get install g++ make; make native)"
    )


def _fields(text: str, separator: str) -> dict[str, str]:
    pairs = (re.split(rf"\s*{separator}\s*", line, maxsplit=1) for line in text.splitlines())
    found: dict[str, str] = {}
    for name, value in (pair for pair in pairs if len(pair) == 2):
        found.setdefault(name, value)
    return found


def _gib(n_bytes: int) -> str:
    return f"{n_bytes / 2**30:.1f} GiB"


_LOOKS: Final[tuple[Callable[[], Finding], ...]] = (
    _system,
    _processor,
    _engine,
    _memory,
    _disk,
    _ports,
    _containers,
    _groups,
    _network,
    _native,
)
