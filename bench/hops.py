"""What does a message between two stages cost, compared with bare sockets and a bare Redis in the same run?

Two processes send one message there and back; half of the round trip is the one-way time.  ``raw_redis`` is a hiredis
parser on a bare socket: RPUSH and BLPOP of the same bytes, without a frame or a checksum, and the sender keeps no copy.
``raw_stream`` is the same with XADD and XREAD, and ``raw_tcp`` is two blocking sockets.  Throughput is measured in one
direction, with messages back to back.  The goals compare medians of rounds that alternate.

Then real pipelines are measured: the time per token with 1, 2 and 4 stages on each transport (_pipelines.py), and while
a fetch fills the link over which the stages communicate (_busy_link.py).
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from bench import _busy_link, _common, _model, _pipelines, _relay_ends, _shared_cores
from bench._common import Goal, interleave, judge, median, percentile, say
from bench._pipelines import Pipelines
from bench._platform import BenchPlatform
from bench._relay_ends import Sample
from thaw.cli.model_stores.demo_model import cache_dir
from thaw.dev import links
from thaw.dev.smollm2 import obtain

_KIB, _MIB = 1024, 1024 * 1024
_SIZES = (8 * _KIB, 128 * _KIB, _MIB, 8 * _MIB, 64 * _MIB)
_FAST = ("raw_redis", "raw_stream", "redis", "raw_tcp", "tcp")


def main() -> int:
    options = _common.options(__doc__ or "", only=("", "latency, throughput, tpot or busy"))
    wanted = {options.only} if options.only else {"latency", "throughput", "tpot", "busy"}
    rounds = options.n or (5 if options.quick else 9)
    goals: list[Goal] = []
    facts: dict[str, Any] = {}
    with _place() as work:
        if wanted & {"latency", "throughput"}:
            with _relay_ends.Servers(work, s3=not options.quick) as servers:
                if "latency" in wanted:
                    facts["one_way_us_8k"], goals = at_8k(servers, rounds, 400 if options.quick else 1500)
                if "throughput" in wanted:
                    facts["sizes"] = sizes(servers, quick=options.quick)
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[0]})  # children inherit this; the last core is left to the engines alone
        if wanted & {"tpot", "busy"}:
            _model.write_index(Path(shutil.copytree(obtain(cache_dir(), say), work / "models" / "smollm2")))
        if "tpot" in wanted:
            goals.append(tpot(work, cores[-1], rounds, facts, quick=options.quick))
        if "busy" in wanted:
            goals.append(busy(work, cores[-1], min(rounds, 3 if options.quick else 7), facts))
    return _common.report("hops", goals, rounds=rounds, **facts)


@contextlib.contextmanager
def _place() -> Iterator[Path]:
    work = Path(tempfile.mkdtemp(prefix="bench-relay-", dir="/dev/shm"))
    (work / "empty").mkdir()
    try:
        yield work
    finally:
        _shared_cores.sweep()
        shutil.rmtree(work)


def at_8k(servers: _relay_ends.Servers, rounds: int, n_messages: int) -> tuple[dict[str, Any], list[Goal]]:
    payload = os.urandom(8 * _KIB)
    found = interleave({name: partial(servers.ping_pong, name, payload, n_messages) for name in _FAST}, rounds)
    p50 = {name: [percentile(s.one_way_us, 50) for s in samples] for name, samples in found.items()}
    latency = {
        name: {
            "p50": round(median(p50[name]), 1),
            "p99": round(median([percentile(s.one_way_us, 99) for s in samples]), 1),
        }
        for name, samples in found.items()
    }
    return latency, [
        _against("redis_vs_raw_8k", p50["redis"], p50["raw_redis"], 1.2),
        _against("tcp_vs_raw_8k", p50["tcp"], p50["raw_tcp"], 1.5),
    ]


def _against(name: str, ours: list[float], raw: list[float], goal: float) -> Goal:
    ratios = [a / b for a, b in zip(ours, raw, strict=True)]
    floor = (
        f"{median(ours):.0f} against {median(raw):.0f} µs; the ratio round by round {min(ratios):.2f}-{max(ratios):.2f}"
    )
    return judge(name, median(ours) / median(raw), "<=", goal, floor=floor)


def sizes(servers: _relay_ends.Servers, *, quick: bool) -> dict[str, dict[str, Any]]:
    """The one-way p50 in ms and the throughput in MB/s of every transport at every size, in one round."""
    table: dict[str, dict[str, Any]] = {}
    for n_bytes in _SIZES[: 4 if quick else 5]:
        payload = os.urandom(n_bytes)
        for name in (*_FAST, *servers.stores):
            slow = name in servers.stores
            n_messages = max(3, min(20 if slow else 200, (16 if quick or slow else 128) * _MIB // n_bytes))
            latency: Sample = servers.ping_pong(name, payload, n_messages)
            rate = servers.one_way(name, payload, n_messages)
            row = {
                "p50_ms": round(percentile(latency.one_way_us, 50) / 1000, 3),
                "p99_ms": round(percentile(latency.one_way_us, 99) / 1000, 3),
                "mb_s": round(rate.mb_s, 1),
            }
            table.setdefault(f"{n_bytes // _KIB}KiB", {})[name] = row
            say(f"{n_bytes // _KIB:6} KiB  {name:10}  {row}")
    return table


def tpot(work: Path, engine_core: int, rounds: int, facts: dict[str, Any], *, quick: bool) -> Goal:
    """TPOT of 1, 2 and 4 stages on one core.

    The goal subtracts the time that the relay itself needs for the four messages of a token.
    """
    uri = f"file://{work / 'models' / 'smollm2'}"
    found: dict[str, list[float]] = {}
    paths: dict[str, str] = {}
    runs: dict[bool, tuple[str, ...]] = {False: ("redis",)} if quick else {False: ("redis", "object"), True: ("tcp",)}
    for direct, transports in runs.items():
        with BenchPlatform(
            work / f"state-{transports[0]}",
            hosts=4,
            memory_mb=_pipelines.DEVICE_MB,
            pool_mb=768,
            store=work / "empty",
            direct=direct,
        ) as platform:
            pipelines = Pipelines(platform, uri, engine_core)
            part = _pipelines.table(pipelines, transports, (4,) if quick else (4, 2), rounds)
        paths |= {name: path for name, path in pipelines.paths.items() if path}
        for name, values in part.items():
            found.setdefault(name, []).extend(values)
    payload = os.urandom(_pipelines.decode_bytes(work / "models" / "smollm2"))
    (work / "one-core").mkdir()
    with _relay_ends.Servers(work / "one-core", s3=False) as servers:
        one_way_ms = (
            median([percentile(servers.ping_pong("redis", payload, 400).one_way_us, 50) for _ in range(5)]) / 1e3
        )
    four, one = median(found["s=4 redis"]), median(found[_pipelines.beside("s=4 redis")])
    facts["path"] = paths
    facts["tpot_ms"] = {name: round(median(values), 2) for name, values in found.items()}
    facts["one_way_ms_on_one_core"] = round(one_way_ms, 4)
    return judge(
        "tpot_s4_redis_vs_s1",
        (four - 4 * one_way_ms) / one,
        "<=",
        1.3,
        floor=f"{four:.2f} ms less 4 x {one_way_ms:.3f} ms, against {one:.2f} ms",
    )


def busy(work: Path, engine_core: int, rounds: int, facts: dict[str, Any]) -> Goal:
    if reason := links.available():
        return judge("tpot_under_fetch", None, "<=", 1.15, floor=reason)
    found = _busy_link.measure(work, engine_core, rounds)
    idle, under = median(found.idle), median(found.busy)
    facts["busy_link"] = {
        "idle_ms": round(idle, 2),
        "busy_ms": round(under, 2),
        "ranks": found.ranks,
        "path": found.path,
        "filled": [round(f, 3) for f in found.filled],
    }
    return judge(
        "tpot_under_fetch", under / idle, "<=", 1.15, floor=f"{under:.2f} against {idle:.2f} ms", rounds=rounds
    )


if __name__ == "__main__":
    sys.exit(main())
