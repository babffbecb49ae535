"""Keeps answers whose clients may reconnect, for a bounded time and in bounded memory.  No threads, no clock.

::

    read ──client hangs up──▶ absent ──reconnects──▶ read
                                │ its time is over, or it takes too much memory
                                ▼
                             dropped: a run that goes on is ended, and the tokens are forgotten

An answer may end in either state.  It is kept all the same: its last events may not have reached the client.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from relay.protocol.messages import RunFinished, RunPrompt, RunToken
from thaw.errors import ThawError
from thaw.ids import ActivationId

_TOKEN_BYTES: Final = 200
_LOGPROB_BYTES: Final = 150
_CALL_BYTES: Final = 200
"""The memory of a token beside its characters, of each alternative of its logprob, and of each part of a call."""
_RANKED_BYTES: Final = 400
"""The memory of a token that could stand in a prompt, as a message and in the answer."""


@dataclass(frozen=True, slots=True)
class Bounds:
    seconds: float
    stream_bytes: int
    all_bytes: int


@dataclass(slots=True, eq=False)
class Kept:
    """One answer as far as it is known.  ``until_s`` is None while a client reads."""

    activation_id: ActivationId
    body_bytes: int = 0  # its request's body, which is needed while the answer goes on
    tokens: list[RunToken] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)
    waits: bool = False  # the last notice is still true
    end: RunFinished | ThawError | None = None
    n_bytes: int = 0  # tokens and body together
    until_s: float | None = None
    dropped: bool = False


class Shelf:
    """The kept answers by activation.  Methods return the answers that were dropped."""

    def __init__(self, bounds: Bounds) -> None:
        self._bounds = bounds
        self._all: dict[ActivationId, Kept] = {}
        self._absent: dict[ActivationId, Kept] = {}  # in the order of their deadlines
        self._n_bytes = 0  # the absent answers' bytes

    @property
    def n_absent(self) -> int:
        return len(self._absent)

    @property
    def n_bytes(self) -> int:
        return self._n_bytes

    def put(self, kept: Kept) -> None:
        """A client reads from now on."""
        kept.n_bytes = kept.body_bytes + sum(map(token_bytes, kept.tokens))
        self._all[kept.activation_id] = kept

    def get(self, activation_id: ActivationId) -> Kept | None:
        return self._all.get(activation_id)

    def add(self, kept: Kept, step: str | RunToken) -> Sequence[Kept]:
        if kept.dropped:  # its run has not noticed yet, and its activation may have another stream by now
            return ()
        kept.waits = isinstance(step, str)
        if isinstance(step, str):
            kept.notices.append(step)
            return ()
        kept.tokens.append(step)
        n_bytes = token_bytes(step)
        kept.n_bytes += n_bytes
        if kept.activation_id not in self._absent:
            return ()
        self._n_bytes += n_bytes
        return self._fit(kept)

    def finish(self, kept: Kept, end: RunFinished | ThawError) -> None:
        """The caller forgets the request's body now."""
        kept.end = end
        kept.n_bytes -= kept.body_bytes
        if not kept.dropped and kept.activation_id in self._absent:
            self._n_bytes -= kept.body_bytes
        kept.body_bytes = 0

    def attach(self, kept: Kept) -> None:
        kept.until_s = None
        if self._absent.pop(kept.activation_id, None) is not None:
            self._n_bytes -= kept.n_bytes

    def leave(self, kept: Kept, now_s: float, *, resumable: bool) -> Sequence[Kept]:
        """The client has gone.  ``resumable``: it may come back, and has an event id to go on from.  An error that it
        has read is not kept."""
        if kept.dropped:
            return ()
        if not resumable or self._bounds.seconds <= 0 or isinstance(kept.end, ThawError):
            return (self.drop(kept),)
        kept.until_s = now_s + self._bounds.seconds
        self._absent[kept.activation_id] = kept
        self._n_bytes += kept.n_bytes
        return self._fit(kept)

    def due_s(self) -> float | None:
        """When expire() has something to do."""
        return next((kept.until_s for kept in self._absent.values()), None)

    def expire(self, now_s: float) -> Sequence[Kept]:
        over = [k for k in self._absent.values() if k.until_s is not None and k.until_s <= now_s]
        return [self.drop(kept) for kept in over]

    def drop(self, kept: Kept) -> Kept:
        self.attach(kept)
        self._all.pop(kept.activation_id, None)
        kept.dropped = True
        return kept

    def _fit(self, kept: Kept) -> Sequence[Kept]:
        """Keep to the bounds.  Answers that have ended give way first, because they can be computed again; then the one
        that has just grown."""
        if kept.n_bytes > self._bounds.stream_bytes:
            return (self.drop(kept),)
        dropped = []
        while self._n_bytes > self._bounds.all_bytes:
            ended = (k for k in self._absent.values() if k.end is not None and k is not kept)
            dropped.append(self.drop(next(ended, kept)))
        return dropped


def token_bytes(token: RunToken) -> int:
    shown = len(token.text) + sum(_CALL_BYTES + len(part.arguments) for part in token.calls)
    if token.logprob is None:
        return _TOKEN_BYTES + shown
    return _TOKEN_BYTES + shown + _LOGPROB_BYTES * (1 + len(token.logprob.top))


def prompt_bytes(prompt: RunPrompt) -> int:
    """The memory of a prompt's logprobs.  The rest of the prompt is no larger than the request."""
    n_echoed = sum(1 + len(one.top) for one in prompt.logprobs if one is not None)
    return _LOGPROB_BYTES * n_echoed + _RANKED_BYTES * sum(map(len, prompt.ranked))
