"""Forks two containers whose proxy and engine only draw random numbers, and prints the draws of all four as JSON.

``python draws.py DIRECTORY [without]``: *without* leaves the reseeding out, to check the test that reads the output.
"""

from __future__ import annotations

import json
import os
import random
import secrets
import ssl
import sys
import uuid
from pathlib import Path
from typing import Any

import numpy
import torch

from thaw_runtime.engine import main as engine_main
from thaw_runtime.llm import proxy
from thaw_runtime.start import fork


def draw() -> dict[str, str]:
    return {
        "random": str(random.random()),
        "numpy": str(numpy.random.random()),
        "torch": str(torch.rand(1).item()),
        "uuid4": str(uuid.uuid4()),
        "secrets": secrets.token_hex(8),
        "ssl": ssl.RAND_bytes(8).hex(),
    }


def main(directory: Path) -> None:
    for seed in (random.seed, numpy.random.seed, torch.manual_seed):
        seed(0)

    def write(who: str) -> Any:
        def serve(*_: object) -> int:
            (directory / f"{who}-{os.environ['THAW_INSTANCE_ID']}").write_text(json.dumps(draw()))
            if who == "proxy":
                os.wait()  # wait for its engine
            return 0

        return serve

    proxy.serve = write("proxy")
    engine_main.serve = write("engine")
    for name in ("one", "two"):
        env = {"THAW_SOCKET": "unused", "THAW_INSTANCE_ID": name}
        pid = fork.fork_container(fork.Fork("fork", name, env, "/dev/null", "/dev/stderr"), lambda: None)
        assert os.waitpid(pid, 0)[1] == 0
    print(json.dumps([json.loads(path.read_text()) for path in sorted(directory.iterdir())]))


if __name__ == "__main__":
    if sys.argv[2:] == ["without"]:
        fork.reseed = lambda: None
    main(Path(sys.argv[1]))
