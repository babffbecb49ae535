"""Token ids to text, as it may be shown: whole characters only, nothing behind a stop string."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

CONTEXT_TOKENS = 6
"""Decoders look left (a space belongs to the next word, a character may span tokens); so many suffice for UTF-8's four
bytes and a leading space."""


class Decoder(Protocol):
    """tokenizers.Tokenizer."""

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str: ...


class Detokenizer:
    """Incremental: the text that ``token_id`` completes.

    A window of the last tokens is decoded twice, without and with the new one, and the difference is new text.  While
    the window ends in an unfinished character (U+FFFD), nothing is given out.
    """

    def __init__(self, decoder: Decoder, prompt_token_ids: Sequence[int]) -> None:
        self._decoder = decoder
        self._ids = list(prompt_token_ids[-CONTEXT_TOKENS:])
        self._start = 0  # of the window
        self._read = len(self._ids)  # tokens whose text was given out

    def push(self, token_id: int) -> str:
        self._ids.append(token_id)
        before = self._decoder.decode(self._ids[self._start : self._read])
        after = self._decoder.decode(self._ids[self._start :])
        if len(after) <= len(before) or after.endswith("\ufffd"):
            return ""
        self._start, self._read = self._read, len(self._ids)
        if self._start > 64:  # what was given out for good is not kept
            self._ids = self._ids[self._start :]
            self._start, self._read = 0, len(self._ids)
        return after[len(before) :]


@dataclass(slots=True)
class Shown:
    text: str
    stopped: bool = False


class StopStrings:
    """Hands text on, except a tail that may be the beginning of a stop string; cuts at the first one."""

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
        """The answer ended without the stop string: what was held back is text after all."""
        held, self._held = self._held, ""
        return held

    def _overlap(self, stop: str) -> int:
        for n in range(min(len(stop) - 1, len(self._held)), 0, -1):
            if self._held.endswith(stop[:n]):
                return n
        return 0


class TextStream:
    """Detokenizer and stop strings of one answer."""

    def __init__(self, decoder: Decoder, prompt_token_ids: Sequence[int], stops: Sequence[str]) -> None:
        self._detokenizer = Detokenizer(decoder, prompt_token_ids)
        self._stops = StopStrings(stops)

    def push(self, token_id: int) -> Shown:
        return self._stops.push(self._detokenizer.push(token_id))

    def flush(self) -> str:
        return self._stops.flush()

    def replay(self, token_ids: Sequence[int]) -> bool:
        """Tokens delivered by another worker: their text was shown (or is still held back) exactly as there.

        True: they end in a stop string.
        """
        shown = [self.push(token_id) for token_id in token_ids]
        return any(s.stopped for s in shown)
