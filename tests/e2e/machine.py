"""A platform that is started as users start it, and a list of its leftovers."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import requests

from tests import forked
from tests.conftest import NOISE, free_port
from tests.imported import zygote_parent
from thaw.dev.layout import Layout
from thaw.dev.leftovers import cgroups

ROOT = Path(__file__).parents[2]
THAW = str(Path(sys.executable).with_name("thaw"))
OF_ENGINES = (NOISE, "THAW_CPU_CEILING")
_MOST_HOSTS = 8


class Machine:
    """A platform with a state directory of its own and a free port, and the commands that use it."""

    def __init__(self, directory: Path, environ: Mapping[str, str]) -> None:
        self.port = free_port()
        self.state_dir = directory / "state"
        kept = {k: v for k, v in environ.items() if not k.startswith(("THAW_", "WSK_", "AWS_")) or k in OF_ENGINES}
        home = directory / "home"
        home.mkdir()
        self.env = kept | {
            "HOME": str(home),
            "THAW_STATE_DIR": str(self.state_dir),
            "HF_HUB_OFFLINE": "1",
            "XDG_CACHE_HOME": environ.get("XDG_CACHE_HOME", str(Path(environ.get("HOME", "/root")) / ".cache")),
            "PATH": f"{Path(sys.executable).parent}:{environ['PATH']}",
        }
        self._before = set(processes())
        self._ports: set[int] = set()
        self._auth: tuple[str, str] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def thaw(self, *arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Run a command.  One that starts or ends the platform is a process of its own, as a user's is; the others are
        forked from a process that has imported the command line, which takes a tenth of the time."""
        if arguments[0] == "dev":
            done = subprocess.run(
                [THAW, *arguments], cwd=ROOT, env=self.env, capture_output=True, text=True, timeout=300, check=False
            )
        else:
            done = forked.run("thaw.cli.main", *arguments, env=self.env)
        if check and done.returncode != 0:
            raise AssertionError(f"thaw {' '.join(arguments)} → {done.returncode}\n{done.stdout}\n{done.stderr}")
        return done

    def up(self, *arguments: str) -> None:
        self._auth = None
        if "docker" not in arguments and "off" not in arguments:  # with stem cells that are processes
            self.env["THAW_ZYGOTE_PARENT"] = zygote_parent()
        self.thaw("dev", "up", "--detach", "--port", str(self.port), *arguments)

    def down(self) -> None:
        self.note_ports()
        self.thaw("dev", "down", check=False)

    def auth(self) -> tuple[str, str]:
        """The key of the running platform.  The command line is asked once, because it would cost each request a
        process of its own."""
        if self._auth is None:
            uuid, _, key = self.thaw("property", "get", "--auth", "--output", "raw").stdout.strip().partition(":")
            self._auth = uuid, key
        return self._auth

    def request(self, method: str, path: str, **options: Any) -> requests.Response:
        options.setdefault("timeout", 120)
        return requests.request(method, self.url + path, auth=self.auth(), **options)

    def chat(self, action: str, content: str, *, timeout: float | None = None, **body: Any) -> requests.Response:
        message = {"model": action, "messages": [{"role": "user", "content": content}], "max_tokens": 24, **body}
        limits = {} if timeout is None else {"timeout": timeout}
        return self.request("POST", "/v1/chat/completions", json=message, stream=bool(body.get("stream")), **limits)

    def pid_of(self, component: str) -> int:
        """The pid of a component, as the supervisor recorded it."""
        return int((self.state_dir / "pids" / component.replace("/", "-")).read_text().split()[0])

    def kill(self, component: str, sig: int = signal.SIGKILL) -> int:
        pid = self.pid_of(component)
        with contextlib.suppress(ProcessLookupError):  # it is dead already and is being restarted
            os.kill(pid, sig)
        return pid

    def leftovers(self) -> list[str]:
        """New processes, new listening ports, and this platform's namespaces and control groups."""
        left = [
            f"process {pid}: {line}"
            for pid, line in processes().items()
            if pid not in self._before and self.is_ours(pid)
        ]
        left += [f"port {p}" for p in sorted(self._ports & set(listening().values()))]
        left += [f"control group {p}" for p in cgroups(Layout(self.state_dir), _MOST_HOSTS)]
        left += [f"namespace {p.name}" for p in Path("/run/netns").glob(f"thaw{self._digest}*")]
        return left + [f"directory {d}" for d in self._run_dirs()]

    def note_ports(self) -> None:
        """Record the ports on which this platform's processes listen now."""
        by_inode = listening()
        for pid in processes():
            if pid not in self._before and self.is_ours(pid):
                self._ports |= {by_inode[i] for i in socket_inodes(pid) if i in by_inode}

    def _run_dirs(self) -> list[Path]:
        return list(Path(tempfile.gettempdir()).glob(f"thaw-*-{self._digest}"))

    @property
    def _digest(self) -> str:
        """The digest of the state directory, which the names of the run directory and of the namespaces contain."""
        return hashlib.sha256(str(self.state_dir).encode()).hexdigest()[:8]

    def containers(self) -> list[int]:
        """The processes of every container, as the invokers record them on disk."""
        found = []
        for owner in [f for d in self._run_dirs() for f in d.glob("host-*/c/*/owner.json")]:
            main = json.loads(owner.read_text())["pid"]
            found += [pid for pid in processes() if session_of(pid) == main]
        return found

    def is_ours(self, pid: int) -> bool:
        """Return whether a process belongs to this platform, by its environment or its working directory.

        Some servers overwrite their environment, and some change their working directory.
        """
        digest = self._digest.encode()
        try:
            environ, cwd = Path(f"/proc/{pid}/environ").read_bytes(), os.readlink(f"/proc/{pid}/cwd")
        except OSError:
            return False
        return digest in environ or str(self.state_dir).encode() in environ or str(self.state_dir) in cwd


def processes() -> dict[int, str]:
    found = {}
    for path in Path("/proc").iterdir():
        if path.name.isdigit():
            try:
                found[int(path.name)] = (
                    (path / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")[:200]
                )
            except OSError:
                continue
    return found


def session_of(pid: int) -> int:
    try:
        return os.getsid(pid)
    except ProcessLookupError:
        return 0  # it ended meanwhile


def socket_inodes(pid: int) -> set[str]:
    found = set()
    try:
        for fd in Path(f"/proc/{pid}/fd").iterdir():
            target = os.readlink(fd)
            if target.startswith("socket:["):
                found.add(target[8:-1])
    except OSError:
        pass  # it ended meanwhile
    return found


def listening() -> dict[str, int]:
    """The listening ports, by the inodes of their sockets."""
    ports = {}
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A":
                ports[fields[9]] = int(fields[1].rpartition(":")[2], 16)
    return ports


def events(response: requests.Response, after: Callable[[int], None] = lambda _: None) -> list[dict[str, Any]]:
    """Return the JSON of every SSE data line, and check that the last one is [DONE].

    ``after`` is called with the number of lines after each line.
    """
    lines: list[bytes] = []
    for line in response.iter_lines():
        if line.startswith(b"data: "):
            lines.append(line)
            after(len(lines))
    assert lines[-1] == b"data: [DONE]", lines[-1:]
    return [json.loads(line.removeprefix(b"data: ")) for line in lines[:-1]]


def text_of(response: requests.Response, after: Callable[[int], None] = lambda _: None) -> str:
    return "".join(e["choices"][0]["delta"].get("content") or "" for e in events(response, after) if e["choices"])
