"""The costs of a tied embedding and of a pipeline with the small real model: docs/decisions/0007, docs/pipeline.md.

``python tests/thaw_runtime/pipeline_costs.py bytes`` prints the bytes of every stage with the tied embedding at both
ends, and with the head computed in stage 0.  ``… head`` prints the CPU time of the head and of greedy sampling.
``… steps RELAY_URL`` prints the CPU time of a decode step in pipelines of 1, 2 and 4 stages.  ``… parts RELAY_URL``
prints the parts of such a step, in one worker and in three of four stages.  ``… hop RELAY_URL`` prints the time of the
last stage's answer to stage 0, as token ids and as the hidden states that a head in stage 0 would need.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from tests.thaw_runtime.fake_descriptor_socket import model_parts
from tests.thaw_runtime.models import real_model
from thaw import partition
from thaw.model import ModelParts

MIB = 1 << 20
N_TOKENS = 96


def stage_bytes(parts: ModelParts, n_stages: int) -> list[int]:
    return [partition.size(partition.ranges(parts, layers)) for layers in partition.split(parts, n_stages)]


def print_bytes() -> None:
    both = model_parts(real_model())
    once = ModelParts(both.entry, both.layers, both.exit)
    whole = partition.size(partition.ranges(both, (0, len(both.layers))))
    print(f"whole {whole / MIB:.1f} MiB, embedding {partition.size(both.tied) / MIB:.1f} MiB")
    print(
        "stages | both ends: MiB of each, whole/largest, layers | head in stage 0: MiB of each, whole/largest, layers"
    )
    for n_stages in range(1, 9):
        cells = []
        for parts in (both, once):
            sizes = [f"{n / MIB:.0f}" for n in stage_bytes(parts, n_stages)]
            layers = [str(b - a) for a, b in partition.split(parts, n_stages)]
            cells.append(f"{' '.join(sizes)}, {whole / max(stage_bytes(parts, n_stages)):.2f}, {' '.join(layers)}")
        print(f"{n_stages} | {cells[0]} | {cells[1]}")


def cpu_ms(run: Callable[[], Any], times: int = 50) -> float:
    """The median CPU time of this process for one call of ``run``."""
    found = []
    for _ in range(times):
        began = time.process_time()
        run()
        found.append((time.process_time() - began) * 1000)
    return statistics.median(found)


def print_head() -> None:
    from tests.thaw_runtime.pipeline_probe import Stage, inits
    from thaw_runtime.engine.vllm import env as engine_env

    engine_env.prepare(1)
    import torch

    for dtype in ("bfloat16", "float32"):
        with tempfile.TemporaryDirectory() as scratch:
            pid = os.fork()
            if pid == 0:
                (init,) = inits(real_model(), 1, "", reserve=2 << 30, dtype=dtype)
                engine: Any = Stage(real_model(), init, Path(scratch)).engine
                runner = engine._core.model_executor.runner
                for batch in (1, 8):
                    hidden = torch.randn(batch, 576, dtype=runner.dtype)
                    with torch.inference_mode():
                        logits = runner.model.compute_logits(hidden)
                        head = cpu_ms(lambda: runner.model.compute_logits(hidden))  # noqa: B023
                        argmax = cpu_ms(lambda: logits.float().argmax(-1))  # noqa: B023
                    print(f"{dtype}, batch {batch}: head {head:.2f} ms, argmax {argmax:.2f} ms", flush=True)
                os._exit(0)
            os.waitpid(pid, 0)


def print_steps(url: str) -> None:
    from tests.thaw_runtime.pipeline_probe import Stage, fork, inits, tokens
    from thaw_runtime.engine.protocol import EngineRequest, Sampling
    from thaw_runtime.engine.vllm import env as engine_env

    engine_env.prepare(1)
    from thaw_runtime.engine.vllm.warm import warm_up

    warm_up()
    for n_stages in (1, 2, 4):
        for n_requests in (1, 8):
            with tempfile.TemporaryDirectory() as scratch:
                plans = inits(real_model(), n_stages, url, reserve=2 << 30, dtype="bfloat16")

                def stage(init: Any, scratch: str = scratch, n_requests: int = n_requests) -> None:
                    made = Stage(real_model(), init, Path(scratch))
                    if init.stage == 0:
                        ask = [
                            EngineRequest(f"a{i}", (1, 2, 3 + i), Sampling(N_TOKENS, temperature=0.0), 0)
                            for i in range(n_requests)
                        ]
                        made.ask(ask)
                        began, cpu = time.monotonic(), time.process_time()
                        again = [
                            EngineRequest(f"b{i}", (1, 2, 3 + i), Sampling(N_TOKENS, temperature=0.0), 0)
                            for i in range(n_requests)
                        ]
                        n = sum(len(tokens(e)) for e in made.ask(again))
                        wall, cpu = time.monotonic() - began, time.process_time() - cpu
                        print(
                            f"{init.n_stages} stages, {n_requests} requests: {n / wall:.0f} tokens/s, "
                            f"{wall * 1000 / N_TOKENS:.1f} ms a token of each, "
                            f"stage 0 {cpu * 1000 / N_TOKENS:.1f} CPU-ms a token of each",
                            flush=True,
                        )
                        made.engine.stop()
                    made.engine.join()

                for pid in [fork(lambda init=init: stage(init)) for init in plans]:
                    os.waitpid(pid, 0)


class Parts:
    """The CPU time of the calling thread in named functions, including the functions that they call."""

    def __init__(self) -> None:
        self._spent_s: dict[str, float] = {}

    def watch(self, owner: Any, *names: str) -> None:
        for name in names:
            setattr(owner, name, self._timed(name, getattr(owner, name)))

    def _timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **options: Any) -> Any:
            began = time.thread_time()
            try:
                return function(*args, **options)
            finally:
                self._spent_s[name] = self._spent_s.get(name, 0.0) + time.thread_time() - began

        return timed

    def print(self, title: str, n_steps: int) -> None:
        print(f"{title}, CPU-ms a step")
        for name, spent_s in sorted(self._spent_s.items(), key=lambda item: -item[1]):
            print(f"  {name:42} {spent_s * 1000 / n_steps:.3f}", flush=True)


def print_parts(url: str) -> None:
    from tests.thaw_runtime.pipeline_probe import Stage, fork, inits
    from thaw_runtime.engine.protocol import EngineRequest, Sampling
    from thaw_runtime.engine.vllm import env as engine_env
    from thaw_runtime.pipeline.link import StageLink

    engine_env.prepare(1)
    from thaw_runtime.engine.vllm.warm import warm_up

    warm_up()
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    from thaw_runtime.engine.vllm import executors

    def stage(init: Any, scratch: str, watched: int) -> None:
        parts = Parts()
        made = Stage(real_model(), init, Path(scratch))
        if init.stage == watched:
            parts.watch(
                GPUModelRunner,
                "execute_model",
                "_model_forward",
                "_prepare_inputs",
                "_update_states",
                "_build_attention_metadata",
                "_preprocess",
                "sample_tokens",
            )
            parts.watch(executors, "check_for", "from_host", "batch_of", "scheduler_output_of")
            parts.watch(StageLink, "_take", "send_batch")
        if init.stage == 0:
            made.ask([EngineRequest("a", (1, 2, 3), Sampling(N_TOKENS, temperature=0.0), 0)])
            made.engine.stop()
        made.engine.join()
        if init.stage == watched:
            parts.print(f"stage {init.stage} of {init.n_stages}, layers {init.layers}", N_TOKENS)

    for n_stages, watched in ((1, 0), (4, 0), (4, 1), (4, 3)):
        with tempfile.TemporaryDirectory() as scratch:
            plans = inits(real_model(), n_stages, url, reserve=2 << 30, dtype="bfloat16")
            for pid in [fork(partial(stage, init, scratch, watched)) for init in plans]:
                os.waitpid(pid, 0)


def print_hop(url: str) -> None:
    from relay.protocol.frames import FrameHeader, FrameKind, Priority
    from relay.protocol.messages import GroupCredential, GroupLink
    from relay.transports.connect import connect
    from thaw.ids import GroupId, random_hex_id
    from thaw.plan import TransportKind
    from thaw_runtime.pipeline.wire import Sampled, encode_control

    link, group = GroupLink(TransportKind.REDIS, url, GroupCredential("", "")), GroupId(random_hex_id())
    last, first = connect(link, group, 1, 2), connect(link, group, 0, 2)
    header = FrameHeader(FrameKind.CONTROL, Priority.INFERENCE)
    for batch in (1, 8, 64):
        names = tuple(random_hex_id() for _ in range(batch))
        tokens = encode_control(Sampled(1, names, ((40_000,),) * batch))
        for what, payload in (("token ids", tokens), ("hidden states", bytes(batch * 576 * 2))):
            took = []
            for _ in range(500):
                began = time.perf_counter()
                last.send(0, header, payload, deadline_s=5)
                first.receive(deadline_s=5)
                took.append((time.perf_counter() - began) * 1000)
            print(f"batch {batch}: {what}, {len(payload)} bytes, {statistics.median(took):.3f} ms", flush=True)
    last.close()
    first.close()


if __name__ == "__main__":
    prints = {"bytes": print_bytes, "head": print_head, "steps": print_steps, "parts": print_parts, "hop": print_hop}
    prints[sys.argv[1]](*sys.argv[2:])
