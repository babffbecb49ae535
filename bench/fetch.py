"""How fast does fetchd bring a model into shared memory, compared with the wire and with other clients?

One static origin serves a random model from shared memory.  fetchd is the real daemon with every check on: index,
version, BLAKE3 of each chunk.  The ceiling is a C++ receiver with as many connections, which makes no checks and writes
into memory that is already mapped.  Shaped links are network namespaces (they need root).  Their rate is measured with
iperf3 in the direction of a fetch.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from bench import _clients, _common, _model
from bench._common import Goal, interleave, judge, median, say
from bench._fetchd import Fetchd
from bench._origin import Origin
from bench._sample import Sample, cpu_s_per_gb, gb_s
from fetchd.chunks import digest
from thaw.dev import links
from thaw.model import CHUNK_BYTES, ModelIndex

_CONNECTIONS = 4
_MIB = 1024 * 1024


def main() -> int:
    options = _common.options(__doc__ or "", mb=(0, "size of the model"), only=("", "unlimited, 1g or 5g"))
    n_bytes = (options.mb or (256 if options.quick else 1000)) * 1_000_000
    rounds = options.n or (3 if options.quick else 7)
    work = Path(tempfile.mkdtemp(prefix="bench-", dir="/dev/shm"))
    try:
        index = _model.write_random(work / "models" / "random", n_bytes)
        receiver = build_receiver(work)
        bench = FetchBench(work, receiver, index, rounds)
        goals = [] if options.only in ("1g", "5g") else bench.unlimited()
        goals += [] if options.only in ("unlimited", "5g") else [bench.shaped("vs_iperf_1g", 1000, 0.98)]
        goals += [] if options.only in ("unlimited", "1g") else [bench.shaped("vs_iperf_5g", 5000, 0.95)]
    finally:
        shutil.rmtree(work)
    return _common.report(
        "fetch",
        goals,
        n_bytes=index.n_bytes,
        rounds=rounds,
        origin=bench.origin_kind,
        connections=_CONNECTIONS,
        rates=bench.rates,
    )


class FetchBench:
    def __init__(self, work: Path, receiver: Path, index: ModelIndex, rounds: int) -> None:
        self.work, self.receiver, self.index, self.rounds = work, receiver, index, rounds
        self.weights = next(f for f in index.files if f.name.endswith(".safetensors"))
        self.pool_mb = 2 * (index.n_bytes // _MIB // 64 + 2) * 64  # slabs of one fetch are zeroed during the next one
        self.origin_kind = ""
        self.rates: dict[str, dict[str, float]] = {}

    def unlimited(self) -> list[Goal]:
        with Origin(self.work, self.work) as origin, Fetchd(self.work, self.pool_mb) as fetchd:
            self.origin_kind = origin.kind
            found = interleave(self._everybody(origin, fetchd), self.rounds)
        self.rates["unlimited"] = {name: round(gb_s(s), 3) for name, s in found.items()}
        self.rates["unlimited_cpu_s_per_gb"] = {name: round(cpu_s_per_gb(s), 3) for name, s in found.items()}
        ours, ceiling = found["fetchd"], found["receiver"]
        floor = f"{_floor(ours, ceiling)}, of ours {blake3_cpu_s_per_gb():.2f} for BLAKE3 alone"
        return [
            judge("vs_receiver", gb_s(ours) / gb_s(ceiling), ">=", 0.85, floor=floor),
            judge("cpu_vs_receiver", cpu_s_per_gb(ours) / cpu_s_per_gb(ceiling), "<=", 1.6, floor=floor),
            *(_against(name, found, goal) for name, goal in _COMPETITORS.items()),
        ]

    def shaped(self, name: str, rate_mbit: int, goal: float) -> Goal:
        reason = links.available() or ("" if shutil.which("iperf3") else "iperf3 is missing (apt install iperf3)")
        if reason:
            return judge(name, None, ">=", goal, floor=reason)
        prefix = f"thaw-bench-{os.getpid() % 10000}"
        made = links.create(prefix, 1, rate_mbit)
        try:
            return self._on(made, name, goal)
        finally:
            links.destroy(prefix)

    def _everybody(self, origin: Origin, fetchd: Fetchd) -> dict[str, Callable[[], Sample]]:
        key, n_bytes = f"random/{self.weights.name}", self.weights.n_bytes
        made = self.work / "made"
        url = f"{origin.url}/models/{key}"
        facts = fetchd.inspect(f"{origin.url}/models/random")
        return {
            "fetchd": partial(fetchd.fetch, facts, _model.whole(self.index)),
            "receiver": partial(self._receive, origin),
            **{
                name: partial(_clients.run_python, name, origin.url, "models", key, n_bytes)
                for name in ("obstore", "boto3")
                if importlib.util.find_spec(name)
            },
            **(
                {"curl": partial(_clients.run_program, ["curl", "-sSf", "-o", str(made), url], made, n_bytes)}
                if shutil.which("curl")
                else {}
            ),
            **(
                {
                    "s5cmd": partial(
                        _clients.run_program,
                        [
                            s5cmd,
                            "--no-sign-request",
                            "--endpoint-url",
                            origin.url,
                            "cp",
                            f"s3://models/{key}",
                            str(made),
                        ],
                        made,
                        n_bytes,
                    )
                }
                if (s5cmd := _s5cmd())
                else {}
            ),
        }

    def _on(self, made: links.Links, name: str, goal: float) -> Goal:
        origin = Origin(self.work, self.work, address=made.hub_address, namespace=made.hub)
        host = made.host(0)
        with (
            origin,
            Fetchd(self.work, self.pool_mb, connections=8 if made.rate_mbit > 1000 else 4, namespace=host) as fetchd,
        ):
            server = _common.start(
                links.inside(made.hub, ("iperf3", "-s", "--forceflush")), self.work / "iperf.log", "Server listening"
            )
            facts = fetchd.inspect(f"{origin.url}/models/random")
            try:
                found = interleave(
                    {
                        "iperf3": partial(_iperf, made, self.index.n_bytes),
                        "fetchd": partial(fetchd.fetch, facts, _model.whole(self.index)),
                        "receiver": partial(self._receive, origin, host),
                    },
                    self.rounds,
                )
            finally:
                server.stop()
        self.rates[f"{made.rate_mbit}mbit"] = {n: round(gb_s(s), 4) for n, s in found.items()}
        ratio = median([a.gb_s / b.gb_s for a, b in zip(found["fetchd"], found["iperf3"], strict=True)])
        reachable = round(gb_s(found["receiver"]) / gb_s(found["iperf3"]), 3)
        return judge(
            name,
            ratio,
            ">=",
            goal,
            floor=_floor(found["fetchd"], found["iperf3"]),
            samples={"receiver_vs_iperf": reachable},
        )

    def _receive(self, origin: Origin, namespace: str = "") -> Sample:
        n_bytes = self.weights.n_bytes
        command = [
            str(self.receiver),
            origin.address,
            str(origin.port),
            f"/models/random/{self.weights.name}",
            str(n_bytes),
            str(_CONNECTIONS),
        ]
        plain = json.loads(_output([*links.inside(namespace, tuple(command))] if namespace else command))
        return Sample(plain["seconds"], plain["cpu_s"], n_bytes)


_COMPETITORS = {"obstore": 1.7, "curl": 3.0, "s5cmd": 4.0, "boto3": 5.0}


def _against(name: str, found: dict[str, list[Sample]], goal: float) -> Goal:
    if name not in found:
        return judge(f"vs_{name}", None, ">=", goal, floor=f"{name} is not installed (make setup-bench)")
    ratio = gb_s(found["fetchd"]) / gb_s(found[name])
    most = gb_s(found["receiver"]) / gb_s(found[name])
    floor = f"{_floor(found['fetchd'], found[name])}; the C++ receiver without checks is {most:.2f} times as fast"
    return judge(f"vs_{name}", ratio, ">=", goal, floor=floor)


def _floor(ours: list[Sample], theirs: list[Sample]) -> str:
    return (
        f"{gb_s(ours):.3f} against {gb_s(theirs):.3f} GB/s, "
        f"{cpu_s_per_gb(ours):.2f} against {cpu_s_per_gb(theirs):.2f} CPU-s/GB"
    )


def blake3_cpu_s_per_gb() -> float:
    """The CPU time of the digests that fetchd computes, over chunks that no cache holds any more."""
    data = memoryview(bytearray(64 * CHUNK_BYTES))
    began_s = time.thread_time()
    for at in range(0, len(data), CHUNK_BYTES):
        digest([data[at : at + CHUNK_BYTES]])
    return (time.thread_time() - began_s) * 1e9 / len(data)


def _iperf(made: links.Links, n_bytes: int) -> Sample:
    """Transfer as many bytes as the model has, in the direction of a fetch, over one stream."""
    command = ("iperf3", "-c", made.hub_address, "-R", "-n", str(n_bytes), "-J")
    end = json.loads(_output([*links.inside(made.host(0), command)]))["end"]
    received = end["sum_received"]
    return Sample(8 * received["bytes"] / received["bits_per_second"], 0.0, received["bytes"])


def build_receiver(work: Path) -> Path:
    if shutil.which("g++") is None:
        raise SystemExit("g++ is missing: apt install g++")
    binary = work / "receiver"
    source = Path(__file__).with_name("_receiver.cpp")
    subprocess.run(["g++", "-O2", "-std=c++17", "-pthread", str(source), "-o", str(binary)], check=True)
    return binary


def _s5cmd() -> str | None:
    return shutil.which("s5cmd", path=f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}")


def _output(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(command)}: {done.stderr or done.stdout}"[:500])
    return done.stdout


if __name__ == "__main__":
    say(f"rounds of: fetchd, C++ receiver, {', '.join(_COMPETITORS)}")
    sys.exit(main())
