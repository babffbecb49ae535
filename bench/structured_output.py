"""What does structured output add to the time per token?

``python bench/structured_output.py URL KEY MODEL``, against a running platform whose MODEL is warm.

A round streams the same prompt twice, once free and once under a JSON Schema that allows all the tokens that are asked
for.  The order of the two changes from round to round, so that a machine that becomes slower favours neither.  The last
line is JSON; ``added`` is the median over the rounds of TPOT under the schema, divided by TPOT without it, less 1.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from typing import Any

import requests

PROMPT = "List the numbers that you know, one after the other, and say something about each."
SCHEMA = {
    "type": "array",
    "minItems": 500,
    "items": {
        "type": "object",
        "properties": {"number": {"type": "integer"}, "words": {"type": "string"}},
        "required": ["number", "words"],
        "additionalProperties": False,
    },
}
FORM = {"type": "json_schema", "json_schema": {"name": "numbers", "schema": SCHEMA}}


def tpot_s(url: str, key: str, model: str, n_tokens: int, more: dict[str, Any]) -> float:
    """Seconds per token of one stream, without its first token."""
    body = {"model": model, "messages": [{"role": "user", "content": PROMPT}], "temperature": 0, **more}
    headers = {"Authorization": f"Bearer {key}"}
    asked = {**body, "max_tokens": n_tokens, "stream": True, "stream_options": {"include_usage": True}}
    times, usage = [], None
    with requests.post(f"{url}/v1/chat/completions", json=asked, headers=headers, stream=True, timeout=600) as reply:
        reply.raise_for_status()
        for line in reply.iter_lines():
            if line.startswith(b"data: {"):
                chunk = json.loads(line[6:])
                usage = chunk.get("usage") or usage
                if chunk["choices"] and chunk["choices"][0]["delta"].get("content"):
                    times.append(time.perf_counter())
    if usage is None or usage["completion_tokens"] != n_tokens:
        raise SystemExit(f"the answer has {usage}, not {n_tokens} tokens")
    return (times[-1] - times[0]) / (n_tokens - 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url")
    parser.add_argument("key")
    parser.add_argument("model")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=128)
    args = parser.parse_args()
    forms: dict[str, dict[str, Any]] = {"free": {"ignore_eos": True}, "schema": {"response_format": FORM}}
    found: dict[str, list[float]] = {name: [] for name in forms}
    for number in range(args.rounds + 1):
        names = list(forms) if number % 2 else list(forms)[::-1]
        for name in names:
            seconds = tpot_s(args.url, args.key, args.model, args.tokens, forms[name])
            if number:  # the first round compiles the grammar, and warms everything else
                found[name].append(seconds)
    ratios = [schema / free for free, schema in zip(found["free"], found["schema"], strict=True)]
    medians = {f"tpot_{name}_ms": round(1000 * statistics.median(times), 3) for name, times in found.items()}
    added = round(statistics.median(ratios) - 1, 4)
    print(json.dumps({"question": "structured output", "rounds": args.rounds, **medians, "added": added}))


if __name__ == "__main__":
    main()
