"""A later stage of a group in consolidation_case.py that stays: it is asked to, and answers when it has become a worker.

A case with ``"keep": n`` keeps the first n stages.  It may have:

``ends``     {stage: at}: the stage kills itself when stage 0 has "parted" or when it has "built" its engine core, or it
             has another weight than the pipeline ("weight")
``late``     these stages are asked only after stage 0 has left
"""

from __future__ import annotations

import json
import os
import signal
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from relay.protocol.messages import LlmInit
from tests.thaw_runtime.pipeline_probe import Stage, requests
from tests.thaw_runtime.pipeline_stand_ins import WAIT_S, plant_in_weights
from thaw.errors import ErrorInfo
from thaw_runtime.engine.protocol import ConsolidationEnded, Failed, Token


def stays(case: dict[str, Any], init: LlmInit) -> bool:
    return 0 < init.stage < case.get("keep", 1)


def later_worker(case: dict[str, Any], model: Path, init: LlmInit, directory: Path) -> None:
    """Run the stage, ask it to stay, and write its state and its answers to a file."""
    at = case.get("ends", {}).get(str(init.stage))
    ends_at(at)
    made = Stage(model, init, directory)
    engine: Any = made.engine
    outcomes: list[ConsolidationEnded] = []
    told = threading.Event()

    def ended(outcome: ConsolidationEnded) -> None:
        outcomes.append(outcome)
        told.set()

    if init.stage in case.get("late", ()):
        when_left(engine, lambda: engine.consolidate(ended))
    else:
        engine.consolidate(ended)
    made.rest_arrives()
    if not told.wait(WAIT_S):
        raise SystemExit("it was never told what has become of it")
    answers: dict[str, list[list[int]]] = {}
    if not isinstance(outcomes[0], ErrorInfo):
        answers = {work: ask(made, work) for work in case["works"]}
        answers |= {f"{work}, again": ask(made, work, "again-") for work in case["works"]}
    report = {
        "outcome": [repr(o) for o in outcomes],
        "answers": answers,
        "kept_blocks": kept_blocks(engine) if answers else 0,
        "strangers": strangers(engine) if answers else [],
        "refuses": [] if answers else refusal(made),
    }
    (directory / f"{init.group_id}-{init.stage}").write_text(json.dumps(report))
    engine.stop()
    engine.join()


def report_of(init: LlmInit, directory: Path) -> dict[str, Any]:
    """Return the report that a later worker has written; it is empty when the worker ended before."""
    path = directory / f"{init.group_id}-{init.stage}"
    return json.loads(path.read_text()) if path.exists() else {}


def ask(made: Stage, work: str, prefix: str = "") -> list[list[int]]:
    asked = [replace(r, request_id=f"later-{prefix}{r.request_id}") for r in requests(work)]
    return [[e.token_id for e in events if isinstance(e, Token)] for events in made.ask(asked)]


def refusal(made: Stage) -> list[str]:
    """Return the error codes with which it refuses a request."""
    (events,) = made.ask(requests("one"))
    return [e.error.code for e in events if isinstance(e, Failed)]


def kept_blocks(engine: Any) -> int:
    pool = engine._core.scheduler.kv_cache_manager.block_pool
    return int(pool.num_gpu_blocks - 1 - pool.get_num_free_blocks())


def strangers(engine: Any) -> list[str]:
    """Return the requests of the pipeline that the runner still knows."""
    return [name for name in engine._core.model_executor.runner.requests if not name.startswith(("later-", "cons"))]


def when_left(engine: Any, then: Any) -> None:
    """Call ``then`` when the engine waits for it, because stage 0 has left."""
    staying = engine._staying
    wait = staying.wait

    def waiting(is_stopping: Any) -> Any:
        threading.Thread(target=then, daemon=True).start()
        return wait(is_stopping)

    staying.wait = waiting


def ends_at(at: str | None) -> None:
    from thaw_runtime.engine.vllm import engine
    from thaw_runtime.pipeline.staying import Staying

    if at == "parted":
        Staying.wait = lambda *args: die()  # type: ignore[method-assign]
    elif at == "built":
        engine.verify = lambda *args: die()
    elif at == "weight":
        plant_in_weights(layer=0)


def die() -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("it is dead")
