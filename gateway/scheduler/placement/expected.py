"""A prediction as terms: the times of the worker that is expected to be ready last, with its waits, and the later
terms.

The numbers are those of the cost model (``predict.py``), which placement has used; nothing is worked out anew here.
"""

from __future__ import annotations

from collections.abc import Sequence

from gateway.scheduler.placement.predict import Tier
from gateway.scheduler.placement.reasons import Estimate
from gateway.scheduler.placement.schemes import Request, Scheme, Server
from thaw.tracing.bound import Part, Source, Term

Chosen = tuple[Server, frozenset[str], Estimate]
"""A server of the scheme, which of its times some start has shown, and the estimate for it, which has a start."""


def predicted_terms(
    scheme: Scheme, request: Request, chosen: Sequence[Chosen], bound_s: float | None
) -> tuple[Term, ...]:
    """Return the terms.  Some of them overlap, as the cost model says (``predict.worker_start``)."""
    waited = Term(Part.WAITED, request.t_w, Source.CLOCK)
    after = max(chosen, key=lambda c: c[2].start.ready_s if c[2].start else 0.0, default=None)
    if after is None:
        return (waited,)
    server, shown, estimate = after
    stage = _stage(scheme, server)
    times, start = server.times or request.times, estimate.start
    assert start is not None  # noqa: S101  the caller leaves out those without one

    def of(part: Part, seconds: float, name: str) -> Term:
        return Term(part, seconds, Source.TYPICAL if name in shown else Source.DEFAULT, stage)

    tail_s = max(0.0, scheme.ttft - request.t_w - start.ready_s - scheme.work_s)
    found = [
        waited,
        Term(Part.CELL, estimate.cell_wait_s, Source.HOST, stage),
        of(Part.CONTAINER, times.t_cc, "t_cc"),
        of(Part.CONTEXT, times.t_cu, "t_cu"),
        of(Part.LIBRARIES, times.t_l, "t_l"),
        Term(Part.PROMISED, estimate.queue_s, Source.HOST, stage),
        Term(
            Part.BYTES,
            start.fetched_s - estimate.queue_s,
            _bytes_from(estimate.tier),
            stage,
            n_bytes=int(request.part(scheme.s)),
        ),
        of(Part.COPY, start.copied_s - max(estimate.queue_s, start.runtime_s - times.t_l), "copy"),
        of(Part.TAIL, tail_s, "t_tail"),
        of(Part.PREFILL, scheme.work_s, "t_p"),
    ]
    if bound_s is not None and request.t_w + bound_s > scheme.ttft:
        found.append(Term(Part.BOUND, bound_s, Source.BEST, stage))
    return tuple(found)


def _bytes_from(tier: Tier) -> Source:
    return {Tier.RESIDENT: Source.RESIDENT, Tier.MEMORY: Source.TYPICAL}.get(tier, Source.HOST)


def _stage(scheme: Scheme, server: Server) -> int:
    """The first of the stages that the server has."""
    return [p.server for p in (*scheme.full, *scheme.low)].index(server.id)
