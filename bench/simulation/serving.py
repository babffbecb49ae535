"""An endpoint answers requests once it is ready: one worker, or a pipeline of several, with continuous batching.

All requests of a batch advance by a token at the same time, so one virtual clock (tokens since the beginning) orders
their completions.  A change of the batch changes the clock's speed and nothing else.  Prefills do not slow decoding
down, because the paper's t_p is already that of a full batch.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable

from bench.simulation.constants import HOP_BYTES, HOP_S, Model, prefill_s, token_s
from bench.simulation.engine import Engine, Kind
from bench.simulation.waits import Cause
from bench.simulation.workload import Request


class Endpoint:
    """``factor`` is F of Eq. 2, ``s`` the number of stages, ``hops`` the number of hops that a pass takes."""

    def __init__(
        self,
        engine: Engine,
        model: Model,
        slots: int,
        *,
        s: int = 1,
        factor: float = 1.0,
        hops: int = 0,
        link: float = math.inf,
        done: Callable[[Endpoint], None],
    ) -> None:
        self._engine, self.model, self.slots = engine, model, slots
        self.s, self.factor, self.hops, self._link, self._done = s, factor, hops, link, done
        self.inflight = 0
        self.context = 0  # tokens in the KV cache
        self.closed = False  # True: it takes no new requests
        self.idle_since = engine.now
        self._batch: list[tuple[float, int, Request]] = []
        self._tokens = 0.0
        self._rate = 0.0
        self._at = engine.now
        self._plan = 0
        self._stalled = False

    @property
    def free(self) -> int:
        return 0 if self.closed else max(0, self.slots - self.inflight)

    @property
    def step_s(self) -> float:
        """The time in which every request of the batch gets a token."""
        per_stage = math.ceil(len(self._batch) / self.s)
        return token_s(self.model, per_stage) * self.factor + self.hops * HOP_S

    def submit(self, request: Request) -> None:
        self.inflight += 1
        hop = HOP_S + HOP_BYTES * request.input_tokens / self._link
        alone_s = prefill_s(self.model, request.input_tokens)
        took_s = alone_s * self.factor + self.hops * hop
        request.waits[Cause.PREFILL] = alone_s
        if took_s > alone_s:
            request.waits[Cause.GROUP] = took_s - alone_s
        self._engine.after(took_s, self._first_token, request)

    def reshape(self, *, s: int, factor: float, hops: int, slots: int) -> None:
        """Change the endpoint's shape when a group has become one whole worker, which is as fast as any other."""
        self._advance()
        self.s, self.factor, self.hops, self.slots = s, factor, hops, slots
        self._replan()

    def stall(self, seconds: float) -> None:
        """Make no token for ``seconds``, while the KV cache moves."""
        self._advance()
        self._stalled = True
        self._replan()
        self._engine.after(seconds, self._go_on)

    def _go_on(self) -> None:
        self._advance()
        self._stalled = False
        self._replan()

    def _first_token(self, request: Request) -> None:
        self._engine.note(Kind.FIRST_TOKEN, request.index)
        request.first_token_s = self._engine.now
        self._advance()
        self.context += request.input_tokens + request.output_tokens
        heapq.heappush(self._batch, (self._tokens + request.output_tokens - 1, request.index, request))
        self._replan()

    def _advance(self) -> None:
        now = self._engine.now
        self._tokens += self._rate * (now - self._at)
        self._at = now

    def _replan(self) -> None:
        self._plan += 1
        n = len(self._batch)
        if n == 0 or self._stalled:
            self._rate = 0.0
            return
        self._rate = 1 / self.step_s
        left = max(0.0, self._batch[0][0] - self._tokens)
        self._engine.after(left / self._rate, self._due, self._plan)

    def _due(self, plan: int) -> None:
        if plan != self._plan:
            return
        self._advance()
        _, _, request = heapq.heappop(self._batch)
        self._replan()
        self.inflight -= 1
        self.context -= request.input_tokens + request.output_tokens
        request.end(self._engine.now)
        self._engine.note(Kind.COMPLETION, request.index)
        if self.inflight == 0:
            self.idle_since = self._engine.now
        self._done(self)
