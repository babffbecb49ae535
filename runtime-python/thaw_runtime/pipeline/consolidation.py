"""Turns a group into one worker while it answers: the protocol as stage 0 follows it (docs/consolidation.md).

::

    LOADING ──the model is whole──▶ COPYING ──a round has come: another──▶ COPYING
                                       │
                                       └──the rest is small──▶ STOPPED: no step is scheduled, the tail is copied
                                                                  ├──it has come──▶ WHOLE
    a failure in any state but WHOLE ──▶ GIVEN_UP: the pipeline goes on ◀──it has not

The engine thread moves from state to state, between two steps.  Blocks are written by the link's receiving thread, into
layers that do not compute before the switch.
"""

from __future__ import annotations

import enum
import math
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from time import monotonic
from typing import Final, Protocol

from thaw.errors import ErrorInfo, PlatformError, ProtocolError, ThawError, Unavailable, WorkerLost
from thaw.logs import Log, print_traceback
from thaw_runtime.engine.protocol import Consolidated, ConsolidationEnded
from thaw_runtime.pipeline.block_copies import BlockCopies, HeldBlock
from thaw_runtime.pipeline.kv_rounds import CHANGED_PART, ROUND_BYTES, STOPPED_S, Next, after_round
from thaw_runtime.pipeline.kv_wire import KvPart
from thaw_runtime.pipeline.wire import Blocks, KvWanted

_log = Log("engine")
ROUND_S: Final = 30.0
"""How long a round may take.  A stage that is silent for so long counts as lost anyway (pipeline/link.py)."""
Checking = Generator[None, None, ErrorInfo | None]
"""A check that yields when a step shall come first.  It returns what differs, or None."""
MAX_CHECKS: Final = 4
"""The most checks of blocks.  A check that runs between two requests finds nothing to compare, so another one follows;
without a limit, a group that answers only short requests might never be switched."""


@dataclass(frozen=True, slots=True)
class BlockCheck:
    """The result of a check of copied blocks.

    ``problem`` says what differs.  ``n_requests`` had copied blocks to compare.  The blocks ``overwritten`` hold
    something else now.
    """

    problem: ErrorInfo | None
    n_requests: int
    overwritten: frozenset[int]


CheckingBlocks = Generator[None, None, BlockCheck]


class FirstStage(Protocol):
    """The interface of stage 0 that a consolidation uses.

    ``write`` is called on the link's thread, everything else on the engine's.
    """

    n_stages: int

    @property
    def layers(self) -> Mapping[int, frozenset[str]]:
        """The names of the layers of each other stage."""
        ...

    def ready(self) -> bool:
        """True when the model is whole and can be verified.  Raises the error of the load."""
        ...

    def held(self) -> Sequence[Sequence[HeldBlock]]:
        """For each KV cache group, the blocks of the running requests."""
        ...

    def n_bytes(self, blocks: Blocks) -> int:
        """The bytes of blocks in all layers of the other stages."""
        ...

    def ask(self, wanted: KvWanted) -> None:
        """Ask the other stages for blocks as they are after the batches that were sent.  Raises WorkerLost."""
        ...

    def write(
        self, name: str, layout: str, wanted: KvWanted, data: memoryview, added: Sequence[Mapping[int, int]]
    ) -> None:
        """Write a layer's blocks (KvBlocks.scatter).  Raises ProtocolError."""
        ...

    def verify_weights(self) -> Checking:
        """Say what the whole model computes differently."""
        ...

    def verify_blocks(self, missing: frozenset[int]) -> CheckingBlocks:
        """Say which copied blocks the whole model computes differently.  The blocks ``missing`` have not come."""
        ...

    def stopped(self) -> AbstractContextManager[None]:
        """No step is scheduled while the block runs."""
        ...

    def drain(self) -> None:
        """Compute until no batch is in flight.  Raises WorkerLost."""
        ...

    def check_generators(self, generators: Mapping[str, bytes]) -> None:
        """Raises ProtocolError if these are not the generators' states of all requests."""
        ...

    def become_whole(self, copies: Sequence[BlockCopies], generators: Mapping[str, bytes]) -> None:
        """Compute all layers from now on."""
        ...

    def give_up(self) -> None:
        """Take back what was done for the check."""
        ...


