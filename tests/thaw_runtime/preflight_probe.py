"""Runs vLLM's check on checkpoints: cases come as JSON on stdin, and each answer is a line on stdout.

A case has a ``config`` and no tensors, or names the ``family`` of a whole tiny checkpoint (families.py), from which it
may take tensors away (``without``), rename them (``renamed``: a prefix and what stands for it) or change the config.
Each case is checked in a fork, as a host does it."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Mapping
from contextlib import redirect_stderr
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

from relay.protocol.messages import LlmInit, StageShape
from tests.thaw_runtime.conftest import llm_init
from tests.thaw_runtime.fake_descriptor_socket import tensors_of
from tests.thaw_runtime.library_probe import make
from tests.thaw_runtime.sidecar_segment import SidecarSegment
from thaw.errors import ThawError
from thaw.model import TensorInfo
from thaw_runtime.engine.kv_memory import layer_count
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
    plain = llm_init(args=case.get("args", {}), dtype=case.get("dtype", "auto"), max_model_len=case.get("length", 256))
    engine = replace(plain.config.engine, max_lora_rank=case.get("max_lora_rank", 0))
    scaling = replace(plain.config.scaling, stages=case.get("stages"))
    plain = replace(plain, config=replace(plain.config, engine=engine, scaling=scaling))
    return replace(plain, stages=(StageShape((0, 2), plain.reserve_bytes, case.get("weight_bytes", 1 << 20)),))


def _of_config(case: Mapping[str, Any]) -> Any:
    config = {k: v for k, v in {**TINY, **case["config"]}.items() if v is not None}
    return SidecarSegment({"config.json": config, **case.get("files", {})})


def _of_family(case: Mapping[str, Any]) -> tuple[Any, int]:
    """The segment of a checkpoint as a check sees it, with all of its tensors and the bytes of its small files."""
    with tempfile.TemporaryDirectory() as directory:
        with redirect_stderr(StringIO()):  # the library's progress
            make(case["family"], Path(directory))
        config = json.loads((Path(directory) / "config.json").read_text())
        tensors = tensors_of(Path(directory))
    plain = {k: v for k, v in {**config, **case.get("config", {})}.items() if v is not None}
    if "gptq" in case:
        plain["quantization_config"] = case["gptq"]
        tensors = tuple(of for t in tensors for of in _as_gptq(t, case["gptq"]["group_size"]))
    tensors = tuple(t for t in tensors if t.name not in case.get("without", ()))
    before, after = case.get("renamed", ("", ""))
    tensors = tuple(replace(t, name=after + t.name.removeprefix(before)) if before else t for t in tensors)
    segment = SidecarSegment({"config.json": plain})
    segment.offer = replace(segment.offer, tensors=tensors)
    return segment, layer_count(config)


def _as_gptq(t: TensorInfo, group: int) -> list[TensorInfo]:
    """The four tensors that stand for the weights of a linear layer in four bits."""
    if not t.name.endswith("_proj.weight"):
        return [t]
    n_out, n_in = t.shape
    shapes = {
        "qweight": ("I32", (n_in // 8, n_out)),
        "qzeros": ("I32", (n_in // group, n_out // 8)),
        "scales": ("F16", (n_in // group, n_out)),
        "g_idx": ("I32", (n_in,)),
    }
    path = t.name.removesuffix("weight")
    return [replace(t, name=path + name, dtype=dtype, shape=shape) for name, (dtype, shape) in shapes.items()]


def answer(case: Mapping[str, Any]) -> dict[str, Any]:
    from thaw_runtime.engine.main import CHECK_BYTES
    from thaw_runtime.engine.vllm.engine import VllmEngine

    if "bound" in case:
        bound_memory(CHECK_BYTES)
    segment, n_layers = _of_family(case) if "family" in case else (_of_config(case), 2)
    if case.get("only_names"):
        return {"names": [t.name for t in segment.offer.tensors]}
    init = init_of(case)
    init = replace(init, layers=(0, n_layers), stages=(replace(init.stages[0], layers=(0, n_layers)),))
    try:
        checked = VllmEngine(lambda _: None).check(init, segment)
    except ThawError as e:
        return {"code": e.code, "message": e.message, "hint": e.hint}
    limits = {"max_model_len": checked.max_model_len, "prompt": checked.reading and checked.reading.prompt}
    said = {"code": "", "notes": list(checked.notes), "engine": checked.engine, "most_stages": checked.most_stages}
    return {**said, **limits}


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
