"""A pipeline that becomes one worker or two, as its containers see it: the real proxy and wire, and the toy engine."""

from __future__ import annotations

import json
import os
import queue
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from relay.clients.channel import Channel
from relay.clients.http_unix import UnixConnection
from relay.protocol.messages import GroupCredential, GroupLink, LlmInit, StageShape
from tests.thaw_runtime.conftest import STREAM, TOY, Container, frames, llm_init, run_body
from tests.thaw_runtime.fake_descriptor_socket import FakeDescriptorSocket
from tests.thaw_runtime.models import write_tiny_model
from tests.thaw_runtime.test_engine_link import Played, ends, played
from thaw import wire
from thaw.errors import ErrorInfo, ModelUnsupported, ProtocolError, WorkerLost
from thaw.ids import GroupId, random_hex_id
from thaw.plan import StageRole, TransportKind
from thaw_runtime.engine.protocol import Consolidated
from thaw_runtime.engine.wire import Consolidate, ConsolidationDone, decode, encode

__all__ = ["played"]
LONG = {"prompt": "hello", "max_tokens": 300, "temperature": 1.0}
WAIT_S = 20.0


def stages(url: str, fate: str, second: StageRole) -> list[LlmInit]:
    """Return the values of /init for a pipeline of two stages.  ToyEngine describes ``fate``."""
    whole = llm_init(args={"lost_after_s": 5.0} | ({"consolidate": fate} if fate else {}))
    parts = ((0, 1), StageRole.FULL), ((1, 2), second)
    shapes = tuple(StageShape(part, 1 << 30, 1 << 20, role) for part, role in parts)
    link = GroupLink(TransportKind.REDIS, url, GroupCredential("", ""))
    whole = replace(whole, group_id=GroupId(random_hex_id()), n_stages=2, link=link, stages=shapes)
    return [replace(whole, stage=k, layers=s.layers, role=s.role) for k, s in enumerate(shapes)]


@pytest.fixture
def fate() -> str:
    return ""


@pytest.fixture
def second() -> StageRole:
    return StageRole.LOW


@pytest.fixture
def pipeline(tmp_path: Path, relay_url: str, fate: str, second: StageRole) -> Iterator[tuple[Container, Container]]:
    """Two containers that answer together."""
    descriptor_socket = FakeDescriptorSocket(write_tiny_model(tmp_path / "model"), tmp_path / "socket")
    made: list[Container] = []
    for k, init in enumerate(stages(relay_url, fate, second)):
        (tmp_path / str(k)).mkdir()
        made.append(Container(TOY, tmp_path / str(k), descriptor_socket))
        made[k].wait_listening()
        assert made[k].ask("POST", "/init", {"value": init})[0] == 200
    yield made[0], made[1]
    for container in made:
        container.close()
    descriptor_socket.close()


def health(container: Container) -> tuple[int, bool]:
    found = container.ask("GET", "/health")[1]
    return found["stages"], found["consolidating"]


class Elsewhere(threading.Thread):
    """A request on a connection of its own, for an answer that comes later."""

    def __init__(self, container: Container, method: str = "POST") -> None:
        super().__init__(daemon=True)
        self._container, self._method = container, method
        self.answers: queue.SimpleQueue[tuple[int, Any]] = queue.SimpleQueue()
        self.start()

    def run(self) -> None:
        with closing(UnixConnection(self._container.socket, timeout=60)) as http:
            http.request(self._method, "/consolidate", b"{}")
            reply = http.getresponse()
            self.answers.put((reply.status, json.loads(reply.read())))


def await_begin(container: Container) -> None:
    until_s = time.monotonic() + WAIT_S
    while not health(container)[1]:
        assert time.monotonic() < until_s


def test_a_pipeline_becomes_one_worker_in_the_middle_of_an_answer_and_misses_no_other_stage(
    pipeline: tuple[Container, Container],
) -> None:
    first, second = pipeline
    whole = [m["token_id"] for m in first.stream(LONG)[:-1]]
    assert health(first) == (2, False)
    other = UnixConnection(first.socket, timeout=60)
    other.request("POST", "/run", wire.dumps(run_body(LONG, "completions")), STREAM)
    reply = other.getresponse()
    answer = frames(reply)
    begun = [next(answer)["token_id"]]
    status, report = first.ask("POST", "/consolidate", {})
    assert (status, report["rounds"], report["n_bytes"], report["tail_bytes"]) == (200, 2, 4096, 64)
    assert health(first) == (1, False)
    second.close()
    rest = list(answer)
    assert begun + [m["token_id"] for m in rest[:-1]] == whole
    assert rest[-1]["t"] == "RunFinished"
    assert [m["token_id"] for m in first.stream(LONG)[:-1]] == whole
    other.close()


