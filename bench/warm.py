"""Is a warm request as fast as with plain vLLM, and how much time does the gateway add to it?

In both systems the engine's process is pinned to one core and computes with one thread; everything else, the client
included, runs on the other core.  While one system is measured, every process of the other is stopped (SIGSTOP), so
that an idle system does not slow the measured one down.  Throughput is measured with streamed greedy answers of one
fixed length, 1, 8 and 32 at once.  The added time is measured with pairs of the same request, one through the gateway
and one directly to the container's socket, one at a time.  Finally the benchmark counts how often the engine of each
system wakes while there are no requests and the other system is stopped.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import struct
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from bench import _common, _model
from bench._common import Goal, figure, interleave, judge, median, percentile, say
from bench._platform import BenchPlatform, llm_config
from bench._processes import busiest, pin, tree, wake_ups
from bench._sse import Caller
from bench._vllm import VllmServer
from relay.clients.http_unix import UnixConnection
from relay.protocol.messages import LlmRun
from thaw import wire
from thaw.cli.model_stores.demo_model import cache_dir
from thaw.clock import wall_ms
from thaw.dev.smollm2 import obtain

_CONCURRENCY = (1, 8, 32)
_TOKENS = 64
_STORY = "Write a short story about a traveller who carries {} lanterns through a valley at night."
_PROMPTS = [_STORY.format(n) for n in range(97)]
_SLOTS = 32
_PING = "Say hello."
_IDLE_S = 5.0


class Warm:
    def __init__(self, work: Path, platform: BenchPlatform, server: VllmServer, engine_core: int) -> None:
        self.work, self.platform, self.server = work, platform, server
        auth_caller = platform.caller("chat")
        self.urls = {"thaw": lambda: platform.caller("chat"), "vllm": lambda: Caller(server.url, "chat")}
        auth_caller.chat(_PING, 16)  # the cold start
        Caller(server.url, "chat").chat(_PING, 16)
        self.vllm_pids = [server.pid, *tree(server.pid)]
        self.engine = {
            "thaw": busiest(platform.pids(), lambda: auth_caller.chat(_PROMPTS[0], 64, ignore_eos=True)),
            "vllm": busiest(self.vllm_pids, lambda: Caller(server.url, "chat").chat(_PROMPTS[0], 64, ignore_eos=True)),
        }
        for pid in self.engine.values():
            pin(pid, engine_core)
        auth_caller.close()
        self._prompt = 0

    @contextlib.contextmanager
    def turn(self, system: str) -> Iterator[None]:
        """Stop the other system during the block: vLLM's idle workers spin, and Thaw sends heartbeats.

        Thaw's leases run out while it is stopped.  It takes them again when it continues, and its instances stay.  A
        first request, which does not count, waits for that.
        """
        others = set(self.platform.pids()) if system == "vllm" else set(self.vllm_pids)
        for pid in others:
            os.kill(pid, signal.SIGSTOP)
        try:
            caller = self.urls[system]()
            caller.chat(_PING, 1)
            caller.close()
            yield
        finally:
            for pid in others:
                os.kill(pid, signal.SIGCONT)

    def throughput(self, system: str, at_once: int, per_client: int) -> float:
        """Tokens per second of ``at_once`` clients that each ask ``per_client`` times."""
        first = self._prompt
        self._prompt += at_once * per_client
        tokens: list[int] = []

        def client(number: int) -> None:
            caller = self.urls[system]()
            for i in range(per_client):
                prompt = _PROMPTS[(first + number * per_client + i) % len(_PROMPTS)]
                answer = caller.chat(prompt, _TOKENS, ignore_eos=True)
                tokens.append(answer.completion_tokens)
            caller.close()

        threads = [threading.Thread(target=client, args=(n,)) for n in range(at_once)]
        with self.turn(system):
            began = time.monotonic()
            for t in threads:
                t.start()
            for t in threads:
                t.join()
            seconds = time.monotonic() - began
        if tokens != [_TOKENS] * (at_once * per_client):
            raise SystemExit(f"{system}: answers of {sorted(set(tokens))} tokens, {_TOKENS} were asked for")
        return sum(tokens) / seconds

    def added_ms(self, pairs: int) -> list[float]:
        """The time to the first byte through the gateway, less the time directly from the container, for each pair.

        The order of the two requests alternates.
        """
        gateway, container = self.platform.caller("chat"), self._container()
        gateway.chat(_PING, 1)
        ways: list[Callable[[], float]] = [lambda: gateway.chat(_PING, 1).ttft_s, partial(_direct, container)]
        added = []
        with self.turn("thaw"):
            for i in range(pairs):
                first, second = (0, 1) if i % 2 else (1, 0)
                times = {first: ways[first](), second: ways[second]()}
                added.append((times[0] - times[1]) * 1e3)
        gateway.close()
        container.close()
        return added

    def idle_wake_ups_per_s(self) -> dict[str, float]:
        found = {}
        for system, pid in self.engine.items():
            with self.turn(system):
                before = wake_ups(pid)
                time.sleep(_IDLE_S)
                found[system] = (wake_ups(pid) - before) / _IDLE_S
        return found

    def _container(self) -> UnixConnection:
        sockets = list(Path(self.platform.platform.run_dir).glob("host-0/c/*/s"))
        for path in sockets:
            connection = UnixConnection(str(path), timeout=60)
            connection.request("GET", "/health")
            if json.loads(connection.getresponse().read())["state"] == "ready":
                return connection
            connection.close()
        raise SystemExit(f"no ready container among {sockets}")


def _direct(container: UnixConnection) -> float:
    """Send the request as the invoker would, and return the seconds to the first token."""
    body = {
        "messages": [{"role": "user", "content": _PING}],
        "stream": True,
        "temperature": 0,
        "max_tokens": 1,
        "model": "chat",
        "stream_options": {"include_usage": True},
    }
    value = wire.to_plain(LlmRun("chat", body, 0))
    data = json.dumps(
        {
            "value": value,
            "activation_id": os.urandom(16).hex(),
            "action_name": "/guest/chat",
            "deadline": str(wall_ms() + 60_000),
        }
    ).encode()
    began = time.monotonic()
    container.request("POST", "/run", data, {"Content-Type": "application/json", "Accept": "application/x-thaw-stream"})
    response = container.getresponse()
    (n_bytes,) = struct.unpack("<I", response.read(4))
    frame = json.loads(response.read(n_bytes))
    seconds = time.monotonic() - began
    if frame["t"] != "RunToken":
        raise SystemExit(f"the container answered {frame}")
    response.read()
    return seconds


def main() -> int:
    options = _common.options(__doc__ or "", pairs=(0, "paired requests"))
    rounds = options.n or (1 if options.quick else 7)
    pairs = options.pairs or (100 if options.quick else 600)
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        raise SystemExit("two cores are needed: one for the engine, one for everything else")
    os.sched_setaffinity(0, {cores[0]})  # children inherit it
    work = Path(tempfile.mkdtemp(prefix="bench-", dir="/dev/shm"))
    with contextlib.ExitStack() as stack:
        stack.callback(shutil.rmtree, work, ignore_errors=True)
        model = work / "store" / "smollm2"
        shutil.copytree(obtain(cache_dir(), say), model)
        _model.write_index(model)
        platform = stack.enter_context(BenchPlatform(work / "state", store=work / "store"))
        config = llm_config(f"file://{model}", max_batch=_SLOTS)
        platform.deploy("chat", {**config, "limits": {"concurrency": 2 * _SLOTS}})
        server = stack.enter_context(VllmServer(model, work, threads=1, max_num_seqs=_SLOTS, cores=[cores[0]]))
        bench = Warm(work, platform, server, cores[1])
        added = bench.added_ms(pairs)
        say("added, ms: " + ", ".join(f"p{p} {percentile(added, p):.2f}" for p in (10, 50, 90, 99)))
        runs = {
            f"{system}@{c}": partial(bench.throughput, system, c, 4 if c == 1 else 2 if c == 8 else 1)
            for c in _CONCURRENCY
            for system in ("thaw", "vllm")
        }
        found = interleave(runs, rounds)
        idle = bench.idle_wake_ups_per_s()
        say(f"woken while idle, times a second: {idle}")
    speeds = {name: round(median(values), 2) for name, values in found.items()}
    goals = [
        *_judge(speeds, added),
        figure("idle_wake_ups_per_s", idle["thaw"], rounds=1),
        figure("idle_wake_ups_per_s_vllm", idle["vllm"], rounds=1),
    ]
    return _common.report(
        "warm",
        goals,
        rounds=rounds,
        pairs=pairs,
        tokens_per_s=speeds,
        idle_wake_ups_per_s=idle,
        vllm_command=server.command,
    )


def _judge(speeds: dict[str, float], added: list[float]) -> list[Goal]:
    ratios = {c: round(speeds[f"thaw@{c}"] / speeds[f"vllm@{c}"], 3) for c in _CONCURRENCY}
    worst = min(ratios, key=lambda c: ratios[c])
    floor = f"at {worst} at once: {speeds[f'thaw@{worst}']} against {speeds[f'vllm@{worst}']} tokens/s"
    return [
        judge(
            "throughput_vs_vllm", ratios[worst], ">=", 0.97, floor=floor, samples={str(c): r for c, r in ratios.items()}
        ),
        judge("gateway_added_p50_ms", percentile(added, 50), "<=", 2),
        judge(
            "gateway_added_p99_ms",
            percentile(added, 99),
            "<=",
            10,
            floor=f"p90 {percentile(added, 90):.1f} ms, n = {len(added)}",
        ),
    ]


if __name__ == "__main__":
    sys.exit(main())
