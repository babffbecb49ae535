"""vLLM in a process that was forked after the imports: the gain of a stem cell alone, with vLLM's own settings.

    python -m bench._prewarmed_vllm    stdin: one line of JSON a start   stdout: "ready", then one line of JSON a start

A start does what a plain serverless vLLM would do in such a process: it copies the model to local shared memory with
curl, builds an ``LLM`` with default settings and answers the prompt.  Everything runs in one process, unlike vLLM's API
server: this is the faster way to run vLLM.  An order without an origin finds its model at ``target``.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import Any


def copy(origin: str, names: list[str], target: Path) -> float:
    """Copy all files with one curl over one connection.  Return the seconds that this took."""
    target.mkdir(parents=True)
    pairs = [word for name in names for word in ("-o", str(target / name), f"{origin}/{name}")]
    began = time.monotonic()
    subprocess.run(["curl", "-sSf", *pairs], check=True)
    return time.monotonic() - began


def _start(order: dict[str, Any]) -> None:
    """Start vLLM and answer; this runs in the forked child."""
    began = time.monotonic()
    copied = copy(order["origin"], order["names"], Path(order["target"])) if "origin" in order else 0.0
    from vllm import LLM, SamplingParams

    llm = LLM(model=order["target"], dtype="bfloat16", max_model_len=order["max_model_len"], enforce_eager=True)
    llm.chat(
        [{"role": "user", "content": order["prompt"]}], SamplingParams(temperature=0, max_tokens=1), use_tqdm=False
    )
    print(json.dumps({"ttft_s": time.monotonic() - began, "copy_s": copied}), flush=True)


def _main() -> None:
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_CPU_KVCACHE_SPACE": "1"}
    import vllm.entrypoints.llm
    import vllm.v1.engine.core
    import vllm.v1.worker.cpu_worker  # noqa: F401  a start would import these modules

    print("ready", flush=True)
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            try:
                _start(json.loads(line))
            except BaseException:  # noqa: BLE001  the outermost frame of the child process
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(0)
        os.waitpid(pid, 0)
        print("end", flush=True)


if __name__ == "__main__":
    _main()
