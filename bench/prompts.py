"""Without instructions for bfloat16: does the engine compute a prompt sooner than torch, which vLLM uses there?

The layers of SmolLM2-135M with random weights take a batch of rows on one thread: those of a decode step of eight
requests, and those of prompts.  A value is the time of the engine's products (engine/vllm/linear_on_cpu.py) over that
of torch's.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from bench import _common
from bench._common import interleave, judge, median
from thaw_runtime.engine.vllm.linear_on_cpu import linear

_LAYERS = ((576, 960), (576, 576), (576, 3072), (1536, 576))
"""Width and columns of the four matrices of a layer."""
_N_LAYERS = 10
"""Their weights are more than a processor's cache holds, as a whole model's are."""
_ROWS = {"step_of_8": 8, "prompt_of_40": 40, "prompt_of_512": 512}


def main() -> int:
    options = _common.options(__doc__ or "")
    rounds = options.n or (5 if options.quick else 9)
    torch.set_num_threads(1)
    weights = [torch.randn(n, width).bfloat16() for _ in range(_N_LAYERS) for width, n in _LAYERS]
    goals = []
    for name, n_rows in _ROWS.items():
        given = {width: torch.randn(n_rows, width).bfloat16() for width, _ in _LAYERS}

        def measured(product: Any, given: dict[int, Any] = given) -> Callable[[], float]:
            def once() -> float:
                began = time.perf_counter()
                for weight in weights:
                    product(given[weight.shape[1]], weight)
                return round(1e3 * (time.perf_counter() - began), 2)

            return once

        _common.say(f"{name}: ms for the products of {_N_LAYERS} layers")
        ms = interleave({"thaw": measured(linear), "torch": measured(torch.nn.functional.linear)}, rounds)
        ratio = median([a / b for a, b in zip(ms["thaw"], ms["torch"], strict=True)])
        floor = f"{median(ms['thaw']):.1f} ms against {median(ms['torch']):.1f} ms"
        goals.append(judge(f"{name}_vs_torch", ratio, "<=", 1.0, floor=floor))
    return _common.report("prompts", goals, rounds=rounds)


if __name__ == "__main__":
    sys.exit(main())
