"""``thaw action warm`` and ``scale``, ``thaw top``, and the commands that follow calls."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tests.cli.conftest import KEY, Run
from tests.cli.fake_gateway import HERE, FakeGateway
from thaw.cli.commands.top import _Screen
from thaw.cli.platform_api import pauses
from thaw.cli.platform_api.client import ApiError
from thaw.cli.platform_api.following import ended

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
    gateway.answers[f"GET {HERE}/activations"] = [(200, [record]), (200, [])]
    gateway.answers[f"GET {HERE}/endings"] = (200, {"cursor": "1-0.0", "passed_over": 3, "activations": []})
    done = at("activation", "poll", "--exit", "0.2", "--since-minutes", "5")
    assert done.stderr.startswith("Enter Ctrl-c to exit.\nPolling for activation logs\n")
    assert done.stdout == f"\nActivation: 'x' ({'b' * 32})\n[\n    \"… stdout: hello\"\n]\n"
    listed = next(a for a in gateway.asked if a.path.endswith("/activations"))
    assert listed.query["docs"] == "true"


def test_poll_takes_days_by_one_letter_as_wsk_does(at: Run, gateway: FakeGateway) -> None:
    gateway.answers[f"GET {HERE}/activations"] = (200, [])
    gateway.answers[f"GET {HERE}/endings"] = (200, {"cursor": "1-0.0", "passed_over": 0, "activations": []})
    at("activation", "poll", "-d", "2", "--exit", "0.2")
    listed = next(a.query for a in gateway.asked if a.path.endswith("/activations"))
    assert "name" not in listed
    assert 2 * 86_400_000 <= time.time() * 1000 - float(listed["since"]) < 3 * 86_400_000


class Platform:
    """Reports ended calls as a gateway does: ``told`` holds the answers to followers, one after the other."""

    def __init__(self, *told: Any, listed: Sequence[dict[str, Any]] = ()) -> None:
        self.told, self.listed, self.asked = list(told), listed, 0

    def get(self, path: str, **params: Any) -> Any:
        if path == "activations":
            found = [r for r in self.listed if r["start"] <= (params.get("upto") or r["start"])]
            skip = params.get("skip") or 0
            return found[skip : skip + params["limit"]]
        if "after" not in params:
            return {"cursor": "1-0.0", "passed_over": 0, "activations": []}
        self.asked += 1
        answer = self.told.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return {"cursor": f"1-{self.asked}.1", "passed_over": 0, **answer}


def record(n: int, start: int = 0) -> dict[str, Any]:
    return {"activationId": f"{n:032x}", "start": start}


OVER = ApiError(500, "enough")


def followed(platform: Platform, **asked: Any) -> tuple[list[int], list[int]]:
    """The calls that are shown until the platform has enough, and the numbers that were passed over."""
    shown, passed_over = [], list[int]()
    with pytest.raises(ApiError, match="enough"):
        for one in ended(platform, passed_over=passed_over.append, **asked):  # type: ignore[arg-type]
            shown.append(int(one["activationId"], 16))
    return shown, passed_over


def test_following_shows_each_call_once_in_the_order_of_the_ends_and_tells_what_it_missed() -> None:
    first = {"activations": [record(1, 9), record(2, 3)]}
    second = {"activations": [record(2, 3), record(3, 1)], "passed_over": 7}
    assert followed(Platform(first, second, OVER)) == ([1, 2, 3], [7])


def test_what_began_since_a_time_is_listed_to_its_end_before_anything_is_followed() -> None:
    listed = [record(n, start=n) for n in range(450, 0, -1)]
    platform = Platform({"activations": [record(450, 450), record(451, 451)]}, OVER, listed=listed)
    shown, _ = followed(platform, since_ms=1)
    assert shown == [*range(1, 452)]


def test_a_gateway_that_holds_too_many_is_asked_again_after_a_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    paused: list[float] = []
    monkeypatch.setattr(pauses, "pause", paused.append)
    unheld = {"activations": [], "cursor": "1-0.0"}  # one that is about to end
    throttled, older = ApiError(429, "too many"), ApiError(404, "no such thing")
    assert followed(Platform(throttled, older, unheld, {"activations": [record(1)]}, OVER))[0] == [1]
    assert len(paused) == 3


def test_a_platform_that_does_not_tell_what_ends_is_not_followed(at: Run, gateway: FakeGateway) -> None:
    done = at("activation", "poll")
    assert done.returncode == 244
    assert "this platform does not tell what ends" in done.stderr
    assert len(gateway.asked) == 1


def test_a_record_is_waited_for_where_too_many_are_held_and_at_an_older_gateway(at: Run, gateway: FakeGateway) -> None:
    over, missing = {"error": "too many", "code": "c"}, {"error": "absent", "code": "c"}
    for refused in ((429, over), (404, missing)):
        gateway.answers[f"GET {HERE}/activations/{'b' * 32}"] = [refused, (200, {"activationId": "b" * 32})]
        assert at("activation", "get", "b" * 32, "--wait", "5").returncode == 0
    gateway.answers[f"GET {HERE}/activations/{'b' * 32}"] = (404, missing)
    gateway.asked.clear()
    assert at("activation", "get", "b" * 32, "--wait", "0.2").returncode == 148
    assert len(gateway.asked) in (1, 2), "the first question alone may take the time"


@pytest.mark.parametrize("words", [["logs", "x", "-f"], ["logs", "/guest/x", "--follow"]])
def test_following_a_function_prints_what_its_calls_print(at: Run, gateway: FakeGateway, words: list[str]) -> None:
    place = HERE if words[1] == "x" else "/api/v1/namespaces/guest"
    gateway.answers[f"GET {place}/logs/x"] = (200, {"outputs": [], "unanswered": []})
    record = {"activationId": "b" * 32, "start": 5, "logs": ["hello"]}
    told = {"cursor": "1-0.0", "passed_over": 0, "activations": []}
    news = {"cursor": "1-1.9", "passed_over": 8, "activations": [record]}
    gateway.answers[f"GET {HERE}/endings"] = [(200, told), (200, news), (503, {"error": "enough", "code": "c"})]
    done = at("action", *words)
    assert done.stdout == "hello\n"
    assert [a.query.get("name") for a in gateway.asked[2:]] == ["x", "x"]
    assert "note: 8 calls ended too fast to be followed" in done.stderr


def read_to_end(terminal: int) -> str:
    """Read what is shown until no process has the terminal any more.  The screen is drawn anew several times a second,
    and one read returns 4 KB of it at most.
    """
    data = bytearray()
    with pytest.raises(OSError, match="Input/output error"):
        while True:
            data += os.read(terminal, 1 << 16)
    return data.decode()


def test_top_on_a_terminal_asks_again_only_with_what_it_shows(gateway: FakeGateway, home: Path) -> None:
    first, second = ({"mark": mark, "now_ms": 0, "workers": [], "waiting": []} for mark in "ab")
    second["waiting"] = [{"action": "guest/chat", "n_requests": 7, "oldest_ms": 0}]
    over = {"error": "enough", "code": "c"}
    gateway.answers[f"GET {HERE}/work"] = [(200, first), (200, second), (503, over)]
    ours, theirs = os.openpty()
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(read_to_end, ours)
        try:
            done = subprocess.run(
                [sys.executable, "-m", "thaw.cli.main", "top", "--apihost", gateway.url, "--auth", KEY],
                env=os.environ | {"HOME": str(home), "TERM": "xterm", "COLUMNS": "100", "LINES": "30"},
                stdout=theirs,
                stderr=subprocess.PIPE,
                text=True,
                timeout=300,
                check=False,
            )
        finally:
            os.close(theirs)
        shown = reading.result(60)
    os.close(ours)
    assert done.returncode == 247, done.stderr
    assert "7 requests wait" in shown
    assert [a.query for a in gateway.asked] == [{}, *({"known": mark, "wait_s": "20.0"} for mark in "ab")]


def test_times_on_the_screen_go_on_while_nothing_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = [100.0]
    monkeypatch.setattr("thaw.cli.commands.top.time.monotonic", lambda: now_s[0])
    worker = {"action": "guest/f", "version": "0.0.1", "host": "h0", "device": "cpu", "slots": 1}
    workers = [{**worker, "state": "ready", "idle_since_ms": 7_000}]
    shown = _Screen({"mark": "m", "now_ms": 10_000, "workers": workers, "waiting": []})
    now_s[0] += 5

    def text() -> str:
        console = Console(width=120)
        with console.capture() as captured:
            console.print(shown.now())
        return captured.get()

    assert "idle for 8.00 s" in text()
