"""pipeline_probe.py's changes to a stage's process before the engine starts: gates, faults and planted errors."""

from __future__ import annotations

import hashlib
import os
import select
import signal
import threading
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

from thaw_runtime.pipeline.link import Patience, StageLink

WAIT_S = 120.0


class FullStage(Protocol):
    """A full worker's stage in this process."""

    engine: Any

    def rest_arrives(self) -> None: ...


def leave_blocks(n: int) -> None:
    """Limit the KV cache to ``n`` blocks: room for one long request, or for half of the requests."""
    from thaw_runtime.engine.vllm import configuration

    plan_stage = configuration.plan_stage

    def scarce(*args: Any) -> Any:
        made = plan_stage(*args)
        return replace(made, kv=made.kv // made.kv_blocks * n, kv_blocks=n, kv_tokens=made.kv_tokens)

    configuration.plan_stage = scarce


def count_resumed() -> list[int]:
    """Count in stage 0 the requests that had lost their blocks and were computed again."""
    from thaw_runtime.engine.vllm import executors

    count, step_of = [0], executors.step_of

    def counting(*args: Any) -> Any:
        step = step_of(*args)
        count[0] += sum(k.resumed for k in step.known)
        return step

    executors.step_of = counting
    return count


def be_impatient() -> None:
    from thaw_runtime.engine.vllm import engine as vllm_engine

    # three engines that were loading on two busy cores were silent for 3 s
    patience = Patience(beat_s=0.2, lost_after_s=10.0)
    vllm_engine.StageLink = partial(StageLink, patience=patience)  # type: ignore[misc, assignment]


def die_in_a_batch() -> None:
    """Kill the process in a batch, without a message, as the kernel does when memory runs out."""
    from thaw_runtime.engine.vllm.executors import StageExecutor

    begun, compute = [0], StageExecutor.compute

    def dying(executor: Any, output: Any, received: Any) -> Any:
        begun[0] += 1
        if begun[0] == 30:
            os.kill(os.getpid(), signal.SIGKILL)
        return compute(executor, output, received)

    StageExecutor.compute = dying  # type: ignore[method-assign]


class Gates:
    """Gates between neighbours: a stage may end batch i once the stage before it has begun batch i + 1."""

    SKIPPED, GUARDED = 40, 16  # batches until the requests are spread over the pipeline, and then guarded batches

    def __init__(self, n_stages: int) -> None:
        self._n_stages = n_stages
        self._pipes = [os.pipe() for _ in range(n_stages)]

    def stand_in(self, stage: int) -> list[int]:
        """Install the gates in the process of ``stage``.  The returned list has the number of gates that it passed."""
        from thaw_runtime.engine.vllm.executors import StageExecutor

        passed, begun, compute = [0], [0], StageExecutor.compute

        def guarded(executor: Any, output: Any, received: Any) -> Any:
            begun[0] += 1
            if stage + 1 < self._n_stages:
                os.write(self._pipes[stage + 1][1], b".")
            computed = compute(executor, output, received)
            if stage and self.SKIPPED < begun[0] <= self.SKIPPED + self.GUARDED:
                self._pass(stage, begun[0] + 1)
                passed[0] += 1
            return computed

        self._heard = 0
        StageExecutor.compute = guarded  # type: ignore[method-assign]
        return passed

    def _pass(self, stage: int, begun: int) -> None:
        while self._heard < begun:
            if not select.select([self._pipes[stage][0]], [], [], WAIT_S)[0]:
                raise SystemExit(f"stage {stage - 1} never began its batch {begun}")
            self._heard += len(os.read(self._pipes[stage][0], 1))


class Growing:
    """Full workers, which get the rest of their bytes when their stage has begun to answer."""

    BEGUN = 12  # batches

    def __init__(self, stages: Sequence[int]) -> None:
        self._stages = stages
        self._pipe = os.pipe()

    def stand_in(self) -> threading.Event:
        return after_batches(self.BEGUN)

    def grow(self, stage: int, made: FullStage, begun: threading.Event) -> None:
        def run() -> None:
            if begun.wait(WAIT_S):
                made.rest_arrives()
            made.engine.load_rest()
            if made.engine.wait_whole(WAIT_S):
                os.write(self._pipe[1], b".")

        if stage in self._stages:
            threading.Thread(target=run, daemon=True).start()

    def wait_all(self) -> None:
        for _ in self._stages:
            if not select.select([self._pipe[0]], [], [], WAIT_S)[0]:
                raise SystemExit("a full worker never had its whole model")
            os.read(self._pipe[0], 1)


def after_batches(n: int) -> threading.Event:
    """Return an event that is set once this process's stage has computed ``n`` batches."""
    from thaw_runtime.engine.vllm.executors import StageExecutor

    begun, count, compute = threading.Event(), [0], StageExecutor.compute

    def counting(executor: Any, output: Any, received: Any) -> Any:
        count[0] += 1
        if count[0] == n:
            begun.set()
        return compute(executor, output, received)

    StageExecutor.compute = counting  # type: ignore[method-assign]
    return begun


def misbehave(fault: str, in_round: int | str) -> None:
    """Let this stage do something else when it shall send the KV blocks of a round (a number, or "last")."""
    from thaw_runtime.engine.vllm import kv_sender
    from thaw_runtime.engine.vllm.kv_sender import KvSender

    send, send_all = KvSender.send, KvSender._send_parts

    def faulty(sender: KvSender, wanted: Any) -> None:
        if wanted.round == in_round or (in_round == "last" and wanted.last):
            if fault in ("die", "hang"):
                os.kill(os.getpid(), signal.SIGKILL if fault == "die" else signal.SIGSTOP)
            KvSender._send_parts = {"delay": late, "twice": twice, "backwards": backwards}[fault]  # type: ignore[method-assign]
        else:
            KvSender._send_parts = send_all  # type: ignore[method-assign]
        send(sender, wanted)

    def late(sender: KvSender, parts: Sequence[Any]) -> None:
        threading.Event().wait(0.5)
        send_all(sender, parts)

    def twice(sender: KvSender, parts: Sequence[Any]) -> None:
        send_all(sender, [part for part in parts for _ in range(2)])

    def backwards(sender: KvSender, parts: Sequence[Any]) -> None:
        send_all(sender, [*parts[-1:], *reversed(parts[:-1])])

    kv_sender.PART_BYTES = 1  # type: ignore[misc]  # a part for every layer
    KvSender.send = faulty  # type: ignore[method-assign]


def plant(error: str, stage: int) -> None:
    """Plant an error into the data that stage 1 sends, or into the data that stage 0 loads and keeps.

    The checks would notice it; with ", unchecked" they are switched off, so that the tokens must show it.  With ", once"
    stage 1 sends it in the first attempt only.
    """
    error, _, how = error.partition(", ")
    if how == "unchecked" and stage == 0:
        check_nothing()
    if stage == 1:
        plant_in_blocks(error, attempts=1 if how == "once" else 1000)
    elif stage == 0 and error == "other weight":
        plant_in_weights()
    elif stage == 0 and error == "kept prefixes":
        from thaw_runtime.pipeline.block_copies import BlockCopies

        BlockCopies.unusable = lambda *args: set()  # type: ignore[method-assign]


def check_nothing() -> None:
    from thaw_runtime.engine.vllm.kv_blocks import KvBlocks
    from thaw_runtime.engine.vllm.verification import Verification

    scatter = KvBlocks.scatter
    Verification.check_weights = Verification.check_blocks = lambda *args: iter(())  # type: ignore[method-assign, assignment]
    KvBlocks.scatter = lambda blocks, name, wanted, data, added: scatter(  # type: ignore[method-assign]
        blocks, name, wanted, data, [dict.fromkeys(group, 10**6) for group in added]
    )


def plant_in_blocks(error: str, *, attempts: int) -> None:
    """Plant the error in the blocks of the first ``attempts`` attempts."""
    from thaw_runtime.engine.vllm import kv_sender
    from thaw_runtime.engine.vllm.kv_blocks import KvBlocks
    from thaw_runtime.engine.vllm.kv_sender import KvSender

    gather, layout, grouped, send = KvBlocks.gather, KvBlocks.layout, kv_sender._grouped, KvSender.send
    stale = set[int]()  # the first block of every request is never copied, whichever requests are checked

    def sending(sender: KvSender, wanted: Any) -> None:
        if wanted.attempt > attempts:
            KvBlocks.gather, KvBlocks.layout = gather, layout  # type: ignore[method-assign]
            kv_sender._grouped = grouped
        stale.clear()
        stale.update(ids[0] for request in sender._runner.requests.values() for ids in request.block_ids if ids)
        send(sender, wanted)

    def spoilt(blocks: KvBlocks, name: str, ids: Any) -> Any:
        copy = gather(blocks, name, ids)
        if len(copy) > 3 and error == "swapped blocks":
            copy[[0, 2]] = copy[[2, 0]]
        elif error == "stale block":
            copy[[i for i, block in enumerate(ids[blocks._group_of[name]]) if block in stale]] = 0
        return copy

    def crossed(layers: dict[str, memoryview]) -> Any:
        a, b = list(layers)[:2]
        layers[a], layers[b] = layers[b], layers[a]
        return grouped(layers)

    def other_layout(blocks: KvBlocks, name: str) -> str:
        return layout(blocks, name).replace("float32", "bfloat16")

    KvSender.send = sending  # type: ignore[method-assign]
    if error == "other layer":
        kv_sender._grouped = crossed
    elif error == "other layout":
        KvBlocks.layout = other_layout  # type: ignore[method-assign]
    else:
        KvBlocks.gather = spoilt  # type: ignore[method-assign]


def plant_in_weights(layer: int = 7) -> None:
    """Let a full worker get a layer's weights 5 % too large, after its own part.  By default, it is the last layer."""
    from thaw_runtime.engine.vllm.background_load import BackgroundLoad

    run = BackgroundLoad._run

    def other_weight(load: Any) -> None:
        load_weights = load._model.load_weights
        load._model.load_weights = lambda tensors: load_weights(
            (name, tensor * 1.05 if f".{layer}.mlp.down" in name else tensor) for name, tensor in tensors
        )
        run(load)

    BackgroundLoad._run = other_weight  # type: ignore[method-assign]


def digest(engine: Any) -> dict[str, str]:
    """The digests of every parameter's bits, and of the output of every module that multiplies.

    All modules get the same input.  Their outputs are compared because their weights may be packed.
    """
    import torch

    runner = engine._core.model_executor.runner
    found = {name: _sha(p.data) for name, p in runner.model.named_parameters()}
    with torch.inference_mode():
        for path, module in runner.model.named_modules():
            if hasattr(module, "cpu_linear"):
                widths = ("input_size_per_partition", "input_size", "embedding_dim")
                width = next(getattr(module, name) for name in widths if hasattr(module, name))
                made = torch.randn(3, width, generator=torch.Generator().manual_seed(1), dtype=runner.dtype)
                found[f"{path}()"] = _sha(module.quant_method.apply(module, made, None))
    return found


def _sha(tensor: Any) -> str:
    import torch

    return hashlib.sha256(tensor.cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()).hexdigest()


def drop_residual() -> None:
    """Let the stages after the first lose the residual of the layers before them."""
    from thaw_runtime.engine.vllm import executors

    whole = executors.from_host
    executors.from_host = lambda tensors: {name: t * (name != "residual") for name, t in whole(tensors).items()}
