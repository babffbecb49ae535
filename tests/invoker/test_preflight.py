"""A preflight forks a stem cell, gives it the small files, and leaves nothing; its result is kept."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from invoker.containers import preflight, spare_cells
from invoker.drivers.base import Handle, Spec
from invoker.drivers.process import zygote
from tests.invoker import fake_zygote
from tests.invoker.llm_host import LlmHost, fake_engine
from tests.invoker.platform import until
from thaw import wire
from thaw.action import KIND_LLM
from thaw.config import parse_llm_config
from thaw.ids import InstanceId

__all__ = ["fake_engine"]

FOUND = {"engine": "toy 1.0", "max_model_len": 512, "notes": ["a note"], "embeds": True, "most_stages": 2}
UNPRINTED = {"printed": "", "printed_out": ""}


class Asked(LlmHost):
    waits: list[float | None]
    """The waits for memory, a stem cell or a turn that have begun."""

    def noted(self, wait: Callable[[float | None], bool]) -> Callable[[float | None], bool]:
        self.waits = []

        def noting(left_s: float | None = None) -> bool:
            self.waits.append(left_s)
            return wait(left_s)

        return noting

    def preflight(
        self, deadline_ms: int = 20_000, namespace: str = "guest", waits: bool = False, **config: Any
    ) -> tuple[int, Any]:
        plain = {"kind": KIND_LLM, "model": {"uri": "s3://models/m"}, **config}
        parsed = wire.to_plain(parse_llm_config(plain))
        wanted = {"config": parsed, "deadline_ms": deadline_ms, "namespace": namespace, "waits": waits}
        status, answer = self.ask("POST", "/preflight", json.dumps(wanted))
        return status, json.loads(answer)

    def answered(self, reply: object, **config: Any) -> tuple[int, Any]:
        """The answer to a preflight whose container replies with this."""
        known = set(self.run_dir.glob("door-*.init"))
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(self.preflight, **config)
            until(lambda: answer.done() or bool(set(self.run_dir.glob("door-*.init")) - known))
            for path in set(self.run_dir.glob("door-*.init")) - known:
                path.write_text(json.dumps(reply))
            return answer.result()

    def answered_after(self, change: Callable[[], object], **config: Any) -> tuple[int, Any]:
        """The answer to a preflight that waits until the change, after which its container replies."""
        n_waits = len(self.waits)
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(self.answered, FOUND, waits=True, **config)
            until(lambda: len(self.waits) > n_waits)
            assert self.fetchd.requests == [], "it holds nothing while it waits"
            change()
            return answer.result()

    def engine_cells(self) -> int:
        return sum(c.kind == KIND_LLM for c in self.agent.cells.view())


@pytest.fixture
def host(valkey_url: str, run_dir: Path, fake_engine: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Asked]:
    monkeypatch.setattr(zygote, "PROGRAM", [fake_zygote.__file__])
    with Asked(valkey_url, run_dir, stem_cells="on") as made:
        made.agent.port.preflights._fetch = made.fetchd
        until(made.engine_cells)
        ledger = made.agent.fleet.ledger
        monkeypatch.setattr(ledger._changed, "wait", made.noted(ledger._changed.wait))
        held = dict(ledger.holders())
        yield made
        assert {k: v for k, v in ledger.holders().items() if "preflight" in k} == {}
        assert held.keys() <= ledger.holders().keys()
        assert (made.fetchd.open, made.fetchd.holders) == (set(), set()), "something is left at fetchd"


def test_the_stem_cell_gets_the_small_files_and_its_answer_is_kept(host: Asked) -> None:
    expected = {"uri": "s3://models/m", "model_version": "00", **FOUND, "unchecked": "", "busy": False}
    assert host.answered(FOUND) == (200, expected)
    assert [r.file for r in host.fetchd.requests[0].ranges] == ["config.json", "tokenizer.json"]
    assert host.answered("nobody is asked") == (200, expected)
    assert len(host.fetchd.requests) == 1
    assert host.answered({**FOUND, "engine": "toy 2.0"}, engine={"max_model_len": 64})[1]["engine"] == "toy 2.0"
    assert len(host.fetchd.requests) == 2


def test_an_engine_that_checks_nothing_does_not_say_what_the_model_does(host: Asked) -> None:
    assert host.answered({"engine": "", "max_model_len": 0})[1]["embeds"] is None


def test_it_takes_a_share_of_the_cores_and_what_is_spare_of_the_pool(
    host: Asked, monkeypatch: pytest.MonkeyPatch
) -> None:
    specs: list[Spec] = []
    create = host.agent.driver.create
    monkeypatch.setattr(host.agent.driver, "create", lambda spec: (specs.append(spec), create(spec))[1])
    host.answered(FOUND)
    (forked,) = [s for s in specs if s.labels.get("role") == "preflight"]
    assert (forked.share, forked.memory_bytes) == (spare_cells.SHARE, spare_cells.FORK_BYTES)
    assert [r.spare for r in host.fetchd.requests] == [True]
    host.fetchd.files = {"config.json": 2, "tokenizer.json": preflight.MOST_FETCHED}
    assert "small files have more than 128 MiB" in host.preflight(engine={"max_model_len": 64})[1]["unchecked"]
    assert len(host.fetchd.requests) == 1


def test_a_refusal_is_answered_as_the_error_of_the_start_and_kept(host: Asked) -> None:
    info = {"code": "ModelUnsupported", "message": "no such architecture", "hint": "take another"} | UNPRINTED
    refused = host.answered({"status": 502, "error": info["message"], "info": info})
    assert refused == (502, {"error": "no such architecture", "info": info})
    assert host.answered("nobody is asked") == refused
    assert len(host.fetchd.requests) == 1


def test_a_container_that_breaks_has_said_nothing(host: Asked) -> None:
    status, found = host.answered({"exit": 3})
    assert (status, "the stem cell gave no answer" in found["unchecked"]) == (200, True)
    info = {"code": "PlatformError", "message": "a bug", "hint": ""} | UNPRINTED
    assert host.answered({"status": 500, "error": "a bug", "info": info})[1]["unchecked"] == "a bug"
    assert host.answered(FOUND)[1]["engine"] == "toy 1.0", "what nobody said is not kept"


def test_missing_files_are_told_without_a_stem_cell(host: Asked) -> None:
    host.fetchd.files = {"config.json": 2, "vocab.json": 3}
    status, found = host.preflight()
    assert (status, found["error"]) == (502, "s3://models/m has no tokenizer.json, only the files of a slow tokenizer")
    assert host.fetchd.requests == []


def test_without_a_stem_cell_or_memory_or_time_the_host_says_that_it_could_not_look(
    host: Asked, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as full:
        full.setattr(spare_cells, "FORK_BYTES", 1 << 40)
        found = host.preflight(waits=True)[1]
        assert (found["unchecked"], found["busy"]) == ("the host has less memory than a check takes", False)
    fork = preflight.Preflights._fork

    def slow_fork(self: preflight.Preflights, instance_id: InstanceId, descriptor_socket: str) -> Handle:
        threading.Event().wait(1.1)
        return fork(self, instance_id, descriptor_socket)

    with monkeypatch.context() as slow:
        slow.setattr(preflight.Preflights, "_fork", slow_fork)
        assert host.preflight(1_000)[1]["unchecked"] == "the check took too long"
    host.agent.cells.set_target(KIND_LLM, 0)
    until(lambda: not host.engine_cells())
    assert host.preflight(waits=True)[1]["unchecked"] == "the host keeps no stem cell of the engine"
    host.agent.cells.set_target(KIND_LLM, 1)
    until(host.engine_cells)


def test_a_check_waits_until_the_stem_cell_is_there(host: Asked) -> None:
    (cell,) = [c for c in host.agent.cells.view() if c.kind == KIND_LLM]
    host.agent.cells.give_up(cell)  # as a start that needs the memory does
    now = host.preflight()[1]
    assert (now["unchecked"], now["busy"]) == ("the host has no stem cell of the engine now", True)
    assert host.answered_after(host.agent.cells.refill)[1]["engine"] == "toy 1.0"


def test_a_check_waits_for_memory_and_a_start_that_expects_it_goes_first(host: Asked) -> None:
    ledger = host.agent.fleet.ledger
    assert ledger.take("an instance", ledger.free_bytes)
    full = host.preflight()[1]
    assert (full["unchecked"], full["busy"]) == ("the host has no memory to spare now", True)

    def gives_way_to_a_start() -> None:
        ledger.expect("a start", ledger.total_bytes)
        n_waits = len(host.waits)
        ledger.give_back("an instance")
        until(lambda: len(host.waits) > n_waits)
        assert not [owner for owner in ledger.holders() if "preflight" in owner]
        ledger.give_back("a start")

    assert host.answered_after(gives_way_to_a_start)[1]["engine"] == "toy 1.0"


def test_a_wait_ends_while_there_is_time_for_an_answer(host: Asked) -> None:
    ledger = host.agent.fleet.ledger
    assert ledger.take("an instance", ledger.free_bytes)
    found = host.preflight(400, waits=True)[1]
    ledger.give_back("an instance")
    assert (found["unchecked"], found["busy"]) == ("the host has no memory to spare now", True)


def test_more_at_once_than_a_host_has_cores_for_wait(host: Asked, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spare_cells, "FORK_BYTES", 1 << 20)
    host.fetchd.is_up.clear()
    with ThreadPoolExecutor(spare_cells.AT_ONCE + 1) as pool:
        names = [f"tenant-{k}" for k in range(spare_cells.AT_ONCE)]
        answers = [pool.submit(host.preflight, 5_000, names[0])]
        until(lambda: len(host.fetchd.requests) == 1)
        assert host.preflight(namespace=names[0])[1]["unchecked"] == "the host is busy with other checks", "one of each"
        answers += [pool.submit(host.preflight, 5_000, name) for name in names[1:]]
        until(lambda: len(host.fetchd.requests) == spare_cells.AT_ONCE)
        assert host.preflight(namespace="another")[1]["unchecked"] == "the host is busy with other checks"
        n_waits = len(host.waits)
        waits = pool.submit(host.answered, FOUND, namespace="another", waits=True, engine={"max_model_len": 64})
        until(lambda: len(host.waits) > n_waits)
        host.fetchd.is_up.set()
        assert waits.result()[1]["engine"] == "toy 1.0"
        for answer in answers:
            answer.result()


def test_checks_of_one_model_that_wait_for_one_another_ask_the_engine_once(host: Asked) -> None:
    host.fetchd.is_up.clear()
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(host.answered, FOUND)
        until(lambda: len(host.fetchd.requests) == 1)
        n_waits = len(host.waits)
        second = pool.submit(host.preflight, waits=True)
        until(lambda: len(host.waits) > n_waits)
        host.fetchd.is_up.set()
        assert first.result() == second.result()
    assert len(host.fetchd.requests) == 1


@pytest.mark.parametrize("scaling", [{"stages": 2}, {"max_stages": 2}, {"max_batch": 2}, {"stages": 2, "keep": 1}])
def test_an_answer_holds_for_the_stages_for_which_it_was_given(host: Asked, scaling: dict[str, int]) -> None:
    host.answered(FOUND)
    assert host.answered({**FOUND, "engine": "toy 2.0"}, scaling=scaling)[1]["engine"] == "toy 2.0"
    assert host.answered("nobody is asked", scaling={**scaling, "keep_alive_s": 1.0})[1]["engine"] == "toy 2.0"


def test_a_model_at_which_the_engine_looks_for_too_long_is_not_looked_at_again_at_once(host: Asked) -> None:
    for _ in range(2):
        assert host.preflight(4000)[1]["unchecked"] == "the engine looked at the model for too long"
    assert len(host.fetchd.requests) == 1
