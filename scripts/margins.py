#!/usr/bin/env python3
"""Print the margin of every answer that the demo, the documents and the tests expect of the small real model.

The margin is the least distance, in nat, between the expected token and the best other one along the answer, with the
weights of the model in float32 (thaw/dev/known_answers.py).  transformers computes it, so neither Thaw nor vLLM is
compared with itself.  The last column says how far a margin moves when this processor computes in bfloat16.  The exit
status is 1 if an answer is not the most likely one, has a margin below 1 nat, or another one than the table says.

    .venv/bin/python scripts/margins.py
    .venv/bin/python scripts/margins.py --chat "What is the capital of France?"    the model's own answer
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import platformdirs

from thaw.dev import smollm2
from thaw.dev.known_answers import KNOWN, LEAST_MARGIN, KnownAnswer


@dataclass(frozen=True, slots=True)
class Measured:
    """``margins``: one for each token; negative where another token is more likely than the expected one."""

    tokens: tuple[str, ...]
    margins: tuple[float, ...]

    @property
    def least(self) -> float:
        return min(self.margins)

    @property
    def weakest(self) -> str:
        return self.tokens[self.margins.index(self.least)]


@cache
def model_and_tokenizer(dtype: str = "float32") -> tuple[Any, Any]:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    directory = smollm2.obtain(Path(platformdirs.user_cache_dir("thaw")) / "models")
    tokenizer = AutoTokenizer.from_pretrained(directory)
    return AutoModelForCausalLM.from_pretrained(directory, dtype=getattr(torch, dtype)).eval(), tokenizer


def prompt_ids(prompt: str, *, is_chat: bool) -> list[int]:
    _, tokenizer = model_and_tokenizer()
    if not is_chat:
        return list(tokenizer.encode(prompt, add_special_tokens=False))
    messages = [{"role": "user", "content": prompt}]
    return list(tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False))


def measure(answer: KnownAnswer, dtype: str = "float32") -> Measured:
    """Return the margins along the answer, a chat's last token included."""
    model, tokenizer = model_and_tokenizer(dtype)
    asked = prompt_ids(answer.prompt, is_chat=answer.is_chat)
    expected = tokenizer.encode(answer.text, add_special_tokens=False)
    expected += [tokenizer.eos_token_id] if answer.is_chat else []
    return margins(model, tokenizer, asked, expected)


def margins(model: Any, tokenizer: Any, asked: Sequence[int], expected: Sequence[int]) -> Measured:
    import torch

    with torch.inference_mode():
        logits = model(torch.tensor([[*asked, *expected]])).logits[0, len(asked) - 1 : -1]
    logprobs = torch.log_softmax(logits.double(), -1)
    own = logprobs.gather(1, torch.tensor(expected)[:, None])[:, 0]
    best_other = logprobs.scatter(1, torch.tensor(expected)[:, None], -torch.inf).amax(1)
    return Measured(tuple(tokenizer.decode([t]) for t in expected), tuple((own - best_other).tolist()))


def most_likely(prompt: str, *, is_chat: bool, n_tokens: int) -> Measured:
    import torch

    model, tokenizer = model_and_tokenizer()
    asked = prompt_ids(prompt, is_chat=is_chat)
    with torch.inference_mode():
        made = model.generate(torch.tensor([asked]), max_new_tokens=n_tokens, do_sample=False)[0, len(asked) :]
    return margins(model, tokenizer, asked, made.tolist())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chat", metavar="QUESTION", help="print the answer to this question instead of the table")
    parser.add_argument("--text", metavar="BEGINNING", help="print how this text goes on instead of the table")
    parser.add_argument("--tokens", type=int, default=32, help="of such an answer (32)")
    options = parser.parse_args()
    if options.chat or options.text:
        found = most_likely(options.chat or options.text, is_chat=bool(options.chat), n_tokens=options.tokens)
        print(f"{found.least:.2f} nat at {found.weakest!r}: {''.join(found.tokens)!r}")
        return 0
    print("| prompt | answer | least margin (nat) | at | farthest in bfloat16 here (nat) |\n|---|---|---|---|---|")
    good = True
    for answer in KNOWN:
        found = measure(answer)
        rounded = measure(answer, "bfloat16")
        farthest = max(abs(a - b) for a, b in zip(found.margins, rounded.margins, strict=True))
        kind = "chat" if answer.is_chat else "text"
        print(
            f"| {kind}: `{answer.prompt}` | `{answer.text}` | {found.least:.2f} | `{found.weakest}` | {farthest:.2f} |"
        )
        good = good and found.least >= LEAST_MARGIN and abs(found.least - answer.margin) < 0.05
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
