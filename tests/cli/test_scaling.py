"""``thaw action warm`` and ``scale``, ``thaw top``, and what follows calls."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import KEY, Run
from tests.cli.fake_gateway import FakeGateway
from thaw.cli.following import ended

HERE = "/api/v1/namespaces/_"
READY = {"action": "guest/x", "state": "ready", "expected_s": 0.0, "hosts": ["h0"]}
STARTING = {"action": "guest/x", "state": "starting", "expected_s": 2.5, "hosts": ["h0", "h1"]}


def test_warm_says_when_the_first_answer_is_expected(at: Run, gateway: FakeGateway) -> None:
    gateway.answers[f"POST {HERE}/warm/x"] = (200, STARTING)
    done = at("action", "warm", "x")
    assert done.stdout == "ok: x starts on h0, h1, and its first answer is expected in 2.50 s\n"
    assert json.loads(at("action", "warm", "x", "--json").stdout) == STARTING
    assert "wait_s" not in gateway.asked[0].query


def test_warm_waits_until_it_is_ready_if_asked(at: Run, gateway: FakeGateway) -> None:
    gateway.answers[f"POST {HERE}/warm/x"] = [(200, STARTING), (200, STARTING), (200, READY)]
    assert at("action", "warm", "x", "--wait").stdout == "ok: x is warm on h0\n"
    assert [a.query for a in gateway.asked] == [{"wait_s": "20.0"}] * 3


def test_scale_sends_what_was_given_and_shows_what_is(at: Run, gateway: FakeGateway) -> None:
    found = {"action": "guest/x", "version": "0.0.3", "min_instances": 1, "max_instances": 4, "keep_alive_s": 60.0}
    for method in ("GET", "PUT"):
        gateway.answers[f"{method} {HERE}/scaling/tools/x"] = (200, found)
    done = at("action", "scale", "tools/x", "--min", "1", "--max", "4", "--keep-alive", "60")
    assert gateway.asked[-1].body == {"min_instances": 1, "max_instances": 4, "keep_alive_s": 60.0}
    assert done.stdout.split("\n")[-3].split() == ["/guest/x", "0.0.3", "1", "4", "60.00", "s"]
    assert json.loads(at("action", "scale", "tools/x", "--json").stdout) == found
    assert gateway.asked[-1].method == "GET"


def test_a_buffer_is_refused_with_what_there_is_instead(at: Run, gateway: FakeGateway) -> None:
    done = at("action", "scale", "x", "--buffer", "1")
    assert (done.returncode, gateway.asked) == (144, [])
    assert "--min keeps instances" in done.stderr


def test_top_prints_what_runs_starts_and_waits_and_where(at: Run, gateway: FakeGateway) -> None:
    worker = {"action": "guest/chat", "version": "0.0.1", "host": "h0", "device": "cpu", "slots": 8}
    reply = {
        "mark": "m",
        "now_ms": 10_000,
        "workers": [
            {**worker, "state": "ready", "idle_since_ms": 7_000},
            {**worker, "host": "h1", "state": "ready"},
            {**worker, "host": "h2", "state": "starting", "stage": 1, "n_stages": 2, "due_ms": 12_500},
        ],
        "waiting": [{"action": "guest/chat", "n_requests": 3, "oldest_ms": 9_000}],
    }
    gateway.answers[f"GET {HERE}/work"] = (200, reply)
    gateway.answers["GET /api/v1/thaw/work"] = (200, {**reply, "workers": [], "waiting": []})
    shown = at("top").stdout
    assert shown.startswith("2 containers run, 1 start, 3 requests wait\n")
    lines = [" ".join(line.split()) for line in shown.splitlines()]
    assert "/guest/chat 0.0.1 h0 cpu 8 idle for 3.00 s" in lines
    assert "/guest/chat 0.0.1 h1 cpu 8 busy" in lines
    assert "/guest/chat 0.0.1 h2 cpu 2 of 2 8 starting, first answer in 2.50 s" in lines
    assert "/guest/chat 3 1.00 s" in lines
    assert json.loads(at("top", "--json").stdout) == reply
    assert at("top", "--all").stdout == "0 containers run, 0 start, 0 requests wait\n"


def test_the_logs_of_calls_are_polled_for_a_while(at: Run, gateway: FakeGateway) -> None:
    record = {"activationId": "b" * 32, "name": "x", "start": 5, "logs": ["… stdout: hello"]}
    gateway.answers[f"GET {HERE}/activations"] = (200, [record])
    done = at("activation", "poll", "--exit", "0.2", "--since-minutes", "5")
    assert done.stderr == "Enter Ctrl-c to exit.\nPolling for activation logs\n"
    assert done.stdout == f"\nActivation: 'x' ({'b' * 32})\n[\n    \"… stdout: hello\"\n]\n"
    assert gateway.asked[-1].query["docs"] == "true"


class Calls:
    """Answers with the newest of ``records`` that began at ``since`` or later."""

    def __init__(self) -> None:
        self.records: list[dict[str, Any]] = []
        self.asked: list[dict[str, Any]] = []

    def get(self, _path: str, **params: Any) -> list[dict[str, Any]]:
        self.asked.append(params)
        found = sorted(self.records, key=lambda r: -r["start"])
        return [r for r in found if r["start"] >= (params.get("since") or 0)][: params["limit"]]


def test_following_forgets_no_call_and_asks_for_shorter_pages_as_they_fill() -> None:
    calls = Calls()
    following = ended(calls, since_ms=0)  # type: ignore[arg-type]
    seen = []
    for first in range(0, 400, 40):
        calls.records += [{"activationId": str(i), "start": i} for i in range(first, first + 40)]
        seen += [next(following)["activationId"] for _ in range(40)]
    late = {"activationId": "late", "start": 345}
    calls.records.append(late)
    assert next(following) == late, "it began earlier and ended later"
    assert seen == [str(i) for i in range(400)]
    assert calls.asked[-1]["since"] > 200


def test_a_platform_that_holds_no_requests_is_not_asked_all_the_time(at: Run, gateway: FakeGateway) -> None:
    gateway.answers[f"GET {HERE}/activations"] = (200, [])
    done = at("activation", "poll")
    assert done.returncode == 244
    assert "this platform holds no requests" in done.stderr
    assert len(gateway.asked) == 6
    gateway.asked.clear()
    assert at("activation", "get", "b" * 32, "--wait", "30").returncode == 148
    assert len(gateway.asked) == 1


@pytest.mark.parametrize("words", [["logs", "x", "-f"], ["logs", "/guest/x", "--follow"]])
def test_following_a_function_s_logs_prints_what_its_calls_print(
    at: Run, gateway: FakeGateway, words: list[str]
) -> None:
    place = HERE if words[1] == "x" else "/api/v1/namespaces/guest"
    gateway.answers[f"GET {place}/logs/x"] = (200, {"outputs": [], "unanswered": []})
    record = {"activationId": "b" * 32, "start": 5, "logs": ["hello"]}
    gateway.answers[f"GET {HERE}/activations"] = [(200, []), (200, [record]), (503, {"error": "enough", "code": "c"})]
    done = at("action", *words)
    assert done.stdout == "hello\n"
    assert {a.query.get("name") for a in gateway.asked[1:]} == {"x"}


def test_top_on_a_terminal_asks_again_only_with_what_it_shows(gateway: FakeGateway, home: Path) -> None:
    first, second = ({"mark": mark, "now_ms": 0, "workers": [], "waiting": []} for mark in "ab")
    second["waiting"] = [{"action": "guest/chat", "n_requests": 7, "oldest_ms": 0}]
    over = {"error": "enough", "code": "c"}
    gateway.answers[f"GET {HERE}/work"] = [(200, first), (200, second), (503, over)]
    ours, theirs = os.openpty()
    done = subprocess.run(
        [sys.executable, "-m", "thaw.cli.main", "top", "--apihost", gateway.url, "--auth", KEY],
        env=os.environ | {"HOME": str(home), "TERM": "xterm", "COLUMNS": "100", "LINES": "30"},
        stdout=theirs,
        stderr=subprocess.PIPE,
        text=True,
        timeout=60,
        check=False,
    )
    os.close(theirs)
    shown = os.read(ours, 1 << 16).decode()
    os.close(ours)
    assert done.returncode == 247, done.stderr
    assert "7 requests wait" in shown
    assert [a.query for a in gateway.asked] == [{}, *({"known": mark, "wait_s": "20.0"} for mark in "ab")]
