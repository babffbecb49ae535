"""What a reader makes of a model's text side.  A check has two of them: vLLM's, and Thaw's own in the proxy.

::

    engine process                                          proxy
    vLLM's tokenizer and template ─▶ TextReading ──Checked──▶ compared with Thaw's ─▶ notes of the deployment
    (engine/vllm/text_side.py)                               (llm/text_check.py)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

SAMPLES: Final = (
    "The quick brown fox can't jump over 12,345 lazy dogs.",
    " two  spaces\tand a tab \n\n  indented\n",
    "naïve café, “quotes” – 世界 🙂 Ελλάδα",
    "def f(x):\n    return [x ** 2, 'a_b', getUserName(HTTPServer), 0x1F]\n",
)
"""Texts of the kinds that tokenizers split by rules of their own."""
CHAT: Final = (
    {"role": "user", "content": "Hello!"},
    {"role": "assistant", "content": "Hi. What can I do?"},
    {"role": "user", "content": " Say it. "},
)


@dataclass(frozen=True, slots=True)
class TextReading:
    samples: tuple[tuple[int, ...], ...]  # the token ids of SAMPLES, as a prompt of a completion
    ends: tuple[int, ...]  # the tokens that end an answer
    prompt: str = ""  # of CHAT; empty when the model has no template, or one that refuses it
    prompt_ids: tuple[int, ...] = ()
