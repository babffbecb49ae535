"""Plain vLLM: its own API server, and a process that imports it for starts to come."""

from __future__ import annotations

import contextlib
import shlex
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench._common import PYTHON, ROOT, Program, python_env, start
from thaw.dev.ports import free_ports

_STARTED = "Application startup complete"
_START_S = 300.0
_KV_GIB = 1
"""About as much as Thaw's reserve of 2 GiB leaves for the cache.  vLLM's own default takes longer to allocate."""


class VllmServer:
    """``python -m vllm.entrypoints.openai.api_server``, started and ready to serve.  Use it as a context manager."""

    def __init__(
        self,
        model: Path,
        work: Path,
        *,
        threads: int,
        max_num_seqs: int = 8,
        max_model_len: int = 2048,
        cores: Sequence[int] = (),
        engine_core: int | None = None,
        extra: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
    ) -> None:
        self.port = free_ports(1)[0]
        self.url = f"http://127.0.0.1:{self.port}"
        pin = ["taskset", "-c", ",".join(map(str, cores))] if cores else []
        bind = "nobind" if engine_core is None else str(engine_core)
        settings = {
            "OMP_NUM_THREADS": str(threads),
            "VLLM_CPU_OMP_THREADS_BIND": bind,
            "HF_HUB_OFFLINE": "1",
            "VLLM_CPU_KVCACHE_SPACE": str(_KV_GIB),
            "VLLM_NO_USAGE_STATS": "1",
            **(env or {}),
        }
        argv = [
            *pin,
            PYTHON,
            "-m",
            "vllm.entrypoints.openai.api_server",
            "--model",
            str(model),
            "--served-model-name",
            "chat",
            "--dtype",
            "bfloat16",
            "--max-model-len",
            str(max_model_len),
            "--max-num-seqs",
            str(max_num_seqs),
            "--enforce-eager",
            "--host",
            "127.0.0.1",
            "--port",
            str(self.port),
            *extra,
        ]
        self.command = " ".join(f"{k}={v}" for k, v in settings.items()) + " " + shlex.join(argv)
        self._program: Program = start(
            argv,
            work / f"vllm-{self.port}.log",
            _STARTED,
            env=python_env(**settings),
            deadline_s=_START_S,
            cwd=work,
            own_session=True,
        )

    @property
    def pid(self) -> int:
        return self._program.pid

    def __enter__(self) -> VllmServer:
        return self

    def __exit__(self, *_: Any) -> None:
        self._program.stop(signal.SIGTERM, grace_s=30)


@contextlib.contextmanager
def importing_vllm(log_file: Path) -> Iterator[subprocess.Popen[str]]:
    """``bench._prewarmed_vllm``, which prints a line when its imports are done."""
    with log_file.open("w") as log:
        process = subprocess.Popen(
            [PYTHON, "-m", "bench._prewarmed_vllm"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            cwd=ROOT,
            env=python_env(HF_HUB_OFFLINE="1"),
        )
    assert process.stdin is not None
    try:
        yield process
    finally:
        process.stdin.close()
        process.wait(30)
