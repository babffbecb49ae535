"""Convert token ids to the text that may be shown: only whole characters, and nothing behind a stop string."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

CONTEXT_TOKENS = 6
"""A decoder needs the tokens to the left (a space belongs to the next word, a character may span tokens).  This many
are enough for the four bytes of a UTF-8 character and a leading space.
"""


class Decoder(Protocol):
    """The part of tokenizers.Tokenizer that this module uses."""

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str: ...


class Detokenizer:
    """Decodes incrementally: ``push`` returns the text that a token completes.

    A window of the last tokens is decoded twice, without and with the new tokens, and the difference is the new text.
    While the window ends in an unfinished character (U+FFFD), ``push`` returns no text.
    """

    def __init__(self, decoder: Decoder, prompt_token_ids: Sequence[int]) -> None:
        self._decoder = decoder
        self._ids = list(prompt_token_ids[-CONTEXT_TOKENS:])
        self._start = 0  # where the window begins
        self._read = len(self._ids)  # the number of tokens whose text was returned

    def push(self, token_id: int) -> str:
        self._ids.append(token_id)
        before = self._decoder.decode(self._ids[self._start : self._read])
        after = self._decoder.decode(self._ids[self._start :])
        if len(after) <= len(before) or after.endswith("\ufffd"):
            return ""
        self._start, self._read = self._read, len(self._ids)
        if self._start > 64:  # tokens before the window are no longer needed
            self._ids = self._ids[self._start :]
            self._start, self._read = 0, len(self._ids)
        return after[len(before) :]


@dataclass(slots=True)
class Shown:
    text: str
    stopped: bool = False


class StopStrings:
    """Passes text on, but holds back a tail that may begin a stop string; cuts at the first stop string."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = [s for s in stops if s]
        self._held = ""

    def push(self, text: str) -> Shown:
        if not self._stops:
            return Shown(text)
        self._held += text
        found = [i for i in (self._held.find(s) for s in self._stops) if i >= 0]
        if found:
            shown, self._held = self._held[: min(found)], ""
            return Shown(shown, stopped=True)
        keep = max(self._overlap(s) for s in self._stops)
        cut = len(self._held) - keep
        shown, self._held = self._held[:cut], self._held[cut:]
        return Shown(shown)

    def flush(self) -> str:
        """Return the held-back text, because the answer ended without the stop string."""
        held, self._held = self._held, ""
        return held

    def _overlap(self, stop: str) -> int:
        for n in range(min(len(stop) - 1, len(self._held)), 0, -1):
            if self._held.endswith(stop[:n]):
                return n
        return 0


class TextStream:
    """The detokenizer and the stop strings of one answer."""

    def __init__(self, decoder: Decoder, prompt_token_ids: Sequence[int], stops: Sequence[str]) -> None:
        self._detokenizer = Detokenizer(decoder, prompt_token_ids)
        self._stops = StopStrings(stops)

    def push(self, token_id: int) -> Shown:
        return self._stops.push(self._detokenizer.push(token_id))

    def flush(self) -> str:
        return self._stops.flush()
