"""Answers that a grammar allows, drawn from its masks as a model without any preference would write them."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from typing import Any, Final

import xgrammar

from thaw_runtime.engine.grammar_process import Rules, compiled

_END: Final = 256
_LONG: Final = 40  # tokens
_MOST: Final = 400
_CLOSING: Final = [b'"', b"}", b"]"]


class Sampler:
    """Its vocabulary has each byte, and ``words``, which are names and values that a schema knows: a draw of single bytes
    would hardly ever write them."""

    def __init__(self, words: Iterable[str]) -> None:
        texts = [*{w.encode() for word in words for w in (word, json.dumps(word)[1:-1]) if len(w.encode()) > 1}]
        self._tokens = [*(bytes([n]) for n in range(256)), b"", *sorted(texts)]
        info = xgrammar.TokenizerInfo(self._tokens, xgrammar.VocabType.RAW, stop_token_ids=[_END])
        self._compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)

    def grammar(self, schema: Any) -> Any:
        """Raises grammar_process.Refused."""
        return compiled(self._compiler, Rules("json", json.dumps(schema), "response_format"))

    def answer(self, grammar: Any, draw: random.Random) -> str | None:
        """One whole answer; None if it came to no end in time, if its grammar allows nothing, or if its bytes are no text:
        xgrammar lets through some that are no UTF-8, which hardly any token has."""
        matcher = xgrammar.GrammarMatcher(grammar)
        mask, written = xgrammar.allocate_token_bitmask(1, len(self._tokens)), b""
        for n in range(_MOST):
            matcher.fill_next_token_bitmask(mask)
            allowed = self._allowed(mask)
            if not allowed:
                return None
            token = self._next(allowed, n, draw)
            if token == _END:
                return _text(written)
            written += self._tokens[token]
            matcher.accept_token(token)
        return None

    def accepts(self, schema: Any, answer: str) -> bool:
        matcher = xgrammar.GrammarMatcher(self.grammar(schema))
        return bool(matcher.accept_string(answer) and matcher.accept_token(_END))

    def _allowed(self, mask: Any) -> list[int]:
        words = [int(w) & 0xFFFFFFFF for w in mask[0]]
        return [t for t in range(len(self._tokens)) if words[t // 32] >> t % 32 & 1]

    def _next(self, allowed: list[int], n: int, draw: random.Random) -> int:
        if n > _LONG:
            for token in (_END, *(text[0] for text in _CLOSING)):
                if token in allowed:
                    return token
        known = [t for t in allowed if t >= _END]
        plain = [t for t in allowed if 32 < t < 127]
        kinds = [kind for kind in (known, plain, plain, plain, allowed) if kind]
        return draw.choice(draw.choice(kinds))


def _text(written: bytes) -> str | None:
    try:
        return written.decode()
    except UnicodeDecodeError:
        return None
