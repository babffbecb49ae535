"""Runs vLLM's check on checkpoints without weights: cases come as JSON on stdin, and each answer is a line on stdout.

Each case is checked in a fork, as a host does it."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from relay.protocol.messages import LlmInit, StageShape
from tests.thaw_runtime.conftest import llm_init
from tests.thaw_runtime.sidecar_segment import SidecarSegment
from thaw.errors import ThawError
from thaw_runtime.engine.vllm import env
from thaw_runtime.process.memory_bound import bound_memory

TINY = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "torch_dtype": "bfloat16",
}

AT_ONCE = 4


def init_of(case: Mapping[str, Any]) -> LlmInit:
    plain = llm_init(args=case.get("args", {}), dtype=case.get("dtype", "auto"), max_model_len=256)
    engine = replace(plain.config.engine, max_lora_rank=case.get("max_lora_rank", 0))
    scaling = replace(plain.config.scaling, stages=case.get("stages"))
    plain = replace(plain, config=replace(plain.config, engine=engine, scaling=scaling))
    return replace(plain, stages=(StageShape((0, 2), plain.reserve_bytes, case.get("weight_bytes", 1 << 20)),))


def _segment(config: Mapping[str, Any], case: Mapping[str, Any]) -> Any:
    return SidecarSegment({"config.json": config, **case.get("files", {})})


def answer(case: Mapping[str, Any]) -> dict[str, Any]:
    from thaw_runtime.engine.main import CHECK_BYTES
    from thaw_runtime.engine.vllm.engine import VllmEngine

    if "bound" in case:
        bound_memory(CHECK_BYTES)
    config = {k: v for k, v in {**TINY, **case["config"]}.items() if v is not None}
    try:
        checked = VllmEngine(lambda _: None).check(init_of(case), _segment(config, case))
    except ThawError as e:
        return {"code": e.code, "message": e.message, "hint": e.hint}
    limits = {"max_model_len": checked.max_model_len, "prompt": checked.reading and checked.reading.prompt}
    return {"code": "", "notes": list(checked.notes), "engine": checked.engine, **limits}


def main() -> None:
    env.prepare()
    from thaw_runtime.engine.vllm.warm import warm_up

    warm_up()
    running = 0
    for name, case in json.loads(sys.stdin.read()).items():
        sys.stdout.flush()
        if running == AT_ONCE:  # vLLM waits two seconds before it reads a bad config.json again
            os.wait()
            running -= 1
        running += 1
        if os.fork():
            continue
        with tempfile.TemporaryDirectory() as directory:
            tempfile.tempdir = directory
            said = answer(case)
            left = [p.name for p in Path(directory).iterdir()]
        line = "ANSWER " + json.dumps([name, {**said, "left": left}]) + "\n"
        os.write(sys.stdout.fileno(), line.encode())  # in one piece, because others write at the same time
        os._exit(0)
    for _ in range(running):
        os.wait()


if __name__ == "__main__":
    main()
