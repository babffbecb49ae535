"""Pipelines of forked processes with a real relay server, and plain vLLM for comparison.  Prints one JSON object per
line.

One process imports vLLM and forks everything else, as a zygote does, so a stage costs a second of CPU instead of ten.
``python pipeline_probe.py RELAY_URL`` reads lines from stdin (pipelines.py writes them), each a JSON list of cases
``{"family", "n_stages", "works", "mutation"}``; 0 stages means plain vLLM.  It answers with a line ``ANSWER NUMBER {…case,
"answers": {work: [token ids]}, …}`` for each case, by its place in the list, and with ``ENDED`` behind the last one.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from relay.protocol.messages import GroupCredential, GroupLink, LlmInit, StageShape
from tests.thaw_runtime.fake_descriptor_socket import WEIGHTS, FakeDescriptorSocket, model_parts
from tests.thaw_runtime.families import FAMILIES, VOCAB
from tests.thaw_runtime.kv_probe import in_child, make_checkpoint
from tests.thaw_runtime.models import read_segment
from tests.thaw_runtime.pipeline_stand_ins import (
    WAIT_S,
    Gates,
    Growing,
    be_impatient,
    count_resumed,
    die_in_a_batch,
    digest,
    drop_residual,
    leave_blocks,
)
from thaw import partition
from thaw.config import EngineConfig, LlmConfig, ModelConfig, ScalingConfig
from thaw.ids import ActionName, GroupId, HostId, random_hex_id
from thaw.plan import StageRole, TransportKind
from thaw_runtime.engine import main as engine_main
from thaw_runtime.engine.protocol import EngineRequest, Event, Failed, Sampling, Token
from thaw_runtime.engine.registry import find_engine
from thaw_runtime.engine.vllm import env as engine_env
from thaw_runtime.engine.vllm.warm import warm_up

MAX_MODEL_LEN = 384
RESERVE = 512 << 20
MOST_BESIDE = 2
"""So many pipelines may wait for a silent stage while another one computes."""

N_TOKENS = 64


def prompts(n: int, length: int = 12) -> list[tuple[int, ...]]:
    return [tuple((i * 131 + j * 37 + 5) % VOCAB for j in range(length + i)) for i in range(n)]


def requests(work: str) -> list[EngineRequest]:
    """The requests that are submitted together."""
    sampling = {
        "greedy": Sampling(N_TOKENS, temperature=0.0),
        "seeded": Sampling(N_TOKENS, temperature=1.0, top_p=0.95),
        "penalties": Sampling(
            N_TOKENS,
            temperature=0.8,
            top_k=50,
            presence_penalty=1.0,
            frequency_penalty=0.5,
            repetition_penalty=1.1,
            min_tokens=4,
            logit_bias={7: 2.0},
            logprobs=2,
        ),
        "long": Sampling(N_TOKENS, temperature=1.0),
        "lasting": Sampling(300, temperature=1.0),
        "continued": Sampling(N_TOKENS, temperature=1.0, presence_penalty=1.0),
        "one": Sampling(N_TOKENS, temperature=0.7, logprobs=3),
        "three": Sampling(N_TOKENS, temperature=0.0, repetition_penalty=1.2),
        "many": Sampling(N_TOKENS, temperature=0.9, frequency_penalty=0.3),
    }[work]
    n, length = {"long": (8, 260), "lasting": (8, 70), "one": (1, 40), "three": (3, 40), "many": (16, 30)}.get(
        work, (8, 12)
    )
    asked = prompts(n, length)
    return [EngineRequest(f"{work}-{i}", prompt, sampling, 100 + i) for i, prompt in enumerate(asked)]


def continued(asked: Sequence[EngineRequest], whole: Sequence[Sequence[int]]) -> list[EngineRequest]:
    """The same requests, each interrupted after a different number of tokens."""
    return [
        replace(r, request_id=f"{r.request_id}-again", first_index=cut, output_so_far=tuple(tokens[:cut]))
        for cut, (r, tokens) in enumerate(zip(asked, whole, strict=True), 1)
    ]


# ── one pipeline ──────────────────────────────────────────────────────────────────────────────────────────────────


def inits(
    model: Path,
    n_stages: int,
    url: str,
    *,
    reserve: int = RESERVE,
    max_model_len: int = MAX_MODEL_LEN,
    dtype: str = "float32",
    full: Sequence[int] = (),
) -> list[LlmInit]:
    """The plans of a pipeline.  The stages in ``full`` are full workers, the others low workers."""
    group, parts = GroupId(random_hex_id()), model_parts(model)
    bounds = partition.split(parts, n_stages)
    held = [(0, len(parts.layers)) if k in full else b for k, b in enumerate(bounds)]
    roles = [StageRole.FULL if k in full else StageRole.LOW for k in range(n_stages)]
    shapes = tuple(
        StageShape(b, reserve, partition.size(partition.ranges(parts, h)), role)
        for b, h, role in zip(bounds, held, roles, strict=True)
    )
    link = GroupLink(TransportKind.REDIS, url, GroupCredential("", ""))
    config = LlmConfig(
        "llm:vllm",
        ModelConfig("test"),
        EngineConfig(dtype, max_model_len, {"block_size": 32}),
        scaling=ScalingConfig(max_batch=8),
    )
    return [
        LlmInit(
            ActionName("guest/chat"),
            group,
            k,
            n_stages,
            b,
            config,
            reserve,
            1.0,
            1,
            HostId("h1"),
            roles[k],
            link=link if n_stages > 1 else None,
            stages=shapes if n_stages > 1 else (),
        )
        for k, b in enumerate(bounds)
    ]


class Stage:
    """An engine in this process, with its segment and its answers."""

    def __init__(self, model: Path, init: LlmInit, directory: Path, *, trickle: bool = False) -> None:
        self.events: dict[str, list[Event]] = {}
        self.changed = threading.Condition()
        self.packed_early = 0
        self._loading = threading.Event()
        self._watch_loading()
        full = init.n_stages > 1 and init.role is StageRole.FULL
        self._descriptor_socket = FakeDescriptorSocket(
            model,
            directory / f"socket{init.stage}-{init.group_id}",
            arrived=not (trickle or full),
            layers=init.layers if init.n_stages > 1 else None,
            full=full,
        )
        if full:
            self._descriptor_socket.arrive(self._descriptor_socket.first_bytes)
        self._client, segment = read_segment(self._descriptor_socket)
        self.engine = engine_main.load_cold(find_engine("vllm"))(self._emit)
        if trickle:
            threading.Thread(target=self._arrive, daemon=True).start()
        self.started = self.engine.start(init, segment)

    def report(self) -> dict[str, Any]:
        load = next(e for e in self.started.events if e.name == "load.end")
        return {
            "memory": dict(self.started.memory),
            "loaded": load.n_bytes,
            "packed_early": self.packed_early,
            "rehearsal_s": load.attrs.get("rehearsal_s", 0.0),  # a GPU rehearses nothing
        }

    def rest_arrives(self) -> None:
        self._descriptor_socket.arrive(self._descriptor_socket.n_bytes)

    def _arrive(self) -> None:
        """Let the weights arrive within three seconds once the engine waits for them, as over a slow link."""
        descriptor_socket = self._descriptor_socket
        descriptor_socket.arrive(descriptor_socket.sidecar_bytes)
        self._loading.wait(WAIT_S)
        bell = threading.Event()
        for i in range(1, 61):
            descriptor_socket.arrive(
                descriptor_socket.sidecar_bytes
                + (descriptor_socket.n_bytes - descriptor_socket.sidecar_bytes) * i // 60
            )
            bell.wait(0.05)

    def _watch_loading(self) -> None:
        """Note when the engine first waits for weights, and how many modules were packed before the last ones came."""
        from thaw_runtime.engine.vllm.packing import LayerPacker, Rehearsal

        begin, restore = Rehearsal.__init__, LayerPacker.restore

        def beginning(rehearsal: Any, *args: Any) -> None:
            self._loading.set()
            begin(rehearsal, *args)

        def counting(packer: Any) -> None:
            self.packed_early = len(packer._packed)
            restore(packer)

        Rehearsal.__init__ = beginning  # type: ignore[method-assign]
        LayerPacker.restore = counting  # type: ignore[method-assign]

    def ask(self, asked: Iterable[EngineRequest]) -> list[list[Event]]:
        asked = list(asked)
        for request in asked:
            self.engine.submit(request)
        return [self.wait(request.request_id) for request in asked]

    def wait(self, name: str, n_tokens: int = sys.maxsize) -> list[Event]:
        def ready() -> bool:
            have = self.events.get(name, [])
            return len(have) >= n_tokens or (bool(have) and not isinstance(have[-1], Token))

        with self.changed:
            if not self.changed.wait_for(ready, timeout=WAIT_S):
                raise SystemExit(f"{name} never ended")
            return list(self.events[name])

    def _emit(self, events: Iterable[tuple[str, Event]]) -> None:
        with self.changed:
            for name, event in events:
                self.events.setdefault(name, []).append(event)
            self.changed.notify_all()


def tokens(events: list[Event]) -> list[int]:
    if isinstance(events[-1], Failed):
        raise SystemExit(f"a request failed: {events[-1].error}")
    return [e.token_id for e in events if isinstance(e, Token)]


def fork(run: Callable[[], None]) -> int:
    pid = os.fork()
    if pid:
        return pid
    signal.alarm(int(4 * WAIT_S))  # it ends the child also if its parent dies
    status = 1
    try:
        run()
        status = 0
    except BaseException:  # noqa: BLE001  the outermost frame of the child process
        traceback.print_exc()
    sys.stderr.flush()
    os._exit(status)


def pipeline(case: dict[str, Any], model: Path, url: str, directory: Path) -> dict[str, Any]:
    plans = inits(model, case["n_stages"], url, full=case.get("full", ()))
    growing = Growing(case["full"]) if "full" in case else None
    gates = Gates(case["n_stages"]) if case.get("gates") else None
    answers = directory / plans[0].group_id
    answers.mkdir()

    def stage(init: LlmInit) -> None:
        passed = gates.stand_in(init.stage) if gates is not None else [0]
        if "kill" in case:
            be_impatient()
            if init.stage == case["kill"]:
                die_in_a_batch()
        if case.get("scarce"):
            leave_blocks(14)
        resumed = count_resumed()
        begun = growing.stand_in() if growing is not None else None
        made = Stage(model, init, directory, trickle=case.get("trickle", False))
        found: dict[str, Any] = {}
        if growing is not None and begun is not None:
            growing.grow(init.stage, made, begun)
        if init.stage == 0 and "kill" in case:
            found = {work: [ended(events) for events in made.ask(requests(work))] for work in case["works"]}
        elif init.stage == 0:
            found = answered(made, case["works"])
            if growing is not None:
                growing.wait_all()
                found |= {f"{work}, whole": again for work, again in answered(made, case["works"], "again-").items()}
            made.engine.stop()
        made.engine.join()
        report = made.report() | {
            "answers": found,
            "passed_gates": passed[0],
            "resumed": resumed[0],
            "weights": digest(made.engine),
        }
        (answers / str(init.stage)).write_text(json.dumps(report))

    pids = [fork(lambda init=init: stage(init)) for init in plans]
    statuses = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    if "kill" in case:
        told = {
            init.stage: json.loads((answers / str(init.stage)).read_text())
            for init in plans
            if init.stage != case["kill"]
        }
        return {"statuses": statuses, "answers": told[0]["answers"] if 0 in told else {}}
    if any(statuses):
        raise SystemExit(f"stages ended with {statuses}")
    reports = [json.loads((answers / str(init.stage)).read_text()) for init in plans]
    parts = model_parts(model)
    sizes = {
        "checkpoint": partition.size(partition.ranges(parts, (0, len(parts.layers)))),
        "embedding": partition.size(parts.tied),
    }
    return {key: [r[key] for r in reports] for key in reports[0]} | {"answers": reports[0]["answers"]} | sizes


def answered(stage: Stage, works: Sequence[str], prefix: str = "") -> dict[str, list[list[int]]]:
    found = {}
    for work in works:
        asked = [replace(r, request_id=prefix + r.request_id) for r in requests(work)]
        found[work] = [tokens(e) for e in stage.ask(asked)]
    if "continued" in found:  # the rest of each answer is added to its first part
        again = continued(requests("continued"), found["continued"])
        rests = [tokens(e) for e in stage.ask(again)]
        found["continued"] = [[*r.output_so_far, *rest] for r, rest in zip(again, rests, strict=True)]
    return found


def ended(events: list[Event]) -> list[Any]:
    """The number of tokens, and the error that ended them, if there was one."""
    last = events[-1]
    return [len(events) - 1, *((last.error.code, last.error.message) if isinstance(last, Failed) else ())]


# ── plain vLLM ────────────────────────────────────────────────────────────────────────────────────────────────────


def vanilla(case: dict[str, Any], model: Path, directory: Path) -> dict[str, Any]:
    answer = directory / "vanilla"

    def run() -> None:
        from vllm import LLM
        from vllm.model_executor.models import ModelRegistry

        from thaw_runtime.engine.vllm.translation import sampling_params

        llm = LLM(
            model=str(model),
            dtype="float32",
            max_model_len=MAX_MODEL_LEN,
            enforce_eager=True,
            block_size=32,
            kv_cache_memory_bytes=64 << 20,
            gpu_memory_utilization=0.05,  # only this much of a GPU must be free: others may use it too
            max_num_seqs=8,
            max_num_batched_tokens=4096,  # no chunks: seeded ones crash vLLM on a CPU
            skip_tokenizer_init=True,
            distributed_executor_backend="uni",
        )
        found = {}
        for work in case["works"]:
            asked = requests(work)
            inputs: Any = [{"prompt_token_ids": list(r.prompt_token_ids)} for r in asked]
            outputs = llm.generate(inputs, [sampling_params(r) for r in asked], use_tqdm=False)
            found[work] = [list(o.outputs[0].token_ids) for o in outputs]
        config = llm.llm_engine.vllm_config.model_config
        made, _ = ModelRegistry.resolve_model_cls(config.architectures, model_config=config)
        on_transformers = made.__module__.startswith("vllm.model_executor.models.transformers")
        answer.write_text(json.dumps({"answers": found, "on_transformers": on_transformers}))

    in_child(run)
    return json.loads(answer.read_text())


def mutate(model: Path, mutation: str, directory: Path) -> Path:
    """A checkpoint with the same bytes under other names: two layers are swapped."""
    if mutation != "swap":
        return model
    target = directory / "swapped"
    target.mkdir(exist_ok=True)
    for path in model.iterdir():
        (target / path.name).write_bytes(path.read_bytes())
    data = (model / WEIGHTS).read_bytes()
    n = int.from_bytes(data[:8], "little")
    header = data[8 : 8 + n].replace(b".2.", b".@.").replace(b".5.", b".2.").replace(b".@.", b".5.")
    (target / WEIGHTS).write_bytes(data[:8] + header + data[8 + n :])
    return target


def run(case: dict[str, Any], model: Path, url: str, directory: Path) -> dict[str, Any]:
    if case["n_stages"] == 0:
        return vanilla(case, model, directory)
    if case.get("consolidate"):
        from tests.thaw_runtime.consolidation_case import consolidation

        return consolidation(case, model, url, directory)
    return pipeline(case, mutate(model, case.get("mutation", ""), directory), url, directory)


def main() -> None:
    engine_env.prepare(1)
    warm_up()
    import vllm.entrypoints.llm  # noqa: F401  plain vLLM needs it

    with tempfile.TemporaryDirectory() as scratch:
        for line in sys.stdin:
            answer_all(json.loads(line), sys.argv[1], Path(scratch))
            print("ENDED", flush=True)


def answer_all(cases: Sequence[dict[str, Any]], url: str, scratch: Path) -> None:
    """Run the cases one after another.  The cases in which a stage falls silent take ten seconds without computing, so
    other cases run at the same time.
    """
    beside: list[tuple[int, int, Path]] = []
    for number, case in enumerate(cases):
        directory, answer = scratch / case["family"], scratch / f"answer-{number}"
        model = directory / "model"
        if not model.exists():
            directory.mkdir()
            in_child(lambda case=case, model=model: make_checkpoint(FAMILIES[case["family"]], model))

        def child(
            case: dict[str, Any] = case, model: Path = model, directory: Path = directory, answer: Path = answer
        ) -> None:
            if case.get("mutation") == "residual":
                drop_residual()
            answer.write_text(json.dumps(case | run(case, model, url, directory)))

        running = (fork(child), number, answer)
        if not falls_silent(case):
            tell(*running)
            continue
        beside.append(running)
        if len(beside) > MOST_BESIDE:
            tell(*beside.pop(0))
    for running in beside:
        tell(*running)


def falls_silent(case: dict[str, Any]) -> bool:
    return "kill" in case or any(fault in ("die", "hang") for fault, _ in case.get("faults", {}).values())


def tell(pid: int, number: int, answer: Path) -> None:
    """Wait for a case, and print its answer."""
    if os.waitpid(pid, 0)[1] != 0:
        raise SystemExit("a case failed; see above")
    print(f"ANSWER {number} {answer.read_text()}", flush=True)


if __name__ == "__main__":
    main()
