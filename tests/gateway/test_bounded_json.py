"""Bounds on JSON, checked before any object is made of it."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from queue import Empty, Queue
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.api import bounded_json
from gateway.api.bounded_json import MAX_CONTAINERS, MAX_DEPTH, MAX_VALUES, parse
from thaw.errors import BadRequest, TooLarge

MIB = 1024 * 1024


def nested(depth: int, begin: str = "[", end: str = "]") -> bytes:
    return (begin * depth + "0" + end * depth).encode()


def test_json_as_deep_as_allowed_is_read_and_deeper_is_refused() -> None:
    assert parse(nested(MAX_DEPTH)) is not None
    assert parse(nested(MAX_DEPTH, '{"a": ', "}")) is not None
    for deep in (nested(MAX_DEPTH + 1), nested(980), nested(MAX_DEPTH + 1, '{"a": ', "}"), b"[" * 60_000):
        with pytest.raises(BadRequest, match="nested deeper than 128 levels"):
            parse(deep)


def test_wide_json_has_a_limit() -> None:
    assert len(parse(b"[" + b"0," * (MAX_VALUES - 1) + b"0]")) == MAX_VALUES
    assert len(parse(b"[" + b"[]," * (MAX_CONTAINERS - 2) + b"[]]")) == MAX_CONTAINERS - 1
    for wide in (b"0," * MAX_VALUES, b"[]," * MAX_CONTAINERS, b'{"a":1},' * MAX_CONTAINERS):
        with pytest.raises(TooLarge, match="more than 262144 values"):
            parse(b"[" + wide + b"0]")


@pytest.mark.parametrize(
    "text",
    ["[{," * 100_000, '"' * 200_000, "\\" * 100_001, '\\"[' * 100_000, "]" * 100_000, "ü[" * 70_000 + "\\"],
    ids=["marks", "quotes", "backslashes", "escapes", "brackets", "utf-8"],
)
def test_what_is_in_a_string_does_not_count(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for window in (7, 1000, 1024 * 1024):
        monkeypatch.setattr(bounded_json, "_WINDOW_BYTES", window if len(text) < 1000 else max(window, 1000))
        value = [[text] for _ in range(MAX_DEPTH)]
        assert parse(json.dumps(value, ensure_ascii=False).encode()) == value


@given(
    st.recursive(st.text(alphabet='ab\\"[{,]}\n', max_size=5), lambda s: st.lists(s) | st.dictionaries(st.text(), s))
)
def test_every_window_finds_the_same(value: Any) -> None:
    data = json.dumps([*([0] for _ in range(MAX_DEPTH)), value]).encode()
    for window in (1, 2, 3, 50):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(bounded_json, "_WINDOW_BYTES", window)
            bounded_json.check(data)


@pytest.mark.parametrize("text", ["NaN", "Infinity", "-Infinity", "1e999", "-1e999", "1" * 400 + ".0", "1" * 5000])
def test_a_number_that_json_cannot_hold_is_refused(text: str) -> None:
    with pytest.raises(BadRequest, match="The request content was malformed"):
        parse(f'{{"a": {text}}}'.encode())


def test_48_mb_of_empty_lists_are_refused_within_256_mib() -> None:
    """The parser runs in a process of its own, which gets no more memory than that."""
    code = (
        "import resource; from gateway.api import bounded_json; from thaw.errors import TooLarge\n"
        "data = b'[' + b'[],' * (16 * 1024 * 1024) + b'0]'\n"
        "resource.setrlimit(resource.RLIMIT_DATA, (256 * 1024 * 1024,) * 2)\n"
        "try: bounded_json.parse(data)\n"
        "except TooLarge: print('refused')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout == "refused\n", done.stderr


def test_checking_code_of_48_mb_takes_less_than_parsing_it() -> None:
    data = json.dumps({"exec": {"code": 'a[{,"\\\n' * (6 * MIB)}}).encode()
    assert cpu_s(lambda: bounded_json.check(data)) < 5 * cpu_s(lambda: json.loads(data)) + 0.1


def cpu_s(run: Any) -> float:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_utime
    run()
    return resource.getrusage(resource.RUSAGE_SELF).ru_utime - before


def test_one_long_text_is_parsed_at_a_time_and_a_short_one_does_not_wait_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A thread that parses a long text runs between any two steps of all requests, so several of them would delay
    all."""
    begun, go_on = Queue[int](), threading.Event()

    def strict(text: str) -> Any:
        if len(text) > 100_000:
            begun.put(len(text))
            assert go_on.wait(60)
        return json.loads(text)

    monkeypatch.setattr(bounded_json.wire, "strict", strict)
    long_ones = [json.dumps("x" * n).encode() for n in (100_000, 200_000)]
    with ThreadPoolExecutor(2) as pool:
        try:
            parsed = [pool.submit(bounded_json.parse, long_ones[0])]
            begun.get(timeout=60)
            parsed.append(pool.submit(bounded_json.parse, long_ones[1]))
            assert bounded_json.parse(b'{"short": 1}') == {"short": 1}
            with pytest.raises(Empty):
                begun.get(timeout=0.2)
        finally:
            go_on.set()
        assert [len(one.result(60)) for one in parsed] == [100_000, 200_000]