def test_the_report_brings_the_events_of_its_trace(pipeline: tuple[Container, Container]) -> None:
    begin, end = pipeline[0].ask("POST", "/consolidate", {})[1]["events"]
    assert (begin["name"], end["name"], end["n_bytes"]) == ("consolidate.begin", "consolidate.end", 4096)
    assert (end["stage"], end["host"], len(end["group_id"])) == (0, "h1", 32)
    said = {name: end["attrs"][name] for name in ("stages", "rounds", "tail_bytes", "stall_s")}
    assert said == {"stages": 2, "rounds": 2, "tail_bytes": 64, "stall_s": 0.0}


def test_one_worker_does_not_become_one_again_and_gives_its_report_again(
    pipeline: tuple[Container, Container], relay_url: str
) -> None:
    first, second = pipeline
    assert first.ask("GET", "/consolidate")[0] == 404
    report = first.ask("POST", "/consolidate", {})[1]
    status, refused = first.ask("POST", "/consolidate", {})
    assert (status, refused["info"]["code"]) == (409, "Conflict")
    assert first.ask("GET", "/consolidate") == (200, report)
    status, refused = second.ask("POST", "/consolidate", {})
    assert (status, refused["info"]["code"]) == (400, "BadRequest")


def test_a_container_of_one_stage_is_one_worker_already(ready: Container) -> None:
    assert health(ready) == (1, False)
    assert ready.ask("POST", "/consolidate", {})[0] == 409


def test_a_container_that_does_not_serve_yet_becomes_no_worker(container: Container) -> None:
    status, refused = container.ask("POST", "/consolidate", {})
    assert (status, refused["info"]["code"]) == (500, "InstanceGone")


@pytest.mark.parametrize("fate", ["no room for the KV cache"])
def test_an_engine_that_cannot_is_a_pipeline_still_and_may_be_asked_again(
    pipeline: tuple[Container, Container],
) -> None:
    first = pipeline[0]
    for _ in range(2):
        status, refused = first.ask("POST", "/consolidate", {})
        assert (status, refused["info"]["code"], refused["error"]) == (
            502,
            "ModelUnsupported",
            "no room for the KV cache",
        )
        assert refused["events"][-1]["attrs"]["error"] == "no room for the KV cache"
    assert health(first) == (2, False)
    assert len(first.stream(LONG)) == 301


@pytest.mark.parametrize("fate", ["raises"])
def test_a_defect_of_the_engines_consolidation_fails_no_request(pipeline: tuple[Container, Container]) -> None:
    status, refused = pipeline[0].ask("POST", "/consolidate", {})
    assert (status, refused["info"]["code"]) == (500, "PlatformError")
    assert "KeyError" in refused["error"]
    assert len(pipeline[0].stream(LONG)) == 301


@pytest.mark.parametrize("fate", ["never ends"])
def test_one_that_is_under_way_is_not_begun_twice_and_any_number_may_wait_for_it(
    pipeline: tuple[Container, Container],
) -> None:
    first = pipeline[0]
    asked = Elsewhere(first, "POST")
    await_begin(first)
    status, refused = first.ask("POST", "/consolidate", {})
    assert (status, refused["info"]["code"]) == (409, "Conflict")
    waits = Elsewhere(first, "GET")
    assert len(first.stream(LONG)) == 301  # the pipeline answers meanwhile
    assert asked.answers.empty()
    engine = int(first.out.read_text().split()[1])
    os.kill(engine, signal.SIGKILL)
    for one in (asked, waits):
        status, refused = one.answers.get(timeout=WAIT_S)
        assert (status, refused["info"]["code"]) == (500, "WorkerLost")


# a later stage that stays ------------------------------------------------------------------------------------------

STAYS = pytest.mark.parametrize("second", [StageRole.FULL])


