"""How long does a request wait for an adapter that its instance does not have, and what does it cost to have many?

Functions with adapters of SmolLM2-135M (rank 16, every linear layer) share one warm instance with places for a few of
them.  A request of one that was never loaded is *cold*: fetchd reads the bytes from the store.  After it has made room
for others it is *back*: the bytes are in the host's memory.  The next request of the same one is *warm*.  All have
the same prompt length and one token, so the differences are the adapter's.

The load itself is compared with safetensors, as ServerlessLLM does in its section 7.2: `load_file` of the same file in
the page cache, with every tensor copied, by a process that has imported everything.  Then eight requests with eight
adapters in one batch are compared with eight of the base model.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from bench import _common, _model
from bench._common import PYTHON, Goal, figure, interleave, judge, median, say
from bench._platform import BenchPlatform, llm_config
from thaw.checkpoints.checkpoint import ADAPTER_CONFIG_NAME, ADAPTER_WEIGHTS_NAME
from thaw.cli.model_stores.demo_model import cache_dir
from thaw.dev.smollm2 import obtain

_SLOTS = 8
_RANK = 16
_TOKENS = 48
_PROMPT = "Say hello to {}."
_LOAD = """
import json, sys, time
from safetensors.torch import load_file
load_file(sys.argv[1])
times = []
for _ in range(int(sys.argv[2])):
    began = time.perf_counter()
    {name: tensor.clone() for name, tensor in load_file(sys.argv[1]).items()}
    times.append(time.perf_counter() - began)
