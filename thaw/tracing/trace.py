"""Where every millisecond of a start went.

A phase is a begin/end pair of events, written by the process that does the work (``fetch`` by fetchd, ``libraries`` in
the container).  An instant is a single event.  An activation's own events are stored under its id, and the events of
the start that served it are stored under its group's id; ``explain`` combines both.

Monotonic times of different boots are never subtracted directly: tracing/clocks.py estimates how far the clocks are
apart, and how exact the estimate is.
"""

from __future__ import annotations

import enum
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from thaw.clock import boot_id


class Phase(enum.StrEnum):
    """The closed set of event names.  ``_BEGIN``/``_END`` pairs are intervals; the others are instants."""

    RECEIVED = "received"  # gateway: the request's last byte was read
    QUEUED_BEGIN = "queued.begin"  # gateway: there is no route, so the action's queue holds the request
    QUEUED_END = "queued.end"
    PLANNED_BEGIN = "planned.begin"  # scheduler: demand seen → plan written
    PLANNED_END = "planned.end"
    DISPATCHED = "dispatched"  # gateway: sent to an instance
    COMMAND = "command"  # invoker: the start command arrived
    FETCH_BEGIN = "fetch.begin"  # fetchd: the fetch was requested
    FETCH_FIRST_BYTE = "fetch.first_byte"
    FETCH_END = "fetch.end"  # the last byte has arrived and its checksum is right
    CONTAINER_BEGIN = "container.begin"  # invoker: creates (or takes) a container → the container's socket answers
    CONTAINER_END = "container.end"
    LIBRARIES_BEGIN = "libraries.begin"  # container: heavy imports (absent for a stem cell)
    LIBRARIES_END = "libraries.end"
    CONTEXT_BEGIN = "context.begin"  # device context
    CONTEXT_END = "context.end"
    MODEL_BEGIN = "model.begin"  # empty modules are built
    MODEL_END = "model.end"
    LOAD_BEGIN = "load.begin"  # the engine takes tensors from the segment as they arrive
    LOAD_END = "load.end"
    KV_BEGIN = "kv.begin"
    KV_END = "kv.end"
    ENGINE_BEGIN = "engine.begin"  # weights complete → the engine accepts requests
    ENGINE_END = "engine.end"
    INIT_BEGIN = "init.begin"  # the whole /init call of the proxy (for ordinary functions: user code)
    INIT_END = "init.end"
    STOPPED_BEGIN = "stopped.begin"  # a process of the start did not run, though it had something to do (SIGSTOP)
    STOPPED_END = "stopped.end"
    CONSOLIDATE_BEGIN = "consolidate.begin"  # a stage: asked to become a worker, behind the traffic → it is one
    CONSOLIDATE_END = "consolidate.end"  # attributes: rounds, tail_bytes, whole_s, stall_s, build_s; or the error
    READY = "ready"  # invoker: the instance is published
    TOKENIZER_BEGIN = "tokenizer.begin"
    TOKENIZER_END = "tokenizer.end"
    RUN_BEGIN = "run.begin"
    RUN_END = "run.end"
    PREFILL_BEGIN = "prefill.begin"  # engine: submitted → first token
    PREFILL_END = "prefill.end"
    FIRST_TOKEN = "first_token"  # noqa: S105  gateway: first token handed to the client's socket
    MOVE_BEGIN = "move.begin"  # gateway: the worker of a running request leaves; another one is asked for
    MOVE_END = "move.end"  # attributes: to, rounds, tokens (recomputed in rounds_s), pause_s; or why it stayed
    FINISHED = "finished"
    CLOCK = "clock"  # the offset of this boot's clock to the state server's clock (thaw/tracing/clocks.py)


@dataclass(frozen=True, slots=True)
class TraceEvent:
    """One event.  ``n_bytes`` and ``attrs`` (rates, CPU seconds, the name of an awaited phase) explain long leaves."""

    name: Phase
    activation_id: str = ""
    group_id: str = ""
    stage: int = 0
    host: str = ""
    boot_id: str = ""
    mono_ns: int = 0
    wall_ns: int = 0
    n_bytes: int | None = None
    attrs: Mapping[str, object] = field(default_factory=dict)


_BOOT_ID = boot_id()


def event(
    name: Phase,
    *,
    activation_id: str = "",
    group_id: str = "",
    stage: int = 0,
    host: str = "",
    n_bytes: int | None = None,
    attrs: Mapping[str, object] | None = None,
) -> TraceEvent:
    """An event that happens now on this machine."""
    return TraceEvent(
        name,
        activation_id,
        group_id,
        stage,
        host,
        _BOOT_ID,
        time.monotonic_ns(),
        time.time_ns(),
        n_bytes,
        attrs or {},
    )
