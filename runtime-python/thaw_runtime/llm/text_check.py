"""The differences between Thaw's reading of a model's text side and the engine's, as notes of a deployment."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import takewhile
from typing import Final

from thaw.errors import BadRequest
from thaw_runtime.engine.text_reading import CHAT, SAMPLES, TextReading
from thaw_runtime.llm.model_text import ModelText
from thaw_runtime.shown import shown

_SHOWN: Final = 8
"""The number of token ids that are shown from where two readings part."""
_NUMBER: Final = re.compile(r"\d+")


def differences(text: ModelText, engines: TextReading | None) -> tuple[str, ...]:
    """One sentence for each kind of difference.  ``engines`` is None when the engine's libraries read nothing."""
    if engines is None:
        return ()
    return (*_of_tokens(text, engines), *_of_prompts(text, engines), *_of_ends(text, engines))


def _of_tokens(text: ModelText, engines: TextReading) -> list[str]:
    """The prompt of a chat is among the texts: in it, special tokens stand beside words."""
    read = [(repr(sample), text.encode(sample), ids) for sample, ids in zip(SAMPLES, engines.samples, strict=True)]
    read.append(("a chat", text.encode(engines.prompt, add_special_tokens=False), engines.prompt_ids))
    differing = [one for one in read if one[1] != one[2]]
    if not differing:
        return []
    what, ours, theirs = differing[0]
    others = f" and {len(differing) - 1} of {len(read) - 1} other texts" if differing[1:] else ""
    return [
        f"the engine's tokenizer reads {what}{others} as {_parted(theirs, ours)}, and Thaw as {_parted(ours, theirs)}"
    ]


def _of_prompts(text: ModelText, engines: TextReading) -> list[str]:
    if text.template is None or not engines.prompt:
        return []
    try:
        prompt = text.template.render(CHAT, {})
    except BadRequest:
        return ["the engine's reading of the chat template takes a chat that Thaw's refuses"]
    ours, theirs = (_NUMBER.sub("0", one) for one in (prompt, engines.prompt))  # the clock has gone on
    if ours == theirs:
        return []
    n = _n_common(ours, theirs)
    parted = f"{shown(theirs[n:], _SHOWN * 8)!r} in the prompt of a chat, and Thaw with {shown(ours[n:], _SHOWN * 8)!r}"
    return [f"the engine's libraries go on with {parted}"]


def _of_ends(text: ModelText, engines: TextReading) -> list[str]:
    ours = tuple(sorted(text.eos_token_ids))
    if ours == engines.ends or not engines.ends:  # where they would have no end, Thaw takes config.json's
        return []
    return [f"the engine's libraries end an answer at the tokens {list(engines.ends)}, and Thaw at {list(ours)}"]


def _parted(ids: Sequence[int], others: Sequence[int]) -> str:
    """The ids from where the readings part."""
    n = _n_common(ids, others)
    return f"{'… ' if n else ''}{list(ids[n : n + _SHOWN])}{' …' if len(ids) > n + _SHOWN else ''}"


def _n_common(one: Sequence[object], other: Sequence[object]) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))
