"""The gain of each step of ParaServe's worker (the paper's Figure 9), from nothing, over the same link.

::

    vanilla      copy ───────────────▶ import ─▶ load ─▶ first token        vLLM's API server, serverless
    +prefetch    copy ───────────────┬▶ load ─▶ first token                 vLLM, imported beside the copy
                 import ─────────────┘
    +stream      tensors are taken from shared memory while they arrive     Thaw, no stem cell, one stage
    +overlap     device context and device copies beside the imports        needs a device: the CPU engine has neither
    +parallel    four stages, each fetching its part                        Thaw, no stem cell, four stages
    +stem cell   the imports are done before the request comes              Thaw, four stages
"""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench._far_store import FarStore
from bench._sse import Caller
from bench._vllm import VllmServer, importing_vllm


@dataclass(frozen=True, slots=True)
class VllmStart:
    ttft_s: float
    copy_s: float

    def __str__(self) -> str:
        return f"ttft {self.ttft_s:.2f} s, of which copying {self.copy_s:.2f} s"


@dataclass(slots=True)
class PlainVllm:
    """Starts of vLLM with the model ``model`` (files ``names``) from ``store``.  The copies are in shared memory."""

    work: Path
    store: FarStore
    model: str
    names: Sequence[str]
    prompt: str
    threads: int
    command: str = ""

    def serverless(self) -> VllmStart:
        with self._target() as target:
            began = time.monotonic()
            copied = self.store.copy(self.model, self.names, target)
            with VllmServer(target, self.work, threads=self.threads) as server:
                self.command = server.command
                asked = time.monotonic()
                answer = Caller(server.url, "chat").chat(self.prompt, 8)
                return VllmStart(asked - began + answer.ttft_s, copied)

    def prefetched(self) -> VllmStart:
        """Copy while vLLM is imported, then start it.

        Everything runs in one process, unlike vLLM's API server: this is the faster way to run vLLM.
        """
        copied: list[float] = []
        with self._target() as target, importing_vllm(self._log_file()) as process:
            began = time.monotonic()
            copying = threading.Thread(target=lambda: copied.append(self.store.copy(self.model, self.names, target)))
            copying.start()
            _line(process)
            copying.join()
            both_s = time.monotonic() - began
            answer = self._order(process, {"target": str(target), "max_model_len": 2048, "prompt": self.prompt})
            return VllmStart(both_s + answer["ttft_s"], copied[0])

    def _order(self, process: subprocess.Popen[str], order: dict[str, Any]) -> dict[str, Any]:
        assert process.stdin is not None
        process.stdin.write(json.dumps(order) + "\n")
        process.stdin.flush()
        line = _line(process)
        if not line.startswith("{"):
            raise SystemExit(f"forked vLLM failed: {self._log_file().read_text()[-1500:]}")
        return dict(json.loads(line))

    def _log_file(self) -> Path:
        return self.work / "prefetched-vllm.log"

    @contextlib.contextmanager
    def _target(self) -> Iterator[Path]:
        target = self.work / f"copy-{time.monotonic_ns()}"
        try:
            yield target
        finally:
            shutil.rmtree(target, ignore_errors=True)


def _line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline()


def describe(rows: dict[str, float | None]) -> list[str]:
    """The table as it is printed.  None marks a step that this machine cannot measure."""
    first = next(v for v in rows.values() if v is not None)
    return [
        f"{name:12} needs a device copy: the CPU engine computes from the segment"
        if value is None
        else f"{name:12} {value:6.2f} s   {first / value:4.1f} x"
        for name, value in rows.items()
    ]
