"""Heartbeats compare each machine's clock with a real state server's, and ``explain`` uses the differences."""

from __future__ import annotations

import io
import time

import redis
from rich.console import Console

from relay.state.clock import StateClock
from relay.state.records import Records
from relay.state.registry import Registry
from thaw import wire
from thaw.cli.explanation import explain
from thaw.host import Device, HostReport
from thaw.ids import ActionName, GatewayId, HostId
from thaw.tracing.timeline import analyse
from thaw.tracing.trace import Phase, TraceEvent

P = Phase
HOUR_NS = 3_600_000_000_000
CHAT, GROUP, ACTIVATION = ActionName("guest/chat"), "9" * 32, "a" * 32


class Machine:
    """A machine with a boot of its own, another begin of its monotonic clock, and a wall clock ``wrong_s`` ahead."""

    def __init__(self, client: redis.Redis, boot: str, began_ns: int, wrong_s: float) -> None:
        self.boot, self._began_ns, self._wrong_ns = boot, began_ns, round(wrong_s * 1e9)
        self.clock = StateClock(self.now_ns)
        self.registry, self.records = Registry(client, self.clock), Records(client, self.clock)

    def now_ns(self) -> int:
        return time.monotonic_ns() + self._began_ns

    def event(self, name: Phase, host: str = "", stage: int = 0) -> TraceEvent:
        return TraceEvent(name, "", "", stage, host, self.boot, self.now_ns(), time.time_ns() + self._wrong_ns)

    def beat(self, host: str) -> None:
        device = Device("cpu", "cpu", 1, 1)
        report = HostReport(HostId(host), self.boot, "a:1", (device,), 1, 1.0, "none", "process", 0, 0)
        self.registry.report_host(report)


def test_each_kind_of_heartbeat_finds_the_server_s_time(client: redis.Redis) -> None:
    """The server runs on this machine, so its clock is the clock that time.time_ns() reads."""
    here = Machine(client, "b", 5 * HOUR_NS, 0)
    hosts: list[HostReport] = []
    beats = (
        lambda: here.beat("h"),
        lambda: here.registry.gateway_alive(GatewayId("g")),
        lambda: hosts.extend(here.registry.live_hosts()),
    )
    assert here.clock.reading is None
    for beat in beats:
        here.clock = here.registry._clock = StateClock(here.now_ns)
        beat()
        reading = here.clock.reading
        assert reading is not None
        before_ns, wall_ns, after_ns = here.now_ns(), time.time_ns(), here.now_ns()
        known = reading.at(after_ns)
        assert known.low_ns <= wall_ns - before_ns
        assert wall_ns - after_ns <= known.high_ns
    assert [host.host_id for host in hosts] == ["h"]


def test_only_the_trace_of_a_start_says_how_the_clock_stands(client: redis.Redis) -> None:
    here = Machine(client, "b", 0, 0)
    here.records.add_trace(CHAT, GROUP, [here.event(P.COMMAND, "h")])
    assert [e.name for e in here.records.trace(GROUP)] == [P.COMMAND]  # before any heartbeat nothing is known
    here.beat("h")
    here.records.add_trace(CHAT, GROUP, [here.event(P.COMMAND, "h"), here.event(P.READY, "h")])
    here.records.add_trace(CHAT, ACTIVATION, [here.event(P.RECEIVED), here.event(P.DISPATCHED)])
    clock = next(e for e in here.records.trace(GROUP) if e.name is P.CLOCK)
    assert (clock.host, clock.boot_id) == ("h", "b")
    assert [e.name for e in here.records.trace(ACTIVATION)] == [P.RECEIVED, P.DISPATCHED]


def test_a_start_over_machines_whose_clocks_are_wrong_by_seconds_is_drawn_in_its_order(client: redis.Redis) -> None:
    gateway = Machine(client, "boot-g", 0, 0.0)
    first, second = Machine(client, "boot-0", 7 * HOUR_NS, -3.0), Machine(client, "boot-1", 900 * HOUR_NS, +5.0)
    first.beat("host-0")
    second.beat("host-1")
    gateway.registry.gateway_alive(GatewayId("g"))
    events = [gateway.event(P.RECEIVED), gateway.event(P.QUEUED_BEGIN), gateway.event(P.PLANNED_BEGIN)]
    of_first = [first.event(P.COMMAND, "host-0"), first.event(P.FETCH_BEGIN, "host-0")]
    of_second = [second.event(P.COMMAND, "host-1", 1), second.event(P.FETCH_BEGIN, "host-1", 1)]
    time.sleep(0.02)
    of_second += [second.event(P.FETCH_END, "host-1", 1), second.event(P.READY, "host-1", 1)]
    time.sleep(0.01)
    of_first += [first.event(P.FETCH_END, "host-0"), first.event(P.READY, "host-0")]
    events += [gateway.event(P.QUEUED_END), gateway.event(P.PLANNED_END), gateway.event(P.DISPATCHED)]
    of_first += [first.event(P.PREFILL_BEGIN, "host-0"), first.event(P.PREFILL_END, "host-0")]
    events += [gateway.event(P.FIRST_TOKEN), gateway.event(P.FINISHED)]
    first.records.add_trace(CHAT, GROUP, of_first)
    second.records.add_trace(CHAT, GROUP, of_second)
    gateway.records.add_trace(CHAT, ACTIVATION, events)

    found = gateway.records.trace(ACTIVATION, GROUP)
    timeline = analyse(found)
    assert timeline is not None
    assert {c.boot_id for c in timeline.clocks} == {"boot-0", "boot-1"}
    error_s = max(c.error_ns or HOUR_NS for c in timeline.clocks) / 1e9
    slow, quick = (next(i for i in timeline.intervals if i.phase == "fetch" and i.stage == k) for k in (0, 1))
    prefill = next(i for i in timeline.intervals if i.phase == "prefill")
    assert -error_s <= slow.begin_s <= quick.begin_s + 2 * error_s
    assert quick.end_s + 0.01 <= slow.end_s + 2 * error_s
    assert slow.end_s <= prefill.begin_s < prefill.end_s <= timeline.end_s
    assert all(gap.seconds >= 0 and gap.begin_s >= 0 for gap in timeline.gaps)

    screen = io.StringIO()
    explain.show(Console(file=screen, width=120), {"events": [wire.to_plain(e) for e in found]}, ACTIVATION)
    clocks = [line for line in screen.getvalue().splitlines() if line.startswith("clocks: ")]
    assert [line.split(" is ")[0] for line in clocks] == ["clocks: host-0", "clocks: host-1"]
    for line, ahead_s, side in zip(clocks, (-3.0, 5.0), ("behind", "ahead of"), strict=True):
        assert f"{side} the gateway, ± " in line
        told_s = float(line.split(" is ")[1].split(" ms ")[0].replace(",", "")) / 1e3
        assert abs(told_s - abs(ahead_s)) < 0.5  # an event's two clocks are read one after the other
