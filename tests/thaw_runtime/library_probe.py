"""Tiny models that plain vLLM does not compute as they are: Thaw's tokens beside those of the Transformers library, and
the memory.

``python library_probe.py FAMILY…`` prints a line ``FOUND {…}`` for each family.  Each runs in forks: one computes with the
library, which knows nothing of batches, blocks and caches, and the other is an engine."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tests.thaw_runtime.families import EVERY, MULTIMODAL, VOCAB
from tests.thaw_runtime.kv_probe import anonymous, make_checkpoint
from tests.thaw_runtime.pipeline_probe import Stage, inits, tokens
from thaw.errors import ThawError
from thaw_runtime.engine.protocol import EngineRequest, Sampling
from thaw_runtime.engine.vllm import env as engine_env
from thaw_runtime.engine.vllm.warm import warm_up

N_TOKENS = 24
LENGTHS = (12, 13, 140)
"""The last prompt is longer than a block, so that its state is in the prefix cache."""
RESERVE = 384 << 20
_SPECIAL = 12  # the first tokens may stand for pictures


def make(family: str, model: Path) -> None:
    if family in EVERY:
        make_checkpoint(EVERY[family], model)
        return
    import torch
    from transformers import AutoConfig, AutoModelForImageTextToText

    torch.manual_seed(0)
    config = AutoConfig.for_model(**MULTIMODAL[family])
    AutoModelForImageTextToText.from_config(config).to(torch.bfloat16).save_pretrained(model)


def prompt(i: int, length: int) -> tuple[int, ...]:
    return tuple(_SPECIAL + (i * 131 + j * 37 + 5) % (VOCAB - _SPECIAL) for j in range(length))


PROMPTS = [prompt(i, length) for i, length in enumerate(LENGTHS)]


def of_library(family: str, model: Path) -> list[list[int]]:
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    auto: Any = AutoModelForImageTextToText if family in MULTIMODAL else AutoModelForCausalLM
    made: Any = auto.from_pretrained(model, dtype=torch.float32).eval()
    answers = []
    with torch.no_grad():
        for asked in PROMPTS:
            ids = torch.tensor([asked])
            for _ in range(N_TOKENS):
                ids = torch.cat([ids, made(input_ids=ids).logits[:, -1].argmax(-1, keepdim=True)], 1)
            answers.append(ids[0, len(asked) :].tolist())
    return answers


def of_engine(model: Path, directory: Path) -> dict[str, Any]:
    (init,) = inits(model, 1, "", reserve=RESERVE)
    stage = Stage(model, init, directory)
    base = anonymous()

    def ask(name: str, asked: Sequence[tuple[int, ...]]) -> list[list[int]]:
        wanted = [EngineRequest(f"{name}-{i}", p, Sampling(N_TOKENS, temperature=0.0), 0) for i, p in enumerate(asked)]
        return [tokens(events) for events in stage.ask(wanted)]

    alone = [ask(f"alone{i}", [p])[0] for i, p in enumerate(PROMPTS)]
    together = ask("together", PROMPTS)
    ask("wide", [prompt(9 + i, 200) for i in range(8)])
    found = {"alone": alone, "together": together, "again": ask("again", PROMPTS), "grown": anonymous() - base}
    return {**found, "memory": dict(stage.started.memory)}


def too_small(model: Path, directory: Path) -> dict[str, Any]:
    """The error of a start whose reserve has room for weights and intermediates, and for a few blocks."""
    (init,) = inits(model, 1, "", reserve=RESERVE)
    memory = Stage(model, init, directory).started.memory
    (init,) = inits(model, 1, "", reserve=memory["weights"] + memory["intermediates"] + (64 << 10))
    try:
        Stage(model, init, directory)
    except ThawError as e:
        return {"code": e.code, "message": e.message, "hint": e.hint}
    return {}


def in_fork(work: Callable[[], Any]) -> Any:
    reading, writing = os.pipe()
    if not os.fork():
        os.write(writing, json.dumps(work()).encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        said = pipe.read()
    os.wait()
    return json.loads(said)


def main() -> None:
    engine_env.prepare()
    os.environ["HF_DEACTIVATE_ASYNC_LOAD"] = "1"  # threads of torch do not survive a fork
    warm_up()
    for family in sys.argv[1:]:
        with tempfile.TemporaryDirectory() as directory:
            model = Path(directory) / "model"
            in_fork(lambda model=model, family=family: make(family, model))
            answers = {
                "library": in_fork(lambda model=model, family=family: of_library(family, model)),
                "engine": in_fork(lambda model=model, d=directory: of_engine(model, Path(d))),
                "too_small": in_fork(lambda model=model, d=directory: too_small(model, Path(d))),
            }
        print("FOUND " + json.dumps({"family": family, **answers}), flush=True)


if __name__ == "__main__":
    main()
