"""A request for several choices (``n``, ``best_of``, a list of prompts): one body for each of them.

Each choice is an activation of its own, with its record, its place in the queue and its worker.  The answer puts them
together.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

MOST_CHOICES: Final = 16
"""A prompt has at most so many.  OpenAI allows 128; here each holds a thread."""
MOST_PARTS: Final = 64
CHOICES_BYTES: Final = 128 << 20
"""For the bodies of requests for several choices, at one gateway.  One request may have half of it."""
SHORT_BYTES: Final = 1 << 20
"""Bodies of a request that have no more together take none of it."""
_OF_THE_WHOLE: Final = ("n", "best_of", "prompt", "seed")


@dataclass(frozen=True, slots=True)
class Several:
    """``n_each`` bodies for each prompt, in order, of which ``n`` become choices."""

    bodies: tuple[Mapping[str, Any], ...]
    n: int
    n_each: int
    n_bytes: int = 0
    """The size of the bodies' texts, if there are several: each goes to its worker whole, whatever they share here."""

    @property
    def is_one(self) -> bool:
        return len(self.bodies) == 1


def prompts_of(body: Mapping[str, Any]) -> Sequence[Any]:
    """A list of token ids is one prompt.  A chat has its messages instead."""
    prompt = body.get("prompt")
    is_list = isinstance(prompt, list) and bool(prompt) and not all(type(t) is int for t in prompt)
    return list(prompt) if is_list else [prompt]  # type: ignore[arg-type]


def several(body: Mapping[str, Any]) -> Several:
    """The bodies of a valid request.  With a seed each choice gets its own, which follows from it."""
    n = body.get("n") or 1
    n_each = max(n, body.get("best_of") or 1)
    shared = {name: value for name, value in body.items() if name not in _OF_THE_WHOLE}
    if n_each > n and shared.get("logprobs") is None:
        shared["logprobs"] = 0  # by which the best are chosen
    bodies: list[Mapping[str, Any]] = []
    prompts = prompts_of(body)
    for prompt in prompts:
        for _ in range(n_each):
            seed = {} if body.get("seed") is None else {"seed": _wrapped(body["seed"] + len(bodies))}
            bodies.append({**shared, **({} if prompt is None else {"prompt": prompt}), **seed})
    return Several(tuple(bodies), n, n_each, _n_bytes(shared, prompts, n_each) if len(bodies) > 1 else 0)


def _n_bytes(shared: Mapping[str, Any], prompts: Sequence[Any], n_each: int) -> int:
    of_prompts = sum(len(json.dumps(prompt)) for prompt in prompts)
    return n_each * (len(prompts) * len(json.dumps(shared)) + of_prompts)


def _wrapped(seed: int) -> int:
    """In 64 bits, as the request's own."""
    return int((seed + 2**63) % 2**64 - 2**63)


def merged(asked: Mapping[str, Any], made: Several, answers: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One answer from those of the parts, which are in the order of ``made.bodies``."""
    choices: list[dict[str, Any]] = []
    n_prompt = n_completion = 0
    for at in range(0, len(answers), made.n_each):
        group = answers[at : at + made.n_each]
        n_prompt += group[0]["usage"]["prompt_tokens"]
        n_completion += sum(a["usage"]["completion_tokens"] for a in group)
        if made.n_each > made.n:
            group = sorted(group, key=_likelihood, reverse=True)[: made.n]
        for choice in (dict(a["choices"][0]) for a in group):
            if asked.get("logprobs") is None or asked["logprobs"] is False:  # 0 is a number of them
                choice["logprobs"] = None
            choices.append({**choice, "index": len(choices)})
    total = {"prompt_tokens": n_prompt, "completion_tokens": n_completion, "total_tokens": n_prompt + n_completion}
    return {**answers[0], "choices": choices, "usage": total}


def _likelihood(answer: Mapping[str, Any]) -> float:
    """The mean logprob of an answer's own tokens, as OpenAI's ``best_of`` has it.  An echoed prompt stands before
    them."""
    n, logprobs = answer["usage"]["completion_tokens"], answer["choices"][0].get("logprobs") or {}
    found = (logprobs.get("token_logprobs") or [])[-n:] if n else []
    return float(sum(found) / len(found)) if found else -9999.0
