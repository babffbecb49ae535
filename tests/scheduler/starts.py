"""Random starts with their traces, for property tests of bounds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

from gateway.scheduler.view.bound_terms import StageFacts
from thaw.instance import StartMode
from thaw.tracing.start_times import start_took
from thaw.tracing.trace import Phase, TraceEvent

MS = 1_000_000
SIZES = (1_000_000, 80_000_000, 250_000_000)


@dataclass(frozen=True, slots=True)
class Recorded:
    """One start: its trace, the devices of its stages, and the rates that the hosts declared."""

    events: tuple[TraceEvent, ...]
    kinds: tuple[str, ...]
    part_bytes: tuple[int, ...]
    declared: tuple[float | None, ...]
    measured_s: float  # from the plan to the first token

    def facts(self, *, as_it_went: bool) -> list[StageFacts]:
        """The facts of the stages, as they were planned or as they turned out.

        As planned, no host has anything in memory.  With ``as_it_went``, the facts have the bytes that really crossed
        the links.
        """
        found = []
        for stage in start_took(self.events).stages:
            k = stage.stage
            crossed = stage.link_bytes if as_it_went else self.part_bytes[k]
            found.append(
                StageFacts(
                    k,
                    stage.host,
                    self.kinds[k],
                    StartMode(stage.mode),
                    self.part_bytes[k],
                    crossed,
                    stage.within_memory and as_it_went,
                    declared_bytes_per_s=self.declared[k],
                )
            )
        return found


def ms(most: int = 3_000) -> st.SearchStrategy[int]:
    return st.integers(0, most)


@st.composite
def starts(draw: st.DrawFn, hosts: int = 3) -> Recorded:
    """Draw a start.  Every phase takes any time, with any wait between two phases.

    Phases overlap where they do in real starts, and every host has a clock of its own.
    """
    n_stages = draw(st.sampled_from([1, 1, 2, 3]))
    placed = [draw(st.integers(0, hosts - 1)) for _ in range(n_stages)]
    kinds = {host: ("cpu", "cpu", "A10")[host] for host in range(hosts)}
    made = [_stage(draw, k, f"h{host}") for k, host in enumerate(placed)]
    events = [e for stage, _, _ in made for e in stage]
    at = max(ready for _, ready, _ in made) + draw(ms(20))
    token_at = at + draw(ms(400))
    tokens = draw(st.sampled_from([5, 60, 700]))
    events += [
        _event(Phase.PREFILL_BEGIN, at, 0, f"h{placed[0]}", attrs={"prompt_tokens": tokens}),
        _event(Phase.PREFILL_END, token_at, 0, f"h{placed[0]}"),
    ]
    declared = {host: draw(st.sampled_from([None, 25e6, 1e9])) for host in set(placed)}
    return Recorded(
        tuple(events),
        tuple(kinds[h] for h in placed),
        tuple(n for _, _, n in made),
        tuple(declared[h] for h in placed),
        (token_at + draw(ms(10))) / 1000,
    )


def _event(
    name: Phase, at_ms: float, stage: int, host: str, n_bytes: int | None = None, attrs: dict[str, Any] | None = None
) -> TraceEvent:
    boot_ns = 10**12 * (1 + int(host[1:]))
    return TraceEvent(name, "a", "g", stage, host, host, boot_ns + int(at_ms * MS), 0, n_bytes, attrs or {})


def event(
    name: Phase, at_s: float = 0.0, n_bytes: int | None = None, host: str = "h", boot: str = "b", **attrs: Any
) -> TraceEvent:
    """An event of a trace that a test writes by hand."""
    ns = int(at_s * 1e9)
    return TraceEvent(name, "", "g", 0, host, boot, ns, ns, n_bytes, attrs)


def phase(name: str, begin_s: float, end_s: float, n_bytes: int | None = None, **attrs: Any) -> list[TraceEvent]:
    """The two events of a phase.  Its evidence is in the second one."""
    return [event(Phase(f"{name}.begin"), begin_s), event(Phase(f"{name}.end"), end_s, n_bytes, **attrs)]


def _stage(draw: st.DrawFn, k: int, host: str) -> tuple[list[TraceEvent], int, int]:
    """(events, milliseconds from the plan to READY, bytes)."""
    events: list[TraceEvent] = []

    def note(name: Phase, at_ms: float, n_bytes: int | None = None, **attrs: Any) -> None:
        events.append(_event(name, at_ms, k, host, n_bytes, attrs))

    def phase(name: str, begin: int, took: int, **attrs: Any) -> int:
        note(Phase(f"{name}.begin"), begin)
        note(Phase(f"{name}.end"), begin + took, **attrs)
        return begin + took

    n_bytes, mode = draw(st.sampled_from(SIZES)), draw(st.sampled_from(list(StartMode)[:2]))
    begin = draw(ms(20))
    note(Phase.COMMAND, begin)
    fetch_begin, source = begin + draw(ms(10)), draw(st.sampled_from(["link", "link", "memory", "part", "resident"]))
    fetch_s = 0 if source == "resident" else draw(ms())
    container, cell_wait = begin + draw(ms(10)), draw(ms(50))
    up = phase("container", container, cell_wait + draw(ms()), mode=str(mode), stem_cell_wait_s=cell_wait / 1000)
    at = up + draw(ms(5))
    if mode is StartMode.COLD:  # the engine imports while its container is still being made
        at = max(at, phase("libraries", draw(st.integers(container, up)), draw(ms())))
    at = phase("context", up, draw(ms(100))) if draw(st.booleans()) else at
    at = max(at, up)
    for name in ("context", "model", "kv"):
        at = phase(name, at + draw(ms(5)), draw(ms(500)))
    at += draw(ms(5))
    late_ms = draw(ms(3))  # the message that the fetch is complete comes this much after the last byte
    wait = max(0, fetch_begin + fetch_s - late_ms - at)
    rehearsal = draw(ms(50))
    at = phase("load", at, wait + rehearsal + draw(ms(800)), wait_s=wait / 1000, rehearsal_s=rehearsal / 1000)
    at = phase("engine", at, draw(ms(100)))
    ready = at + draw(ms(5))
    note(Phase.READY, ready)
    copied = {"memory": n_bytes, "part": n_bytes // 3}.get(source, 0)
    crossed = {} if source == "resident" else {"fetched_bytes": n_bytes - copied, "copied_bytes": copied}
    note(Phase.FETCH_BEGIN, fetch_begin)
    note(Phase.FETCH_END, fetch_begin + fetch_s, n_bytes, resident=source == "resident", **crossed)
    return events, ready, n_bytes
