"""One group that becomes one worker while it answers, in forked processes: a case of pipeline_probe.py.

A case has ``"consolidate": true``, and may have:

``transport``   "redis" (default), "tcp" or "object"
``before``      these works are answered before the consolidation begins
``then``        these works are answered after the consolidation (default: those of before, and all works again)
``at_once``     all works are submitted together; otherwise one after the other
``resumes``     each request continues an answer of which it knows the first tokens
``leaves``      another request is aborted after that number of tokens
``faults``      {stage: [fault, round]}; a fault is "die", "hang", "delay", "twice" or "backwards", a round a number or
                "last": what the stage does when it shall send that round's blocks
``plant``       an error in the copied blocks, in the late weights, or in the bookkeeping (pipeline_stand_ins.plant)
``tries``       how often the consolidation is tried, if it fails (default 1)
``release``     the other stages are killed after the switch, as their hosts do
``keep``        so many stages become workers (scale_up_case.py)
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from relay.protocol.messages import GroupLink, LlmInit
from tests.thaw_runtime.pipeline_probe import RESERVE, Stage, fork, inits, requests
from tests.thaw_runtime.pipeline_stand_ins import WAIT_S, after_batches, be_impatient, misbehave, plant
from tests.thaw_runtime.scale_up_case import later_worker, report_of, stays
from thaw.errors import ErrorInfo
from thaw.plan import TransportKind
from thaw_runtime.engine.protocol import ConsolidationEnded, EngineRequest, Event, Failed, Sampling, Token

BEGUN = 12  # batches of stage 0 before its consolidation begins
LEAVER = EngineRequest("leaver", tuple(range(3, 60)), Sampling(64, temperature=0.0), 0)


def consolidation(case: dict[str, Any], model: Path, url: str, directory: Path) -> dict[str, Any]:
    full = range(case.get("keep", 1))
    made = inits(
        model,
        case["n_stages"],
        url,
        full=full,
        dtype=case.get("dtype", "float32"),
        reserve=case.get("reserve", RESERVE),
    )
    plans = [replace(init, link=link_of(case, init, directory)) for init in made]
    report, (told, tell) = directory / plans[0].group_id, os.pipe()

    def stage(init: LlmInit) -> None:
        prepare(case, init.stage)
        if init.stage == 0:
            report.write_text(json.dumps(FirstStage(case, model, init, directory).run(lambda: release(told))))
        elif stays(case, init):
            later_worker(case, model, init, directory)
        else:
            Stage(model, init, directory).engine.join()

    pids = [fork(lambda init=init: stage(init)) for init in plans]
    os.write(tell, json.dumps(pids[1:]).encode())
    statuses = [os.waitstatus_to_exitcode(os.waitpid(pids[0], 0)[1])]
    is_one = report.exists() and "Consolidated(" in report.read_text()
    for pid in pids[1:]:
        is_left = pid not in pids[: case.get("keep", 1)]  # after the switch it waits for its host, which ends it
        if any(fault == "hang" for fault, _ in case.get("faults", {}).values()) or (is_left and is_one):
            os.kill(pid, signal.SIGKILL)  # a stopped process never ends; another one has ended by now
        statuses.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    os.close(told)
    os.close(tell)
    later = {str(plan.stage): report_of(plan, directory) for plan in plans if stays(case, plan)}
    return json.loads(report.read_text()) | {"statuses": statuses, "later": later}


def link_of(case: dict[str, Any], init: LlmInit, directory: Path) -> GroupLink:
    assert init.link is not None
    kind = case.get("transport", "redis")
    if kind == "object":
        store = directory / "store"
        store.mkdir(exist_ok=True)
        return replace(init.link, kind=TransportKind.OBJECT, address=store.as_uri())
    return replace(init.link, host_address="127.0.0.1") if kind == "tcp" else init.link


def prepare(case: dict[str, Any], stage: int) -> None:
    """Change this process before its engine starts."""
    be_impatient()
    if fault := case.get("faults", {}).get(str(stage)):
        misbehave(*fault)
    if "plant" in case:
        plant(case["plant"], stage)


def release(told: int) -> None:
    for pid in json.loads(os.read(told, 4096)):
        os.kill(pid, signal.SIGKILL)


class FirstStage:
    """Stage 0: it is asked, is consolidated meanwhile, and is asked the same again."""

    def __init__(self, case: dict[str, Any], model: Path, init: LlmInit, directory: Path) -> None:
        self._case = case
        begun = after_batches(BEGUN)
        self._made = Stage(model, init, directory)
        self._outcomes: list[ConsolidationEnded] = []
        self._largest_batch = 0
        self._count_batches()
        self._known: dict[str, list[Answer]] = {}
        self._may_begin, self._ended = threading.Event(), threading.Event()
        threading.Thread(target=self._consolidate, args=(begun,), daemon=True).start()

    def run(self, release_others: Callable[[], None]) -> dict[str, Any]:
        made, works, before = self._made, self._case["works"], self._case.get("before", [])
        earlier = self._ask("", before)
        self._known = self._ask("known-", works) if self._case.get("resumes") else {}
        self._may_begin.set()
        if "leaves" in self._case:
            made.engine.submit(LEAVER)
            threading.Thread(target=self._leave, daemon=True).start()
        first = earlier | self._ask("", works, together=self._case.get("at_once", False))
        first |= self._meanwhile(works) if {"plant", "faults"} & self._case.keys() else {}
        if not self._ended.wait(WAIT_S):
            raise SystemExit("the consolidation never ended")
        if self._case.get("release"):
            release_others()
        again = self._ask("again-", self._case.get("then", [*before, *works]))
        report = {
            "answers": {w: [e.tokens for e in first[w]] for w in first}
            | {f"{w}, then": [e.tokens for e in again[w]] for w in again},
            "errors": sorted({e.error for found in (first, again) for w in found for e in found[w]} - {""}),
            "in_order": all(e.in_order for found in (first, again) for w in found for e in found[w]),
            "outcome": [repr(outcome) for outcome in self._outcomes],
            "leaver": Answer(made.events.get("leaver", [])).tokens,
            "kept_blocks": self._kept_blocks(),
            "largest_batch": self._largest_batch,
        }
        made.engine.stop()
        made.engine.join()
        return report

    def _meanwhile(self, works: Sequence[str]) -> dict[str, list[Answer]]:
        """Ask the works again until the consolidation is over, so that errors and faults meet open requests.

        On a slow machine the first requests end before the rest of the model is there.
        """
        found, give_up_s = dict[str, list[Answer]](), time.monotonic() + WAIT_S
        while not self._ended.is_set() and time.monotonic() < give_up_s:
            answers = self._ask(f"more-{len(found)}-", works)
            found |= {f"{work}, {len(found)} more": answers[work] for work in works}
        return found

    def _consolidate(self, begun: threading.Event) -> None:
        def ended(outcome: ConsolidationEnded) -> None:
            self._outcomes.append(outcome)
            if isinstance(outcome, ErrorInfo) and len(self._outcomes) < self._case.get("tries", 1):
                self._made.engine.consolidate(ended)
            else:
                self._ended.set()

        self._may_begin.wait(WAIT_S)
        begun.wait(WAIT_S)
        self._made.rest_arrives()
        self._made.engine.consolidate(ended)

    def _leave(self) -> None:
        self._made.wait("leaver", self._case["leaves"])
        self._made.engine.abort("leaver")

    def _ask(self, prefix: str, works: Sequence[str], *, together: bool = False) -> dict[str, list[Answer]]:
        asked = {work: [self._request(prefix, work, i) for i in range(len(requests(work)))] for work in works}
        if together:
            for each in asked.values():
                for request in each:
                    self._made.engine.submit(request)
            return {w: [Answer(self._made.wait(r.request_id), r.output_so_far) for r in asked[w]] for w in asked}
        return {
            w: [Answer(events, r.output_so_far) for events, r in zip(self._made.ask(asked[w]), asked[w], strict=True)]
            for w in asked
        }

    def _request(self, prefix: str, work: str, i: int) -> EngineRequest:
        request = requests(work)[i]
        request = replace(request, request_id=prefix + request.request_id)
        known = self._known[work][i].tokens[: i + 1] if work in self._known else []
        return replace(request, first_index=len(known), output_so_far=tuple(known))

    def _count_batches(self) -> None:
        """Note the largest number of requests in one batch of the one worker."""
        engine: Any = self._made.engine
        schedule = engine._core.scheduler.schedule

        def counted(*args: Any, **kwargs: Any) -> Any:
            output = schedule(*args, **kwargs)
            if engine._whole:
                self._largest_batch = max(self._largest_batch, len(output.num_scheduled_tokens))
            return output

        engine._core.scheduler.schedule = counted

    def _kept_blocks(self) -> int:
        """The KV blocks that are neither free nor vLLM's null block, now that no request is open."""
        pool = self._made.engine._core.scheduler.kv_cache_manager.block_pool  # type: ignore[attr-defined]
        return int(pool.num_gpu_blocks - 1 - pool.get_num_free_blocks())


class Answer:
    """The events of one request."""

    def __init__(self, events: list[Event], so_far: tuple[int, ...] = ()) -> None:
        found = [e for e in events if isinstance(e, Token)]
        self.tokens = [*so_far, *(e.token_id for e in found)]
        self.in_order = [e.index for e in found] == list(range(len(so_far), len(self.tokens)))
        last = events[-1] if events else None
        self.error = last.error.code if isinstance(last, Failed) else ""