@STAYS
@pytest.mark.parametrize("asked_first", [True, False])
def test_a_later_stage_that_stays_is_a_worker_once_stage_0_has_switched_and_answers_the_same(
    pipeline: tuple[Container, Container], *, asked_first: bool
) -> None:
    first, second = pipeline
    whole = [m["token_id"] for m in first.stream(LONG)[:-1]]
    if asked_first:
        asked = Elsewhere(second)
        await_begin(second)
        assert health(second) == (2, True)
        assert [m["token_id"] for m in first.stream(LONG)[:-1]] == whole
        assert asked.answers.empty()
    assert first.ask("POST", "/consolidate", {})[0] == 200
    if not asked_first:
        asked = Elsewhere(second)
    status, report = asked.answers.get(timeout=WAIT_S)
    assert (status, report["n_bytes"], report["build_s"]) == (200, 0, 0.001)
    end = report["events"][-1]
    assert (end["name"], end["stage"], end["attrs"]["worker"], end["attrs"]["build_s"]) == (
        "consolidate.end",
        1,
        1,
        0.001,
    )
    assert health(second) == (1, False)
    for container in pipeline:
        assert [m["token_id"] for m in container.stream(LONG)[:-1]] == whole
    first.close()
    assert [m["token_id"] for m in second.stream(LONG)[:-1]] == whole
    assert second.ask("POST", "/consolidate", {})[0] == 409


@STAYS
def test_before_that_it_answers_no_request_and_ends_with_its_pipeline(pipeline: tuple[Container, Container]) -> None:
    first, second = pipeline
    first.stream({**LONG, "max_tokens": 1})  # stage 0 waits for the first word of stage 1 longer than for others
    asked = Elsewhere(second)
    await_begin(second)
    status, refused = second.ask("POST", "/run", run_body(LONG, "completions"))
    assert (status, refused["info"]["code"]) == (500, "InstanceGone")
    os.kill(int(second.out.read_text().split()[1]), signal.SIGKILL)
    status, refused = asked.answers.get(timeout=WAIT_S)
    assert (status, refused["info"]["code"]) == (500, "WorkerLost")
    assert first.stream(LONG)[-1]["t"] == "RunFailed"


def test_a_stage_without_memory_for_the_whole_model_stays_with_nobody_and_survives_the_switch(
    pipeline: tuple[Container, Container],
) -> None:
    first, second = pipeline
    assert first.ask("POST", "/consolidate", {})[0] == 200
    assert second.ask("POST", "/consolidate", {})[0] == 400
    assert health(second) == (2, False)


# the link between proxy and engine ---------------------------------------------------------------------------------

REPORT = Consolidated(3, 1000, 10, 0.5, 0.001)


@pytest.mark.parametrize("outcome", [REPORT, ErrorInfo("ModelUnsupported", "no", "stay")])
def test_both_ends_of_the_wire_read_every_outcome(outcome: Consolidated | ErrorInfo) -> None:
    assert decode(encode(ConsolidationDone(outcome))) == ConsolidationDone(outcome)
    assert decode(encode(Consolidate())) == Consolidate()


def test_the_link_waits_for_the_engines_outcome(played: Played) -> None:
    answers: queue.SimpleQueue[object] = queue.SimpleQueue()

    def consolidate() -> None:
        try:
            answers.put(played.link.consolidate())
        except (ModelUnsupported, WorkerLost) as e:
            answers.put(e)

    for said in (ErrorInfo("ModelUnsupported", "not yet"), REPORT):
        threading.Thread(target=consolidate, daemon=True).start()
        assert played.heard() == Consolidate()
        played.says(ConsolidationDone(said))
        got = answers.get(timeout=WAIT_S)
        assert got == said or (isinstance(got, ModelUnsupported) and got.message == "not yet")
    threading.Thread(target=consolidate, daemon=True).start()
    assert played.heard() == Consolidate()
    ends(played, None)
    assert isinstance(answers.get(timeout=WAIT_S), WorkerLost)
    with pytest.raises(WorkerLost, match="the engine process was killed by SIGKILL"):
        played.link.consolidate()  # as if it had begun a moment before


def test_a_damaged_outcome_ends_the_channel_as_any_damaged_message_does() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        for plain in ({"t": "ConsolidationDone"}, {"t": "ConsolidationDone", "is": "int", "outcome": 3}):
            Channel(ours).send(plain)
            with pytest.raises(ProtocolError):
                decode(Channel(theirs).receive()[0])
