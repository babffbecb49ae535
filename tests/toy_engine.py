"""A deterministic engine for tests of everything around engines.  No demo and no benchmark uses it.

The next token is a hash of (seed, prompt, output so far), so a continued answer equals an uninterrupted one exactly if
prompt, seed and tokens arrived unchanged.  In a pipeline the last stage hashes and stage 0 answers, until stage 0 has
become one worker.
``serve`` makes a process an engine process.
"""

from __future__ import annotations

import hashlib
import os
import queue
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import NoReturn

from relay.clients.channel import Channel
from relay.protocol.messages import LlmInit
from thaw.errors import ErrorInfo, ModelUnsupported, WorkerLost
from thaw.plan import StageRole
from thaw.tracing.trace import Phase
from thaw_runtime.engine import main as engine_main
from thaw_runtime.engine.protocol import (
    AdapterFiles,
    Checked,
    Consolidated,
    ConsolidationEnded,
    Emit,
    EngineRequest,
    EngineStarted,
    Event,
    Failed,
    Finished,
    Logprobs,
    Token,
    Usage,
)
from thaw_runtime.engine.text_reading import SAMPLES, TextReading
from thaw_runtime.pipeline.link import PATIENCE, StageLink, open_transport
from thaw_runtime.pipeline.staying import Staying
from thaw_runtime.pipeline.wire import Batch, NewSequence, Parted, Sampled, Step
from thaw_runtime.process.start_trace import StartTrace
from thaw_runtime.weights.readable_segment import ARRIVAL_DEADLINE_S, Segment

VOCAB = 256
STEP_S = "0.002"
"""A step takes some time in any engine, and an abort must come while a request still runs.  The variable TOY_STEP_S
changes this."""
POISON = 0
"""A prompt that begins with this token breaks the engine."""


class Loaded:
    """The rest of a model that needs no load."""

    error: ErrorInfo | None = None
    has_ended = False

    def begin(self, when_ended: Callable[[], None]) -> None:
        self.has_ended = True
        when_ended()