class State(enum.Enum):
    LOADING = enum.auto()
    COPYING = enum.auto()
    STOPPED = enum.auto()
    WHOLE = enum.auto()
    GIVEN_UP = enum.auto()


class Consolidation:
    """One attempt.  ``advance`` and ``give_up`` are called on the engine thread."""

    def __init__(
        self,
        stage: FirstStage,
        attempt: int,
        n_groups: int,
        changed: threading.Condition,
        ended: Callable[[ConsolidationEnded], None],
    ) -> None:
        """``changed`` is notified when ``advance`` may have something to do."""
        self.state = State.LOADING
        self._stage, self._attempt, self._changed, self._ended = stage, attempt, changed, ended
        self._copies = [BlockCopies() for _ in range(n_groups)]
        self._left: dict[int, set[str]] = {}  # the layers of each stage that the round still lacks
        self._wanted: KvWanted | None = None  # the blocks that the round has requested
        self._added: Sequence[Mapping[int, int]] = ()
        self._generators: dict[str, bytes] = {}
        self._failure: ErrorInfo | None = None
        self._check: Checking | None = None  # the check that is in progress
        self._began_s = self._round_began_s = monotonic()
        self._deadline_s = math.inf
        self._n_checks, self._n_compared = 0, 0  # checks of blocks, and the requests whose blocks they compared
        self._wait_s, self._n_rounds, self._n_steps = 0.0, 0, 0
        self._n_bytes, self._round_bytes, self._rounds_s = 0, 0, 0.0
        self._missing_bytes, self._is_cut = 0, False  # at the round's beginning; whether it asks for a part only
        self._is_engines = False  # an error comes from the engine's steps or from the switch, not from this attempt

    # ── the engine thread ──

    def is_due(self) -> bool:
        """True when ``advance`` has something to do.  The caller holds ``changed``."""
        if self.state in (State.WHOLE, State.GIVEN_UP):
            return False
        if self._failure is not None or self._check is not None or monotonic() >= self._deadline_s:
            return True
        if self.state is State.LOADING:
            return self._is_loaded() or self._failure is not None
        return not self._left

    def left_s(self) -> float | None:
        """Return the seconds until the current deadline, or None if there is no deadline."""
        return None if self._deadline_s == math.inf else self._deadline_s - monotonic()

    def advance(self, *, computes: bool) -> None:
        """Continue the attempt, if there is something to do.  ``computes`` says that a step follows.  Raises
        WorkerLost, and the errors of the engine's steps and of the switch; any other error ends the attempt only.
        """
        self._n_steps += computes
        if not self.is_due():
            return
        try:
            self._go_on()
        except WorkerLost:
            raise
        except Exception as e:
            if self._is_engines:
                raise
            print_traceback()
            error = e if isinstance(e, ThawError) else PlatformError(f"{type(e).__name__}: {e}")
            self.give_up(error.info())

    def _go_on(self) -> None:
        if self._failure is not None:
            self.give_up(self._failure)
        elif self._check is not None:
            self._check_on(self._check)
        elif self.state is State.LOADING and self._is_loaded():
            self._wait_s = monotonic() - self._began_s
            self._begin_check(self._stage.verify_weights())
        elif self.state is State.LOADING or self._left:
            self.give_up(self._late())
        else:
            self._round_came()

    def give_up(self, error: ErrorInfo) -> None:
        """End the attempt.  The group stays a pipeline."""
        if self.state in (State.WHOLE, State.GIVEN_UP):
            return
        if self._check is not None:
            self._check.close()  # it holds KV blocks
            self._check = None
        self._stage.give_up()
        self._end(State.GIVEN_UP, error)
        _log.event("consolidation_failed", attempt=self._attempt, rounds=self._n_rounds, reason=error.message)

    def _is_loaded(self) -> bool:
        try:
            return self._stage.ready()
        except ThawError as e:
            self._failure = e.info()
            return False

    def _round_came(self) -> None:
        self._note_round()
        bytes_per_s = self._n_bytes / self._rounds_s if self._rounds_s > 0 else math.inf
        tail_bytes = self._bytes_to_come(self._missing())
        catches_up = self._is_cut and tail_bytes < self._missing_bytes
        match after_round(self._n_rounds, tail_bytes, bytes_per_s, self._step_s(), is_catching_up=catches_up):
            case Next.COPY:
                self._ask(last=False)
            case Next.STOP if self._shall_check_blocks():
                self._begin_check(self._verify_blocks())
            case Next.STOP:
                self._stop_and_switch()
            case Next.GIVE_UP:
                said = f"after {self._n_rounds} rounds, {tail_bytes} bytes of KV blocks were still missing"
                self.give_up(Unavailable(said, hint="the relay is slower than the pipeline computes").info())

    def _verify_blocks(self) -> Checking:
        missing = frozenset(each.block for blocks in self._missing() for each in blocks)
        check = yield from self._stage.verify_blocks(missing)
        for copies in self._copies:
            copies.forget(check.overwritten)
        self._n_checks += 1
        self._n_compared += check.n_requests
        return check.problem

    def _shall_check_blocks(self) -> bool:
        """True until a check has compared blocks.  It is not repeated while no request has a full block, because there
        is nothing to compare."""
        has_full = any(each.is_full for blocks in self._stage.held() for each in blocks)
        return not self._n_checks or (not self._n_compared and has_full and self._n_checks < MAX_CHECKS)

    def _begin_check(self, check: Checking) -> None:
        self._check, self._deadline_s = check, monotonic() + ROUND_S
        self._check_on(check)

    def _check_on(self, check: Checking) -> None:
        """Compute a slice of the check.  After the last one a round follows: blocks have changed meanwhile."""
        if monotonic() >= self._deadline_s:
            self.give_up(self._late())
            return
        try:
            next(check)
        except StopIteration as ended:
            self._check = None
            if ended.value is not None:
                self.give_up(ended.value)
            else:
                self.state = State.COPYING
                self._ask(last=False)

    def _stop_and_switch(self) -> None:
        """Copy the tail while no step is scheduled, then switch.  Without the tail, go on as before."""
        self.state, stopped_s = State.STOPPED, monotonic()
        with self._stage.stopped():
            self._ask(last=True)
            self._is_engines = True
            self._stage.drain()
            self._is_engines = False
            with self._changed:
                self._changed.wait_for(lambda: not self._left or self._failure is not None, timeout=STOPPED_S)
            if self._left or self._failure is not None:
                self.give_up(self._failure or self._late())
                return
            tail_bytes = self._round_bytes
            self._note_round()
            self._stage.check_generators(self._generators)
            self._is_engines = True
            self._stage.become_whole(self._copies, self._generators)
        stall_s = monotonic() - stopped_s
        done = Consolidated(self._n_rounds, self._n_bytes, tail_bytes, round(self._wait_s, 3), round(stall_s, 4))
        self._end(State.WHOLE, done)
        _log.event(
            "consolidated",
            attempt=self._attempt,
            rounds=done.rounds,
            n_bytes=done.n_bytes,
            tail_bytes=done.tail_bytes,
            wait_s=done.wait_s,
            stall_s=done.stall_s,
        )

    def _ask(self, *, last: bool) -> None:
        """Begin a round: ask every stage for the blocks that are missing now, after the batches that were sent."""
        missing = self._missing()
        n_missing, self._missing_bytes = sum(map(len, missing)), self._bytes_to_come(missing)
        if not last:
            missing = self._cut(missing)
        for copies, blocks in zip(self._copies, missing, strict=True):
            copies.ask(blocks)
        added = tuple(copies.added_tokens() for copies in self._copies)
        asked = tuple(tuple(each.block for each in blocks) for blocks in missing)
        known = tuple(tuple(b for b in blocks if b in more) for blocks, more in zip(asked, added, strict=True))
        with self._changed:
            self._n_rounds += 1
            self._wanted, self._added = KvWanted(self._attempt, self._n_rounds, asked, known, last), added
            self._left = {stage: set(names) for stage, names in self._stage.layers.items()}
        self._is_cut = sum(map(len, missing)) < n_missing
        self._round_bytes, self._round_began_s, self._n_steps = 0, monotonic(), 0
        self._deadline_s = self._round_began_s + ROUND_S
        self._stage.ask(self._wanted)

    def _note_round(self) -> None:
        for copies in self._copies:
            copies.arrived()
        self._n_bytes += self._round_bytes
        self._rounds_s += monotonic() - self._round_began_s

    def _missing(self) -> list[list[HeldBlock]]:
        return [copies.missing(blocks) for copies, blocks in zip(self._copies, self._stage.held(), strict=True)]

    def _cut(self, missing: list[list[HeldBlock]]) -> list[list[HeldBlock]]:
        """Return as many of the blocks as one round may copy."""
        n_bytes, n_blocks = self._stage.n_bytes(_ids(missing)), sum(map(len, missing))
        if n_bytes <= ROUND_BYTES:
            return missing
        most = max(1, n_blocks * ROUND_BYTES // n_bytes // len(missing))
        return [blocks[:most] for blocks in missing]

    def _bytes_to_come(self, missing: list[list[HeldBlock]]) -> int:
        """Estimate the bytes of sending these blocks: for a block with a copy, only the changes are sent."""
        new = [[b for b in blocks if not c.has_part(b)] for blocks, c in zip(missing, self._copies, strict=True)]
        n_new = self._stage.n_bytes(_ids(new))
        return n_new + (self._stage.n_bytes(_ids(missing)) - n_new) // CHANGED_PART

    def _step_s(self) -> float:
        """Return the time of one decode step: there are as many batches as stages, and each request is in one of
        them."""
        took_s = monotonic() - self._round_began_s
        return took_s / self._n_steps * self._stage.n_stages if self._n_steps else math.inf

    def _late(self) -> ErrorInfo:
        if self._check is not None:
            said = f"the check of the whole worker did not end within {ROUND_S:g} s"
            return Unavailable(said, hint="the pipeline is too busy").info()
        if self.state is State.LOADING:
            said = f"the pipeline did not answer the check's request within {ROUND_S:g} s"
            return Unavailable(said, hint="it is too busy").info()
        with self._changed:
            stages = ", ".join(map(str, self._left))
        allowed_s = STOPPED_S if self.state is State.STOPPED else ROUND_S
        return Unavailable(f"stage {stages} did not send its KV blocks within {allowed_s:g} s").info()

    def _end(self, state: State, outcome: ConsolidationEnded) -> None:
        with self._changed:
            self.state, self._left, self._wanted = state, {}, None
        self._ended(outcome)

    # ── the link's receiving thread, and that of the load ──

    def load_ended(self) -> None:
        """The model is whole, or its load has failed."""
        with self._changed:
            self._deadline_s = monotonic() + ROUND_S
            self._changed.notify_all()

    def fail(self, error: ErrorInfo) -> None:
        """The attempt cannot succeed any more."""
        with self._changed:
            self._failure = error
            self._changed.notify_all()

    def take(self, stage: int, part: KvPart) -> None:
        """Write the blocks of a part.

        A part that comes twice, or of a round that has ended, is ignored.  A wrong one ends the attempt.
        """
        with self._changed:
            awaited, wanted = set(self._left.get(stage, ())), self._wanted
        if wanted is None or (part.attempt, part.round) != (wanted.attempt, wanted.round):
            return
        try:
            self._write(stage, part, wanted, awaited)
        except ThawError as e:
            self.fail(e.info())
        with self._changed:
            if left := self._left.get(stage):
                left.difference_update(part.layers)
                if not left:
                    del self._left[stage]
                if self.state is State.STOPPED and stage == self._stage.n_stages - 1:
                    self._generators |= part.generators
                self._changed.notify_all()

    def _write(self, stage: int, part: KvPart, wanted: KvWanted, awaited: set[str]) -> None:
        if awaited and part.blocks != wanted.blocks:
            raise ProtocolError(f"stage {stage} sent other KV blocks than it was asked for")
        for name, data in part.layers.items():
            if name not in self._stage.layers.get(stage, ()):
                raise ProtocolError(f"stage {stage} sent KV blocks of {name}, which it does not have")
            if name in awaited:
                self._stage.write(name, part.layouts[name], wanted, data, self._added)
                self._round_bytes += len(data)


def _ids(blocks: list[list[HeldBlock]]) -> Blocks:
    return tuple(tuple(each.block for each in group) for group in blocks)
