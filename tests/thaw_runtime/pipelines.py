"""One process of pipeline_probe.py for all the tests of a worker: it imports vLLM once, and answers with plain vLLM once.

Its import and the references take longer than most pipelines, and several modules ask for the same references.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

ROOT = Path(__file__).parents[2]
WORKS = ("greedy", "seeded", "penalties", "long", "lasting", "continued", "one", "three", "many")
Case = dict[str, Any]
Plain = dict[str, dict[str, list[list[int]]]]
"""The tokens of every answer, by family and work."""


class Pipelines:
    """Runs the cases of pipeline_probe.py.  Its process starts with the first case, and anew after a case that failed."""

    def __init__(self, relay_url: str) -> None:
        self._url = relay_url
        self._plain: Plain = {}
        self._process: subprocess.Popen[str] | None = None
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115  close() closes it

    def __enter__(self) -> Pipelines:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def ask(self, cases: Sequence[Case]) -> tuple[list[Case], str]:
        """Return the results in the order of the cases, up to a case that fails, and the end of the process's output
        then."""
        process = self._running()
        assert process.stdin is not None
        assert process.stdout is not None
        with suppress(BrokenPipeError):
            process.stdin.write(json.dumps(cases) + "\n")
            process.stdin.flush()
        found: dict[int, Case] = {}
        has_ended = False
        for line in process.stdout:
            if line.startswith("ANSWER "):
                _, number, answer = line.split(" ", 2)
                found[int(number)] = json.loads(answer)
            elif has_ended := line == "ENDED\n":
                break
        if not has_ended:
            self._end()
        return [found[number] for number in sorted(found)], "" if has_ended else self._said()

    def answers(self, cases: Sequence[Case]) -> list[Case]:
        """The results of all cases."""
        found, error = self.ask(cases)
        assert len(found) == len(cases), error
        return found

    def plain(self, cases: Sequence[Case]) -> Plain:
        """Return plain vLLM's answers to the works of these cases.  It computes only works that were not computed
        before."""
        wanted: list[Case] = []
        for family in dict.fromkeys(c["family"] for c in cases):
            known = self._plain.get(family, {})
            mine = [c for c in cases if c["family"] == family]
            asked = {work for c in mine for key in ("works", "before", "then") for work in c.get(key, ())}
            if works := [w for w in WORKS if w in asked and w not in known]:
                wanted.append({"family": family, "n_stages": 0, "works": works})
        for answer in self.answers(wanted) if wanted else ():
            self._plain.setdefault(answer["family"], {}).update(answer["answers"])
        return self._plain

    def close(self) -> None:
        self._end()
        self._errors.close()

    def _running(self) -> subprocess.Popen[str]:
        if self._process is None:
            env = dict(os.environ, PYTHONPATH=f"{ROOT}:{ROOT / 'runtime-python'}")
            self._process = subprocess.Popen(
                [sys.executable, str(Path(__file__).parent / "pipeline_probe.py"), self._url],
                env=env,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                text=True,
                start_new_session=True,
            )
        return self._process

    def _end(self) -> None:
        """End the process, and the stages of a case that did not come to its end."""
        process, self._process = self._process, None
        if process is None:
            return
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(30)
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with suppress(BrokenPipeError):  # a case that it no longer read
                    pipe.close()

    def _said(self) -> str:
        self._errors.seek(0)
        said = self._errors.read()[-4000:]
        self._errors.seek(0)
        self._errors.truncate()
        return said
