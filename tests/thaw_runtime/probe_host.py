"""vLLM, imported once for all the probes of a test process: each probe runs in a fork (tests/forked.py).

``run_probe("kv_probe", …)`` in tests/thaw_runtime/conftest.py runs kv_probe.py as a program.  What needs a process that
has imported nothing yet, or plain vLLM as it comes, starts an interpreter of its own instead.
"""

from __future__ import annotations

import runpy
import sys

from thaw_runtime.engine.vllm import env as engine_env
from thaw_runtime.engine.vllm.warm import warm_up

engine_env.prepare(1)
warm_up()


def main() -> None:
    _, name, *words = sys.argv
    sys.argv = [name, *words]
    runpy.run_module(f"tests.thaw_runtime.{name}", run_name="__main__")
