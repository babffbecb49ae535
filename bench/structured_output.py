"""What does structured output add to the time per token?

SmolLM2-135M is warm on one host.  A round streams the same prompt twice, once free and once under a JSON Schema that
allows all the tokens that are asked for.  A first pair compiles the grammar and is not counted.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

from bench import _common, _model
from bench._common import interleave, judge, median, say
from bench._platform import BenchPlatform, llm_config
from bench._sse import Caller
from thaw.cli.model_stores.demo_model import cache_dir
from thaw.dev.smollm2 import obtain

_ACTION: Final = "numbers"
_PROMPT: Final = "List the numbers that you know, one after the other, and say something about each."
_SCHEMA: Final = {
    "type": "array",
    "minItems": 500,
    "items": {
        "type": "object",
        "properties": {"number": {"type": "integer"}, "words": {"type": "string"}},
        "required": ["number", "words"],
        "additionalProperties": False,
    },
}
_FORMAT: Final = {"type": "json_schema", "json_schema": {"name": "numbers", "schema": _SCHEMA}}


def tpot_s(caller: Caller, n_tokens: int, **more: Any) -> float:
    """Seconds per token of one stream, without its first token."""
    answer = caller.chat(_PROMPT, n_tokens, **more)
    if answer.completion_tokens != n_tokens:
        raise SystemExit(f"the answer has {answer.completion_tokens} tokens, not {n_tokens}")
    return (answer.arrivals_s[-1] - answer.arrivals_s[0]) / (n_tokens - 1)


def main() -> int:
    options = _common.options(__doc__ or "", tokens=(0, "of an answer"))
    rounds = options.n or (1 if options.quick else 9)
    n_tokens = options.tokens or (64 if options.quick else 256)
    work = Path(tempfile.mkdtemp(prefix="bench-", dir="/dev/shm"))
    with contextlib.ExitStack() as stack:
        stack.callback(shutil.rmtree, work, ignore_errors=True)
        store = work / "store"
        shutil.copytree(obtain(cache_dir(), say), store / "model")
        _model.write_index(store / "model")
        platform = stack.enter_context(BenchPlatform(work / "state", store=store))
        platform.deploy(_ACTION, llm_config(f"file://{store}/model"))
        caller = platform.caller(_ACTION)
        stack.callback(caller.close)
        works = {
            "free": lambda: tpot_s(caller, n_tokens, ignore_eos=True),
            "schema": lambda: tpot_s(caller, n_tokens, response_format=_FORMAT),
        }
        interleave(works, 1)
        found = interleave(works, rounds)
    ratios = [schema / free for schema, free in zip(found["schema"], found["free"], strict=True)]
    tpots_ms = {name: round(1e3 * median(values), 3) for name, values in found.items()}
    added = judge("added", median(ratios) - 1, "<=", 0.1, floor=f"time per token in ms: {tpots_ms}")
    return _common.report("structured_output", [added], rounds=rounds, n_tokens=n_tokens, tpot_ms=tpots_ms)


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    sys.exit(main())
