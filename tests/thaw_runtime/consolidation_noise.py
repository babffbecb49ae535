"""How far a right whole worker is from its pipeline: the noise that the check of a consolidation must allow.

``python tests/thaw_runtime/consolidation_noise.py RELAY_URL`` lets groups of the small real model become one worker with 1,
8 and 16 requests in flight, several times for each dtype, and prints the largest differences that the check measured.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.thaw_runtime.models import real_model

DTYPES = ("float32", "bfloat16", "float16")
WORKS = ("one", "long", "many")
TIMES = 3


def main() -> None:
    from tests.thaw_runtime.consolidation_case import consolidation
    from thaw_runtime.engine.vllm import env as engine_env

    engine_env.prepare(1)
    from thaw_runtime.engine.vllm import verification
    from thaw_runtime.engine.vllm.warm import warm_up

    warm_up()
    url, model = sys.argv[1], real_model()
    reading, writing = os.pipe()

    class Told:
        def event(self, name: str, **fields: Any) -> None:
            if name == "consolidation_checked":
                os.write(writing, json.dumps(fields).encode() + b"\n")

    verification._log = Told()  # type: ignore[misc, assignment]
    for dtype in DTYPES:
        for n_stages in (2, 4):
            largest = {"logprobs": 0.0, "blocks": 0.0}
            for work in WORKS * TIMES:
                case = {"n_stages": n_stages, "works": [work], "dtype": dtype, "reserve": 2 << 30}
                with tempfile.TemporaryDirectory() as scratch:
                    found = consolidation(case, model, url, Path(scratch))
                (outcome,) = found["outcome"]
                for line in os.read(reading, 65536).splitlines():
                    told = json.loads(line)
                    largest[told["what"]] = max(largest[told["what"]], told["difference"])
                if not outcome.startswith("Consolidated"):
                    print(f"{dtype} {work}: {outcome}")
            print(
                f"{dtype} in {n_stages} stages: logprobs {largest['logprobs']}, blocks {largest['blocks']}", flush=True
            )


if __name__ == "__main__":
    main()
