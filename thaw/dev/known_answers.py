"""Questions to SmolLM2-135M-Instruct whose answers are the same on every processor.

Processors round differently, and where two tokens are nearly equally likely, the one or the other comes.  The *margin*
of an answer is the least distance between the log probabilities of the expected token and of the best other one, along
the answer, computed in float32.  Computing in bfloat16 moves it by up to 0.3 nat, so an answer with a margin of 1 nat
is the same everywhere.  "What is the capital of France?" has a margin of 0.10, and on a processor with AMX the model
answers it with "L'Étoile, la Marseillaise".

``scripts/margins.py`` measures them; a test holds this table to what it measures.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

LEAST_MARGIN: Final = 1.0
"""In nat: three times the largest distance between bfloat16 and float32 that was seen."""


@dataclass(frozen=True, slots=True)
class KnownAnswer:
    """``margin``: in nat, measured.  A chat's answer ends by itself; a text would go on."""

    prompt: str
    text: str
    margin: float
    is_chat: bool = True

    @property
    def messages(self) -> list[dict[str, str]]:
        return [{"role": "user", "content": self.prompt}]

    @property
    def last_word(self) -> str:
        return self.text.rstrip(".").split()[-1]


FRANCE: Final = KnownAnswer("Complete the sentence: The capital of France is", "The capital of France is Paris.", 1.72)
ITALY: Final = KnownAnswer("Complete the sentence: The capital of Italy is", "The capital of Italy is Rome.", 1.78)
OF_FRANCE: Final = KnownAnswer("The capital of France is", " Paris.", 1.26, is_chat=False)
COUNTING: Final = KnownAnswer(
    "1, 2, 3, 4, 5,",
    " 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22,",
    1.90,
    is_chat=False,
)
"""64 tokens, for what takes a while."""

KNOWN: Final = (FRANCE, ITALY, OF_FRANCE, COUNTING)
