"""A whole platform, as ``thaw dev up`` starts it, for one measurement.  It is gone when the block is left."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench._common import cpu_seconds, say
from bench._sse import Caller
from thaw import wire
from thaw.cli.platform_api.client import Client, action_path
from thaw.cli.platform_api.property_file import read_properties, resolve
from thaw.dev import sweep, up
from thaw.dev.layout import Layout, Platform
from thaw.dev.options import Options
from thaw.dev.processes import belonging_to
from thaw.dev.watch import wait_for_line
from thaw.plan import Plan
from thaw.tracing.trace import TraceEvent

_STEM_CELL_S = 180.0


class BenchPlatform:
    """``root`` can be used again: actions and model facts survive, containers and model bytes do not."""

    def __init__(self, root: Path, **options: Any) -> None:
        root.mkdir(parents=True, exist_ok=True)
        os.environ["THAW_MODELS"] = "file://, http://"
        os.environ["THAW_FETCHD_ALLOW"] = "127.0.0.1, 10.231.0.0/16"  # the origins of benchmarks
        os.environ["THAW_STATE_DIR"], os.environ["WSK_CONFIG_FILE"] = str(root), str(root / "wskprops")
        self.layout = Layout(root)
        (root / "logs").mkdir(exist_ok=True)
        self.options = Options(port=0, **options)
        self.platform: Platform = up.detach(self.layout, self.options, lambda component, event: None)
        try:
            for host in range(self.options.hosts if self.options.stem_cells else 0):
                if not wait_for_line(self.layout.log(f"host-{host}/invoker"), "zygote_ready", _STEM_CELL_S):
                    raise SystemExit(f"no stem cell within {_STEM_CELL_S:.0f} s: see {self.layout.logs}")
        except BaseException:
            self.__exit__()
            raise
        self.api = Client(resolve(None, None))

    def __enter__(self) -> BenchPlatform:
        return self

    def __exit__(self, *_: Any) -> None:
        sweep.stop_supervisor(self.platform)
        sweep.sweep(self.layout, self.platform)

    def deploy(self, name: str, config: Mapping[str, Any]) -> None:
        body = {"config": config, "exec": {"kind": "llm:vllm", "code": "", "binary": False}}
        self.api.put(action_path(name), body, overwrite=True)

    def n_instances(self) -> int:
        return sum(len(h["instances"]) for h in self.api.get("/api/v1/thaw/hosts")["hosts"])

    def remove(self, name: str, *, others: int = 0) -> None:
        """Delete an action.  Return when the hosts have no more than ``others`` instances left."""
        self.api.delete(action_path(name))
        end = time.monotonic() + 30
        while self.n_instances() > others:
            if time.monotonic() > end:
                raise SystemExit(f"{name} left an instance behind")
            time.sleep(0.05)

    def caller(self, model: str) -> Caller:
        auth = read_properties(self.layout.wskprops)["AUTH"]
        return Caller(self.platform.apihost, model, auth)

    def trace(self, activation_id: str) -> tuple[list[TraceEvent], Plan | None]:
        """Return the trace and the plan.  They are written after the answer, so ask until the trace is complete."""
        end = time.monotonic() + 10
        while True:
            reply = self.api.get(f"activations/{activation_id}/trace")
            events = [wire.from_plain(TraceEvent, e) for e in reply["events"]]
            if any(e.name == "finished" for e in events) or time.monotonic() > end:
                return events, wire.from_plain(Plan, reply["plan"]) if reply.get("plan") else None
            time.sleep(0.05)

    def pids(self) -> dict[int, str]:
        """Every process of the platform with its command line."""
        return {p.pid: command(p.pid) for p in belonging_to(self.layout.homes)}

    def pid_of(self, module: str) -> int:
        return next(pid for pid, line in self.pids().items() if f"-m {module}" in line)

    def stem_cell(self) -> dict[str, float]:
        """The cost of keeping a stem cell: its memory, and the CPU time of its start."""
        pid = self.pid_of("thaw_runtime.start.zygote")
        rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
        pss_kb = next(int(line.split()[1]) for line in rollup.splitlines() if line.startswith("Pss:"))
        return {"ram_mib": round(pss_kb / 1024, 1), "cpu_s": round(cpu_seconds(pid), 2)}

    def hold_up(self, module: str) -> int:
        """Stop a component's process and return its pid.  SIGCONT to the pid lets the process continue."""
        pid = self.pid_of(module)
        os.kill(pid, signal.SIGSTOP)
        say(f"{module} is held up")
        return pid


def command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except (FileNotFoundError, ProcessLookupError):
        return ""


def llm_config(uri: str, *, max_model_len: int = 2048, **scaling: Any) -> dict[str, Any]:
    return {
        "kind": "llm:vllm",
        "model": {"uri": uri},
        "engine": {"dtype": "bfloat16", "max_model_len": max_model_len},
        "resources": {"gpu_memory_mb": 2048, "host_memory_mb": 4096},
        "scaling": {"max_instances": 1, "max_stages": 1, "keep_alive_s": 600, **scaling},
    }
