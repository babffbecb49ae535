"""What does a message between two stages cost, against bare sockets and a bare Redis in the same run?

Two processes, one message in flight, there and back; half of the round trip is the one-way time.  ``raw_redis`` is a
hiredis parser on a bare socket: RPUSH and BLPOP of the same bytes, no frame, no checksum, nothing kept; ``raw_stream``
the same with XADD and XREAD, ``raw_tcp`` two blocking sockets.  Throughput is one way, messages back to back.  The
goals compare medians of rounds that alternate.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # bench/relay.py must not hide relay

from bench import _common, _relay_ends
from bench._common import Goal, interleave, judge, median, percentile, say
from bench._relay_ends import Sample

_KIB, _MIB = 1024, 1024 * 1024
_SIZES = (8 * _KIB, 128 * _KIB, _MIB, 8 * _MIB, 64 * _MIB)
_FAST = ("raw_redis", "raw_stream", "redis", "raw_tcp", "tcp")


def main() -> int:
    options = _common.options(__doc__ or "", only=("", "latency or throughput"))
    rounds = options.n or (5 if options.quick else 9)
    work = Path(tempfile.mkdtemp(prefix="bench-relay-"))
    try:
        with _relay_ends.Servers(work, s3=not options.quick) as servers:
            latency, goals = at_8k(servers, rounds, 400 if options.quick else 1500)
            table = {} if options.only == "latency" else sizes(servers, quick=options.quick)
    finally:
        shutil.rmtree(work)
    # tpot_s4_redis_vs_s1 and tpot_under_fetch: measured on pipelines, add their Goals to this list
    return _common.report("relay", goals, rounds=rounds, one_way_us_8k=latency, sizes=table)


def at_8k(servers: _relay_ends.Servers, rounds: int, n_messages: int) -> tuple[dict[str, Any], list[Goal]]:
    payload = os.urandom(8 * _KIB)
    found = interleave({name: partial(servers.ping_pong, name, payload, n_messages) for name in _FAST}, rounds)
    p50 = {name: [percentile(s.one_way_us, 50) for s in samples] for name, samples in found.items()}
    latency = {name: {"p50": round(median(p50[name]), 1),
                      "p99": round(median([percentile(s.one_way_us, 99) for s in samples]), 1)}
               for name, samples in found.items()}  # fmt: skip
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
    """One-way p50 in ms and throughput in MB/s of every transport at every size; one round."""
    table: dict[str, dict[str, Any]] = {}
    for n_bytes in _SIZES[: 4 if quick else 5]:
        payload = os.urandom(n_bytes)
        for name in (*_FAST, *servers.stores):
            slow = name in servers.stores
            n_messages = max(3, min(20 if slow else 200, (16 if quick or slow else 128) * _MIB // n_bytes))
            latency: Sample = servers.ping_pong(name, payload, n_messages)
            rate = servers.one_way(name, payload, n_messages)
            row = {"p50_ms": round(percentile(latency.one_way_us, 50) / 1000, 3),
                   "p99_ms": round(percentile(latency.one_way_us, 99) / 1000, 3),
                   "mb_s": round(rate.mb_s, 1)}  # fmt: skip
            table.setdefault(f"{n_bytes // _KIB}KiB", {})[name] = row
            say(f"{n_bytes // _KIB:6} KiB  {name:10}  {row}")
    return table


if __name__ == "__main__":
    say(f"one message in flight: {', '.join(_FAST)}")
    sys.exit(main())