print(json.dumps(times))
"""


def write_adapter(directory: Path, config: dict[str, Any], seed: int) -> int:
    """Write an adapter of the model with this config.json; return its bytes."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    keys = hidden // config["num_attention_heads"] * config["num_key_value_heads"]
    shapes = {
        "self_attn.q_proj": (hidden, hidden),
        "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, hidden),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    draw, tensors = np.random.default_rng(seed), {}
    for i in range(config["num_hidden_layers"]):
        for name, (rows, columns) in shapes.items():
            at = f"base_model.model.model.layers.{i}.{name}"
            tensors[f"{at}.lora_A.weight"] = (0.01 * draw.standard_normal((_RANK, columns))).astype(np.float16)
            tensors[f"{at}.lora_B.weight"] = (0.01 * draw.standard_normal((rows, _RANK))).astype(np.float16)
    directory.mkdir()
    save_file(tensors, directory / ADAPTER_WEIGHTS_NAME)
    targets = [name.partition(".")[2] for name in shapes]
    plain = {"peft_type": "LORA", "r": _RANK, "lora_alpha": _RANK, "target_modules": targets}
    (directory / ADAPTER_CONFIG_NAME).write_text(json.dumps(plain))
    _model.write_index(directory)
    return (directory / ADAPTER_WEIGHTS_NAME).stat().st_size


class Lora:
    def __init__(self, platform: BenchPlatform, base: str, n_adapters: int) -> None:
        self.platform, self.n_adapters = platform, n_adapters
        settings = llm_config(base, max_batch=_SLOTS)
        platform.deploy("base", settings)
        for i in range(n_adapters):
            model = {"base": base, "adapter": f"{base.rpartition('/')[0]}/adapter-{i}"}
            platform.deploy(f"adapter-{i}", {**settings, "model": model})
        self.ttft_s("adapter-0")  # the base's cold start
        self.ttft_s("base")

    def ttft_s(self, name: str) -> float:
        caller = self.platform.caller(name)
        try:
            return caller.chat(_PROMPT.format(name), 1).ttft_s
        finally:
            caller.close()

    def waits_s(self, first: int) -> list[float]:
        """Return for each adapter from ``first`` on the TTFT of its next request, less that of a warm one right after
        it."""
        return [self.ttft_s(f"adapter-{i}") - self.ttft_s(f"adapter-{i}") for i in range(first, self.n_adapters)]

    def tokens_per_s(self, names: list[str]) -> float:
        tokens: list[int] = []

        def client(name: str) -> None:
            caller = self.platform.caller(name)
            tokens.append(caller.chat(_PROMPT.format(name), _TOKENS, ignore_eos=True).completion_tokens)
            caller.close()

        for name in set(names):
            self.ttft_s(name)
        threads = [threading.Thread(target=client, args=(name,)) for name in names]
        began = time.monotonic()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return sum(tokens) / (time.monotonic() - began)

    def loads_s(self) -> list[float]:
        """The loads that the host has logged, in order."""
        lines = self.platform.layout.log("host-0/invoker").read_text().splitlines()
        events = [json.loads(line) for line in lines if '"adapter_loaded"' in line]
        return [event["s"] for event in events]


def safetensors_s(path: Path, rounds: int) -> list[float]:
    done = subprocess.run([PYTHON, "-c", _LOAD, str(path), str(rounds)], capture_output=True, text=True, check=True)
    found: list[float] = json.loads(done.stdout)
    return found


def main() -> int:
    options = _common.options(__doc__ or "")
    rounds = options.n or (1 if options.quick else 5)
    n_adapters = _SLOTS + 1 + (4 if options.quick else 16)
    work = Path(tempfile.mkdtemp(prefix="bench-", dir="/dev/shm"))
    with contextlib.ExitStack() as stack:
        stack.callback(shutil.rmtree, work, ignore_errors=True)
        store = work / "store"
        shutil.copytree(obtain(cache_dir(), say), store / "base")
        _model.write_index(store / "base")
        config = json.loads((store / "base" / "config.json").read_text())
        sizes = [write_adapter(store / f"adapter-{i}", config, i) for i in range(n_adapters)]
        platform = stack.enter_context(BenchPlatform(work / "state", store=store))
        bench = Lora(platform, f"file://{store}/base", n_adapters)
        cold = bench.waits_s(1)
        n_cold = len(bench.loads_s())
        back = [wait for _ in range(rounds) for wait in bench.waits_s(0)]
        loads, files = bench.loads_s()[n_cold:], safetensors_s(store / "adapter-0" / ADAPTER_WEIGHTS_NAME, 10 * rounds)
        say(f"cold, ms: {_ms(cold)}; back, ms: {_ms(back)}; loads, ms: {_ms(loads)}; safetensors, ms: {_ms(files)}")
        many = [f"adapter-{i}" for i in range(_SLOTS)]
        base = ["base"] * _SLOTS
        works = {"adapters": lambda: bench.tokens_per_s(many), "base": lambda: bench.tokens_per_s(base)}
        found = interleave(works, rounds)
        n_instances = platform.n_instances()
    read_s = sizes[0] / (1 << 30)  # at a GiB a second, which this store in memory reaches at least
    speeds = {name: round(median(values), 2) for name, values in found.items()}
    return _common.report(
        "lora",
        _judge(cold, back, loads, files, read_s, speeds, n_instances),
        rounds=rounds,
        n_adapters=n_adapters,
        adapter_bytes=sizes[0],
        tokens_per_s=speeds,
    )


def _judge(
    cold: list[float],
    back: list[float],
    loads: list[float],
    files: list[float],
    read_s: float,
    speeds: dict[str, float],
    n_instances: int,
) -> list[Goal]:
    return [
        judge("cold_adapter_s", median(cold) - read_s, "<=", 0.2, floor=f"n = {len(cold)}, worst {max(cold):.3f} s"),
        figure("back_adapter_s", median(back), floor=f"n = {len(back)}, worst {max(back):.3f} s"),
        figure("load_vs_safetensors", median(loads) / median(files), floor=f"{_ms(loads)} against {_ms(files)} ms"),
        judge("batch_vs_base", speeds["adapters"] / speeds["base"], ">=", 0.5, floor=f"{speeds} tokens/s"),
        judge("instances_of_all_adapters", n_instances - 1, "==", 1),
    ]


def _ms(values: list[float]) -> str:
    return f"{1e3 * median(values):.1f} (at most {1e3 * max(values):.1f}, n = {len(values)})"


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    sys.exit(main())