class ToyEngine:
    def __init__(self, emit: Emit) -> None:
        self._emit = emit
        self._step_s = float(os.environ.get("TOY_STEP_S", STEP_S))
        self._changed = threading.Condition()
        self._open: dict[str, tuple[EngineRequest, list[int]]] = {}
        self._aborted: set[str] = set()
        self._dead: ErrorInfo | None = None
        self._stopping = False
        self._link: StageLink | None = None
        self._answers: queue.SimpleQueue[Sampled | ErrorInfo] = queue.SimpleQueue()
        self._steps = 0
        self._refuses = ""  # the outcome of a consolidation: "raises", "never ends", or the reason of a refusal
        self._becoming: Callable[[ConsolidationEnded], None] | None = None  # asked, and done at the next step

    def start(self, stage_plan: LlmInit, segment: Segment) -> EngineStarted:
        if "exit" in stage_plan.config.engine.args:
            os._exit(int(str(stage_plan.config.engine.args["exit"])))
        if "raise" in stage_plan.config.engine.args:
            raise KeyError("a defect")
        if refusal := stage_plan.config.engine.args.get("refuse"):
            raise ModelUnsupported(str(refusal), hint="take another model")
        self._refuses = str(stage_plan.config.engine.args.get("consolidate", ""))
        trace = StartTrace(group_id=stage_plan.group_id, stage=stage_plan.stage, host=stage_plan.host)
        with trace.phase(Phase.LOAD_BEGIN) as notes:
            segment.wait(segment.n_bytes, ARRIVAL_DEADLINE_S)
            notes.n_bytes = segment.n_bytes
        self._stage, follows = stage_plan.stage, stage_plan.stage > 0
        self._staying = Staying(self._changed, Loaded() if stage_plan.role is StageRole.FULL else None)
        if stage_plan.n_stages > 1:
            lost_after_s = float(str(stage_plan.config.engine.args.get("lost_after_s", PATIENCE.lost_after_s)))
            patience = replace(PATIENCE, beat_s=lost_after_s / 4, lost_after_s=lost_after_s)
            self._link = StageLink(open_transport(stage_plan), stage_plan.stage, stage_plan.n_stages, patience)
            self._link.on_sampled = self._answers.put
            self._link.when_lost(self._answers.put)
        if follows:
            self._dead = ErrorInfo("PlatformError", "a follower takes no requests")
        last = stage_plan.stage == stage_plan.n_stages - 1
        work = (lambda: self._follow(last=last)) if follows else self._loop
        self._thread = threading.Thread(target=work, name="toy-engine", daemon=True)
        self._thread.start()
        return EngineStarted(trace.events, self.memory(), stage_plan.config.engine.max_model_len)

    def check(self, stage_plan: LlmInit, segment: Segment) -> Checked:
        if "raise" in stage_plan.config.engine.args:
            raise KeyError("a defect")
        if "exit" in stage_plan.config.engine.args:
            os._exit(int(str(stage_plan.config.engine.args["exit"])))
        if "grow" in stage_plan.config.engine.args:
            bytearray(int(str(stage_plan.config.engine.args["grow"])))
        if refusal := stage_plan.config.engine.args.get("refuse"):
            raise ModelUnsupported(str(refusal), hint="take another model")
        reads = "reads" in stage_plan.config.engine.args
        reading = TextReading(tuple((1,) for _ in SAMPLES), ends=(5,)) if reads else None
        return Checked("toy 1.0", stage_plan.config.engine.max_model_len, reading=reading)

    def submit(self, request: EngineRequest) -> None:
        with self._changed:
            dead = self._dead
            if dead is None:
                self._open[request.request_id] = (request, list(request.output_so_far))
                self._changed.notify_all()
        if dead is not None:
            self._emit([(request.request_id, Failed(dead))])

    def abort(self, request_id: str) -> None:
        with self._changed:
            if request_id in self._open:
                self._aborted.add(request_id)
                self._changed.notify_all()

    def requests(self) -> tuple[str, ...]:
        with self._changed:
            return tuple(self._open)

    def consolidate(self, ended: Callable[[ConsolidationEnded], None]) -> None:
        if self._refuses == "raises":
            raise KeyError("a defect")
        if self._stage and not self._refuses:
            return self._staying.ask(ended)
        if self._refuses == "never ends":
            return None
        if self._refuses:
            return ended(ModelUnsupported(self._refuses).info())
        with self._changed:
            self._becoming = ended
            self._changed.notify_all()

    def load_adapter(self, files: AdapterFiles, ended: Callable[[ErrorInfo | None], None]) -> None:
        os.close(files.weights_fd)
        ended(None)

    def drain(self, deadline_s: float) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: not self._open, timeout=deadline_s)

    def memory(self) -> Mapping[str, int]:
        return {"reserve": 0, "weights": 0, "intermediates": 0, "kv": 0, "kv_tokens": 0}

    def stop(self) -> None:
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        if self._link is not None:
            self._link.end(ErrorInfo(WorkerLost.__name__, "the engine was stopped"))

    def join(self) -> None:
        self._thread.join()

    def _loop(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._open or self._stopping or self._becoming)
                self._switch()
                self._changed.wait_for(lambda: self._stopping, timeout=self._step_s)
                broken = self._stopping or any(r.prompt_token_ids[0] == POISON for r, _ in self._open.values())
                next_tokens = {} if broken else self._next_tokens()
                broken = broken or next_tokens is None
                events = [e for r, out in list(self._open.values()) for e in self._advance(r, out, next_tokens or {})]
                if broken:
                    self._dead = ErrorInfo(WorkerLost.__name__, "the engine failed")
                    events = [(request_id, Failed(self._dead)) for request_id in self._open]
                for request_id, event in events:
                    if not isinstance(event, Token):
                        del self._open[request_id]
                        self._aborted.discard(request_id)
                self._changed.notify_all()
            self._emit(events)
            if broken:
                return

    def _switch(self) -> None:
        """Switch between two steps: from now on this stage does not need the others."""
        if self._becoming is not None:
            if self._link is not None:
                self._link.send_parted(Parted((), ()))
            self._link = None
            self._becoming(Consolidated(rounds=2, n_bytes=4096, tail_bytes=64, wait_s=0.0, stall_s=0.0))
            self._becoming = None

    def _next_tokens(self) -> dict[str, int] | None:
        """The next tokens of the open requests, from the last stage.  Return None if the pipeline is broken."""
        if self._link is None:
            return {name: _next_token(r, output) for name, (r, output) in self._open.items()}
        self._steps += 1
        asked = tuple(NewSequence(replace(r, output_so_far=tuple(output)), (), 0) for r, output in self._open.values())
        if not asked:
            return {}
        try:
            self._link.send_batch(Batch(Step(self._steps, asked, (), dict.fromkeys(self._open, 1), ()), {}))
        except WorkerLost:
            return None
        answer = self._answers.get(timeout=60)
        if isinstance(answer, ErrorInfo):
            return None
        return {name: ids[0] for name, ids in zip(answer.request_ids, answer.token_ids, strict=True)}

    def _follow(self, *, last: bool) -> None:
        assert self._link is not None
        with suppress(WorkerLost):
            while True:
                batch = self._link.next_batch()
                if batch is None:
                    return self._follow_nobody()
                requests = [n.request for n in batch.step.new]
                if last:
                    chosen = tuple((_next_token(r, list(r.output_so_far)),) for r in requests)
                    self._link.send_sampled(Sampled(batch.step.number, tuple(r.request_id for r in requests), chosen))
                else:
                    self._link.send_batch(batch)
        self._link.end(ErrorInfo(WorkerLost.__name__, "the pipeline is broken"))

    def _follow_nobody(self) -> None:
        """Stage 0 has left: become a worker too when that is wanted."""
        waited_s = self._staying.wait(lambda: self._stopping)
        if waited_s is None or self._link is None:
            return
        self._link.leave()
        with self._changed:
            self._link, self._dead = None, None
        self._staying.end(Consolidated(0, 0, 0, round(waited_s, 3), 0.0, build_s=0.001))
        self._loop()

    def _advance(
        self, request: EngineRequest, output: list[int], tokens: Mapping[str, int]
    ) -> Sequence[tuple[str, Event]]:
        name, sampling = request.request_id, request.sampling
        if name in self._aborted:
            return [(name, Finished("abort", self._usage(request, output)))]
        if name not in tokens:
            return []
        token = tokens[name]
        output.append(token)
        logprobs = None if sampling.logprobs is None else Logprobs(-0.5, ((token, -0.5),) * sampling.logprobs)
        hops = self._link.hops() if self._link is not None and len(output) == 1 else ()
        events: list[tuple[str, Event]] = [(name, Token(len(output) - 1, token, logprobs, hops=hops))]
        if token in sampling.stop_token_ids:
            events.append((name, Finished("stop", self._usage(request, output))))
        elif len(output) >= sampling.max_tokens:
            events.append((name, Finished("length", self._usage(request, output))))
        return events

    @staticmethod
    def _usage(request: EngineRequest, output: list[int]) -> Usage:
        return Usage(len(request.prompt_token_ids), len(output))


def _next_token(request: EngineRequest, output: list[int]) -> int:
    seed = 0 if request.sampling.temperature == 0 else request.seed
    text = repr((seed, list(request.prompt_token_ids), output)).encode()
    return int.from_bytes(hashlib.sha256(text).digest()[:4], "little") % VOCAB


def serve(sock: socket.socket) -> NoReturn:
    """Serve the engine to the proxy at the other end, and end this process."""
    os._exit(engine_main.serve(Channel(sock), lambda: ToyEngine))
